"""Colors of lines that people read on a terminal: of a run, and of a job that is followed."""

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.text import Text

#: How lines begin and end -> their style.
_STYLES: Final = {
    re.compile(pattern, re.MULTILINE): style
    for pattern, style in {
        r"^epoch \S+ (rank|each|\[GPU).*": "dim",
        r"^(\[worker \w+\] )?node: .*": "dim",
        r"^(epoch|step) .*: .*\bevaluation loss .*": "cyan",
        r"^warning: .*": "yellow",
        r"^\S+: succeeded, .*|^run .*\(succeeded\)$": "green",
        r"^\S+: failed\b.*|^error: .*": "red",
    }.items()
}


def colored(text: str) -> "Text":
    """Lines in color; where they are not printed on a terminal, the text as it is."""
    from rich.text import Text

    found = Text.from_ansi(text)  # a program's own colors
    for pattern, style in _STYLES.items():
        found.highlight_regex(pattern, style)
    return found
