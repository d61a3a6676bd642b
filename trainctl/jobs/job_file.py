"""Job files: the options of ``submit`` and ``plan`` in TOML, settings and variables in tables.

Each option is a key, by its long name; ``recipe`` or ``command`` say what runs. What is given on
the command line wins. A file is turned into the words that mean the same there, so that its values
are checked as options are.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainctl.aws.errors import UsageError
from trainctl.options import by_name, table, text, words_of, wrong

_SETTINGS: Final = "settings"
_OWN: Final = ("recipe", "command", _SETTINGS)
#: Options that only ``submit`` has: ``plan`` takes the same files and has no use for them.
OF_SUBMIT: Final = ("follow", "yes")


def expanded(path: Path, args: Sequence[str], positional: Sequence[str], params: Any) -> list[str]:
    """The words of a command line together with those of a job file.

    Args:
        args: all words of the command line.
        positional: those of them that are not options of the command: a recipe and its settings,
            or a user's command. If they name a recipe or a command, it replaces the file's.
        params: typer's, of the command.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value is of another type.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8
        raise UsageError(f"--file {path} is not TOML: {error}") from None
    values = {key.replace("-", "_"): value for key, value in read.items()}
    if isinstance(code := values.get("code"), str):
        values["code"] = path.parent / code  # wherever the command is given
    own: dict[str, object] = {key: values.pop(key) for key in _OWN if key in values}
    options = by_name(params)
    try:
        found = words_of(
            {key: values[key] for key in values if key in options or key not in OF_SUBMIT},
            options,
            also=_OWN,
        )
        if positional and not positional[0].startswith("-"):
            return [*found, *args]
        if "command" not in own:
            return [*found, *_recipe(own, positional), *args]
        if len(own) > 1:
            raise UsageError("command is for your own code: leave recipe and settings out")
        command = own["command"]
        if not isinstance(command, list):
            raise wrong("command", command, 'a list of words, such as ["python", "train.py"]')
        return [*found, *args, "--", *(text("a word of command", each) for each in command)]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _recipe(values: Mapping[str, object], positional: Sequence[str]) -> list[str]:
    """The recipe, and its settings but those that are given on the command line too."""
    words = [text("recipe", values["recipe"])] if "recipe" in values else []
    of_line = {word.partition("=")[0].removeprefix("--no-").lstrip("-") for word in positional}
    for key, value in table(_SETTINGS, values.get(_SETTINGS, {})).items():
        name = key.replace("_", "-")
        if name in of_line:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={text(f'{_SETTINGS}.{key}', value)}")
    return words
