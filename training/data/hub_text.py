"""Text data sets of the Hugging Face Hub: the files of a configuration and a split.

``hf://owner/name`` is all of its files. ``hf://owner/name/CONFIGURATION`` and
``hf://owner/name/CONFIGURATION/SPLIT`` are a part of the Hub's own copy in Parquet, which has a
folder for each; so is a data set that is a program, which is not run.
"""

from collections.abc import Sequence
from pathlib import Path
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
    chosen = _chosen(listed, wanted, name)
    folder = _fetch(copy, chosen)
    return [folder / each for each in chosen]


def _chosen(files: Sequence[str], wanted: Sequence[str], name: str) -> list[str]:
    """The files of a configuration and a split, of which either may be left out.

    Raises:
        InputError: there is no such configuration or split, or only its beginning.
    """
    # CONFIGURATION, split and file of each.
    tables = [each.split("/") for each in files if each.endswith(".parquet")]
    tables = [each for each in tables if len(each) == 3]
    for place, what in enumerate(("configuration", "split")[: len(wanted)]):
        known = sorted({each[place] for each in tables})
        tables = [each for each in tables if each[place] == wanted[place]]
        if not tables:
            raise InputError(
                f"data set {name} has no {what} {wanted[place]!r}: it has {', '.join(known)}"
            )
    chosen = ["/".join(each) for each in tables]
    if any(f"/{_PARTIAL}" in file for file in chosen):
        raise InputError(
            f"the Hub's copy of data set {name} in Parquet has only its beginning: give "
            f"hf://{name}, all of its files"
        )
    return sorted(chosen)


def _fetch(name: str, patterns: Sequence[str]) -> Path:
    return hub.fetch(name, tuple(patterns), kind=_KIND, what=_WHAT)
