"""Job files: the options of ``submit`` and ``plan`` in TOML, settings and variables in tables.

Each option is a key, by its long name; ``recipe`` or ``command`` say what runs. What is given on
the command line wins. A file is turned into the words that mean the same there, so that its values
are checked as options are.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from contract.text import did_you_mean
from trainctl.aws.errors import UsageError

_SETTINGS: Final = "settings"
#: Options that are tables in a file: name -> value.
_VARIABLES: Final = ("env", "secret")
_OWN: Final = ("recipe", "command", _SETTINGS)
#: Options that only ``submit`` has: ``plan`` takes the same files and has no use for them.
OF_SUBMIT: Final = ("follow", "yes")


def expanded(path: Path, args: Sequence[str], given: Sequence[str], options: Any) -> list[str]:
    """The words of a command line together with those of a job file.

    Args:
        args: all words that were given.
        given: those of them that are no options of the command: a recipe and its settings, or a
            command of the user's own. One that names what runs takes the place of the file's.
        options: typer's, of the command.

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
    of_key = {max(each.opts, key=len)[2:].replace("-", "_"): each for each in options}
    allowed = list(dict.fromkeys([*_OWN, *of_key, *OF_SUBMIT]))
    for key in values:
        if key not in allowed:
            hint = did_you_mean(key, allowed, otherwise=f"use {', '.join(allowed)}")
            raise UsageError(f"{path}: there is no key {key!r}: {hint}")
    try:
        words = [_option(of_key[key], key, values[key], path) for key in values if key in of_key]
        found = [word for each in words for word in each]
        if given and not given[0].startswith("-"):
            return [*found, *args]
        if "command" not in values:
            return [*found, *_recipe(values, given), *args]
        if "recipe" in values or _SETTINGS in values:
            raise UsageError("command is for your own code: leave recipe and settings out")
        command = values["command"]
        if not isinstance(command, list):
            raise _wrong("command", command, 'a list of words, such as ["python", "train.py"]')
        return [*found, *args, "--", *(_text("a word of command", each) for each in command)]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _option(option: Any, key: str, value: object, path: Path) -> list[str]:
    """An option of the command."""
    name = f"--{key.replace('_', '-')}"
    if key in _VARIABLES:
        table = _table(key, value)
        return [f"{name}={each}={_text(f'{key}.{each}', table[each])}" for each in table]
    if option.multiple and isinstance(value, list):
        return [f"{name}={_text(f'an item of {key}', each)}" for each in value]
    if not option.is_flag:
        text = _text(key, value)
        # Relative to the file, wherever the command is given.
        return [f"{name}={path.parent / text if key == 'code' else text}"]
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return [*(option.opts if value else option.secondary_opts)[:1]]


def _recipe(values: Mapping[str, object], given: Sequence[str]) -> list[str]:
    """The recipe, and its settings but those that are given on the command line too."""
    words = [_text("recipe", values["recipe"])] if "recipe" in values else []
    of_line = {word.partition("=")[0].removeprefix("--no-").lstrip("-") for word in given}
    for key, value in _table(_SETTINGS, values.get(_SETTINGS, {})).items():
        name = key.replace("_", "-")
        if name in of_line:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={_text(f'{_SETTINGS}.{key}', value)}")
    return words


def _table(key: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _wrong(key, value, f"a table, [{key}]")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise _wrong(key, value, "text or a number")
    return str(value)


def _wrong(key: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{key} is {json.dumps(value, default=str)}: it must be {wanted}")
