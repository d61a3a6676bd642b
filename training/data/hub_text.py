"""Texts of the Hugging Face Hub: which files of a data set belong to a configuration and a split.

``hf://owner/name`` is all of them, ``hf://owner/name/CONFIGURATION`` and
``hf://owner/name/CONFIGURATION/SPLIT`` are a part. The data set's card says what belongs to which;
without that, folders are configurations, and names such as ``train-00000-of-00002.parquet`` tell
the split. Where there are no files of text, but a program that makes them, the Hub's own copy in
Parquet is taken, and the program is not run.
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from contract.errors import InputError
from training.data import hub

PREFIX: Final = "hf://"
_DATASET: Final = "dataset"
_WHAT: Final = "data set"
_CARD: Final = "README.md"
_DEFAULT: Final = "default"
#: The Hub's copy of a data set: CONFIGURATION/SPLIT/0000.parquet.
_CONVERTED: Final = "refs/convert/parquet"
_SPLITS: Final = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}

Layout = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration -> split -> names of files."""


def fetch(source: str, kinds: tuple[str, ...]) -> list[Path]:
    """The files of a text of the Hub, on this node; none where it has no text.

    Args:
        source: ``hf://owner/name[@revision][/CONFIGURATION[/SPLIT]]``.
        kinds: endings of the files that are text.

    Raises:
        InputError: there is no such data set, configuration or split, or the Hub cannot be reached.
    """
    parts = source.removeprefix(PREFIX).rstrip("/").split("/")
    name, wanted = "/".join(parts[:2]), parts[2:]
    if len(wanted) > 2:
        raise InputError(f"--data is {source}: give hf://owner/name/CONFIGURATION/SPLIT")
    if not wanted:
        folder = _fetch(name, [f"*{kind}" for kind in kinds])
        if found := _below(folder, kinds):
            return found
    listed = hub.names(name, kind=_DATASET)
    if listed is None:
        folder = _fetch(name, [_CARD])  # says what is wrong
        raise InputError(f"the Hugging Face Hub does not list the files of data set {name}")
    files = [each for each in listed if each.endswith(kinds)]
    if files:
        card = _fetch(name, [_CARD]) / _CARD if _CARD in listed else None
        layout = _declared(card, files) or by_names(files)
    else:
        name = f"{name.partition('@')[0]}@{_CONVERTED}"
        layout = by_folders(hub.names(name, kind=_DATASET) or [])
    if not layout:
        return []
    chosen = choose(layout, wanted, name.partition("@")[0])
    folder = _fetch(name, chosen)
    if lacking := [each for each in chosen if not (folder / each).is_file()]:
        raise InputError(f"data set {name} lacks {', '.join(lacking[:3])}: try again")
    return [folder / each for each in chosen]


def choose(layout: Layout, wanted: Sequence[str], name: str) -> list[str]:
    """The files of a configuration and a split, of which either may be left out.

    Raises:
        InputError: there is no such configuration or split.
    """
    configurations = [*layout]
    rest = [*wanted]
    if rest and rest[0] in layout:
        configurations = [rest.pop(0)]
    elif rest and (len(rest) == 2 or len(layout) > 1 or rest[0] not in next(iter(layout.values()))):
        raise InputError(
            f"data set {name} has no configuration {rest[0]!r}: it has {', '.join(sorted(layout))}"
        )
    found: list[str] = []
    for configuration in configurations:
        splits = layout[configuration]
        if rest and rest[0] not in splits:
            raise InputError(
                f"configuration {configuration!r} of data set {name} has no split {rest[0]!r}: it "
                f"has {', '.join(sorted(splits))}"
            )
        for split, files in splits.items():
            if not rest or split == rest[0]:
                found += files
    return sorted({*found})


def by_names(files: Iterable[str]) -> Layout:
    """What the names of files tell: ``CONFIGURATION/SPLIT-00000.parquet``, and the like."""
    layout: dict[str, dict[str, list[str]]] = {}
    for file in files:
        *folders, last = PurePosixPath(file).parts
        words = [word for part in (last, *folders) for word in re.split(r"[^a-z]+", part.lower())]
        split = next((_SPLITS[word] for word in words if word in _SPLITS), "train")
        own = [each for each in folders if each.lower() not in (*_SPLITS, "data")]
        layout.setdefault(own[0] if own else _DEFAULT, {}).setdefault(split, []).append(file)
    return layout


def by_folders(files: Iterable[str]) -> Layout:
    """The layout of the Hub's own copy. One that is only the beginning of a split counts too."""
    layout: dict[str, dict[str, list[str]]] = {}
    for file in files:
        parts = PurePosixPath(file).parts
        if len(parts) == 3 and file.endswith(".parquet"):
            split = parts[1].removeprefix("partial-")
            layout.setdefault(parts[0], {}).setdefault(split, []).append(file)
    return layout


def _declared(card: Path | None, files: Sequence[str]) -> Layout:
    """What the ``configs`` of a data set's card say; empty where it has none."""
    from huggingface_hub import metadata_load

    if card is None or not card.exists():
        return {}
    try:
        configs: Any = (metadata_load(card) or {}).get("configs") or []
        layout: dict[str, dict[str, list[str]]] = {}
        for config in configs:
            splits = layout.setdefault(str(config["config_name"]), {})
            for split, patterns in _data_files(config.get("data_files") or []):
                there = [each for each in files if any(fnmatch.fnmatch(each, p) for p in patterns)]
                if there:
                    splits.setdefault(split, []).extend(there)
    except Exception:  # a card is written by hand, and YAML has errors of its own
        return {}
    return {name: splits for name, splits in layout.items() if splits}


def _data_files(given: Any) -> list[tuple[str, list[str]]]:
    """Splits and the patterns of their files, in any of the ways that a card may have them."""
    if isinstance(given, str):
        return [("train", [given])]
    found: list[tuple[str, list[str]]] = []
    for each in given:
        if isinstance(each, str):
            found.append(("train", [each]))
        else:
            path = each["path"]
            found.append((str(each["split"]), [path] if isinstance(path, str) else [*path]))
    return found


def _fetch(name: str, patterns: Sequence[str]) -> Path:
    return hub.fetch(name, tuple(patterns), kind=_DATASET, what=_WHAT)


def _below(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.name.endswith(kinds))
