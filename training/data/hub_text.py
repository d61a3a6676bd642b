"""Text data sets of the Hugging Face Hub: the files of a configuration and a split.

``hf://owner/name`` is all of its files. ``hf://owner/name/CONFIGURATION`` and
``hf://owner/name/CONFIGURATION/SPLIT`` are a part of the Hub's own copy in Parquet, which has a
folder for each; so is a data set that is a program, which is not run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from contract.errors import InputError
from training.data import hub

PREFIX: Final = "hf://"
_KIND: Final = "dataset"
_WHAT: Final = "data set"
#: Revision of the Hub's copy: CONFIGURATION/SPLIT/0000.parquet.
_CONVERTED: Final = "refs/convert/parquet"
#: Before the name of a split of which the copy has only the first gigabytes.
_PARTIAL: Final = "partial-"

Layout = Mapping[str, Mapping[str, Sequence[str]]]
"""Configuration -> split -> names of files."""


def fetch(source: str, kinds: tuple[str, ...]) -> list[Path]:
    """The files of a text of the Hub, on this node; none where it has no text.

    Args:
        source: ``hf://owner/name[@revision]`` or ``hf://owner/name/CONFIGURATION[/SPLIT]``.
        kinds: endings of the files that are text.

    Raises:
        InputError: there is no such data set, configuration or split, or the Hub cannot be reached.
    """
    parts = source.removeprefix(PREFIX).rstrip("/").split("/")
    name, wanted = "/".join(parts[:2]), parts[2:]
    if len(wanted) > 2 or (wanted and "@" in name):
        raise InputError(
            f"--data is {source}: give hf://owner/name[@revision] or "
            "hf://owner/name/CONFIGURATION/SPLIT"
        )
    if not wanted:
        folder = _fetch(name, [f"*{kind}" for kind in kinds])
        if found := sorted(each for each in folder.rglob("*") if each.name.endswith(kinds)):
            return found
    name = name.partition("@")[0]
    copy = f"{name}@{_CONVERTED}"
    listed = hub.names(copy, kind=_KIND)
    if listed is None:
        _fetch(name, ["README.md"])  # its error says what is wrong with the data set, if anything
        raise InputError(
            f"the Hugging Face Hub has no copy of data set {name} in Parquet, which has its "
            f"configurations and splits: give hf://{name}, all of its files"
        )
    chosen = _chosen(_layout(listed), wanted, name)
    folder = _fetch(copy, chosen)
    return [folder / each for each in chosen]


def _layout(files: Sequence[str]) -> Layout:
    layout: dict[str, dict[str, list[str]]] = {}
    for file in files:
        parts = PurePosixPath(file).parts
        if len(parts) == 3 and file.endswith(".parquet"):
            layout.setdefault(parts[0], {}).setdefault(parts[1], []).append(file)
    return layout


def _chosen(layout: Layout, wanted: Sequence[str], name: str) -> list[str]:
    """The files of a configuration and a split, of which either may be left out.

    Raises:
        InputError: there is no such configuration or split, or only its beginning.
    """
    configuration, split = (*wanted, "", "")[:2]
    if configuration and configuration not in layout:
        raise InputError(
            f"data set {name} has no configuration {configuration!r}: it has "
            f"{', '.join(sorted(layout))}"
        )
    splits = [
        (each, files)
        for named, found in layout.items()
        for each, files in found.items()
        if configuration in ("", named)
    ]
    if split and split not in dict(splits):
        raise InputError(
            f"configuration {configuration!r} of data set {name} has no split {split!r}: it "
            f"has {', '.join(sorted(dict(splits)))}"
        )
    chosen = [file for each, files in splits if split in ("", each) for file in files]
    if any(f"/{_PARTIAL}" in file for file in chosen):
        raise InputError(
            f"the Hub's copy of data set {name} in Parquet has only its beginning: give "
            f"hf://{name}, all of its files"
        )
    return sorted(chosen)


def _fetch(name: str, patterns: Sequence[str]) -> Path:
    return hub.fetch(name, tuple(patterns), kind=_KIND, what=_WHAT)
