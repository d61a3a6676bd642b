"""Job files: the options of ``submit`` and ``plan`` in TOML, settings and variables in tables.

Each option is a key, by its long name; ``recipe`` or ``command`` say what runs. What is given on
the command line wins.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainctl.aws.errors import UsageError
from training import recipes

#: Keys that are no options.
_RECIPE, _COMMAND, _SETTINGS = "recipe", "command", "settings"
_OWN: Final = (_RECIPE, _COMMAND, _SETTINGS)
#: Options that are tables in a file: name -> value.
_TABLES: Final = ("env", "secret")
#: Options about this program and not about the job.
_NOT_IN_FILES: Final = ("file", "help", "context")
#: Options that only ``submit`` has: ``plan`` takes the same files and has no use for them.
_OF_SUBMIT: Final = ("follow", "yes")


class JobFile:
    """A job file that was read, in the words of the command line."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self._path = path
        self._values = {key.replace("-", "_"): value for key, value in values.items()}

    @classmethod
    def read(cls, path: Path) -> "JobFile":
        """
        Raises:
            UsageError: it cannot be read, or is no TOML.
        """
        try:
            return cls(path, tomllib.loads(path.read_text(encoding="utf-8-sig")))
        except OSError as error:
            raise UsageError(f"--file {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # of TOML, or of UTF-8
            raise UsageError(f"--file {path} is not TOML: {error}") from None

    def options(self, parameters: Sequence[Any]) -> dict[str, object]:
        """Values of the command's options, by the names of its parameters.

        Args:
            parameters: typer's, of the command.

        Raises:
            UsageError: a key is unknown, or a value is none of its option.
        """
        of_key = {
            max(each.opts, key=len).lstrip("-").replace("-", "_"): each
            for each in parameters
            if each.param_type_name == "option"
        }
        options = [key for key in of_key if key not in _NOT_IN_FILES]
        allowed = list(dict.fromkeys([*_OWN, *options, *_OF_SUBMIT]))
        for key in self._values:
            if key not in allowed:
                close = difflib.get_close_matches(key, allowed, n=1)
                hint = f"did you mean {close[0]}?" if close else f"use {', '.join(allowed)}"
                raise self._error(f"there is no key {key!r}: {hint}")
        found: dict[str, object] = {}
        for key, value in self._values.items():
            if key in of_key and key not in _TABLES:
                # Typer would read true as a number or a run's name.
                is_flag = of_key[key].is_flag
                if isinstance(value, bool) != is_flag or not isinstance(value, str | int | float):
                    wanted = "true or false" if is_flag else "text or a number"
                    raise self._error(f"{key} is {_shown(value)}: it must be {wanted}")
                found[of_key[key].name] = value
        if isinstance(code := found.get("code"), str):
            # Relative to the file, wherever the command is given.
            found["code"] = str(self._path.parent / code)
        for key in _TABLES:
            self.pairs(key)
        self.words([])
        return found

    def pairs(self, key: str) -> list[str]:
        """The ``NAME=VALUE`` of a table, ``env`` or ``secret``.

        Raises:
            UsageError: it is no table of texts and numbers.
        """
        table = self._table(key)
        for name, value in table.items():
            if not isinstance(value, str | int | float) or isinstance(value, bool):
                raise self._error(f"{key}.{name} is {_shown(value)}: it must be text or a number")
        return [f"{name}={value}" for name, value in table.items()]

    def words(self, given: Sequence[str]) -> list[str]:
        """Recipe and settings, or the command of the user's own code.

        Args:
            given: those of the command line. They replace a command; settings are added to those
                of the file, or replace them.

        Raises:
            UsageError: the file has both a recipe and a command, or one of another type.
        """
        recipe, command = self._values.get(_RECIPE), self._values.get(_COMMAND)
        if command is not None:
            if recipe is not None or _SETTINGS in self._values:
                raise self._error("command is for your own code: leave recipe and settings out")
            if not isinstance(command, list) or not all(isinstance(each, str) for each in command):
                raise self._error(
                    f"command is {_shown(command)}: it must be a list of words, such as "
                    '["python", "train.py"]'
                )
            return [*(given or command)]
        if recipe is not None and not isinstance(recipe, str):
            raise self._error(f"recipe is {_shown(recipe)}: it must be text")
        settings = self._settings()
        named = bool(given) and not given[0].startswith("-")
        if named and recipe is not None and given[0] in recipes.NAMES and given[0] != recipe:
            settings = {}  # those of another recipe
        first = [given[0]] if named else [] if recipe is None else [recipe]
        rest = [*given[1:]] if named else [*given]
        of_line = {word.partition("=")[0].removeprefix("--no-").lstrip("-") for word in rest}
        kept = [word for name, words in settings.items() if name not in of_line for word in words]
        return [*first, *kept, *rest]

    def check_fit(self, *, is_own: bool) -> None:
        """Check that what runs fits the code: the user's own, or a recipe's.

        Raises:
            UsageError: it does not.
        """
        if is_own and (_RECIPE in self._values or _SETTINGS in self._values):
            raise self._error(
                "recipe and settings are not for your own code: leave them out, or leave out code"
            )
        if not is_own and _COMMAND in self._values:
            raise self._error('command is for your own code: name its folder, code = "."')

    def _settings(self) -> dict[str, list[str]]:
        """The settings as words, by the names of their options."""
        found = {}
        for key, value in self._table(_SETTINGS).items():
            name = key.replace("_", "-")
            if isinstance(value, bool):
                found[name] = [f"--{name}" if value else f"--no-{name}"]
            elif isinstance(value, str | int | float):
                found[name] = [f"--{name}={value}"]
            else:
                raise self._error(
                    f"settings.{key} is {_shown(value)}: it must be text, a number, true or false"
                )
        return found

    def _table(self, key: str) -> dict[str, object]:
        table = self._values.get(key, {})
        if not isinstance(table, dict):
            raise self._error(f"{key} is {_shown(table)}: it must be a table, [{key}]")
        return table

    def _error(self, message: str) -> UsageError:
        return UsageError(f"{self._path}: {message}")


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


def take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of ``--file``: what the file gives counts where the command line does not give it.

    Raises:
        UsageError: the file is not usable.
    """
    if path is not None:
        # Kept, as a pipe can be read only once.
        context.obj = job = JobFile.read(path)
        context.default_map = job.options(context.command.params)
    return path


def with_words(context: typer.Context, given: list[str] | None) -> list[str] | None:
    """Callback of the words: add those of the file."""
    return context.obj.words(given or []) if context.obj else given


def with_pairs(
    context: typer.Context, parameter: typer.CallbackParam, given: list[str] | None
) -> list[str] | None:
    """Callback of ``--env`` and ``--secret``: of two of the same name, the last one counts."""
    if not context.obj:
        return given
    return [*context.obj.pairs(parameter.name), *(given or [])]


def check_code(context: typer.Context, given: Path | None) -> Path | None:
    """Callback of ``--code``: check that what the file runs fits it."""
    if context.obj:
        context.obj.check_fit(is_own=given is not None)
    return given


File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="A job file, TOML: each option is a key, settings are in a table. What is given here "
        "wins.",
        is_eager=True,
        callback=take_defaults,
        show_default=False,
    ),
]
