"""Regular expressions in the filters of CloudWatch Logs. Imported inside ``.venv-aws`` only.

On AWS a filter between percent signs is one; the emulator would look for the percent signs.
"""

import re
from collections.abc import Callable

from rehearsal.ministack.internals import cloudwatch_logs


def install() -> None:
    """Teach the emulator that."""
    stock = cloudwatch_logs._compile_filter_pattern

    def compiled(text: str) -> Callable[[str], bool]:
        if len(text) > 2 and text[0] == text[-1] == "%":
            pattern = re.compile(text[1:-1])
            return lambda message: pattern.search(message) is not None
        matches: Callable[[str], bool] = stock(text)
        return matches

    cloudwatch_logs._compile_filter_pattern = compiled
