"""``--env`` and ``--secret``: variables for a job's code; and what must not be passed openly."""

import codecs
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from contract.job import SECRETS_PREFIX, check_variable
from contract.secret_text import FILES, SHOWN, secrets_in
from trainctl.aws.account import Account
from trainctl.aws.errors import UsageError

#: Files with variables and their values.
_SETTINGS: Final = re.compile(r"(.*\.)?env(\..*|rc)?|\.Renviron")
#: Larger files are data.
_LARGEST: Final = 2**24


def variables(assignments: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` with its value on this machine.

    Raises:
        InputError: a name is not usable, or has no value.
    """
    found = {}
    for each in assignments:
        name, equals, value = each.partition("=")
        if not name:
            raise UsageError(
                f"--env is {each!r}: it must be NAME=VALUE, or NAME with its value on this machine"
            )
        check_variable(name, what="--env")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"--env {name}: there is no such variable here; give {name}=VALUE")
            value = os.environ[name]
        found[name] = value
    return found


def refuse_secrets(
    found: Mapping[str, str], words: Sequence[str] = (), excused: Collection[str] = ()
) -> None:
    """Refuse variables of a job, and words of its command, that look like secrets: its order is
    kept, and logged.

    Args:
        excused: names of variables and options that are none.

    Raises:
        UsageError: one does.
    """
    none = {each.lstrip("-") for each in excused}
    for name, value in found.items():
        if name not in none and (shown := _secret_in(f"{name}={value}")):
            raise UsageError(
                f"--env {name} looks like a secret ({shown}), and variables are kept with the job "
                "for all "
                f"who may look at it: {_instead(name)}. If it is none: --not-secret {name}"
            )
    for name, value in named(words):
        bare = name.lstrip("-")
        if bare not in none and (shown := _secret_in(f"{bare}={value}")):
            variable = re.sub(r"\W", "_", bare).upper()
            raise UsageError(
                f"the command's {name} looks like a secret ({shown}), and commands are kept with "
                f"the job for all who may look at it: {_instead(variable)}, which the program "
                f"reads. If it is none: --not-secret {bare}"
            )


def _instead(name: str) -> str:
    secret = SECRETS_PREFIX + name.lower().replace("_", "-")
    return (
        f"aws secretsmanager create-secret --name {secret} --secret-string file://FILE, and then "
        f"--secret {name}={secret}"
    )


def _secret_in(setting: str) -> str:
    """The first characters of a secret in ``NAME=VALUE``; "" where there is none."""
    for start, _ in secrets_in(setting, is_certain=True):
        return f"{setting[start : start + SHOWN]}..."
    return ""


def named(words: Sequence[str], number: int = 0) -> Iterator[tuple[str, str]]:
    """Words of a command, each with its name: the option or variable whose value it is, or
    ``word-3``. Words with spaces, as of ``sh -c``, are read word by word too."""
    before = ""
    for place, word in enumerate(words, 1):
        numbered = f"word-{number or place}"
        name, equals, value = word.partition("=")
        inner = word.split()
        if len(inner) > 1:
            yield from named(inner, number or place)
        elif equals and re.fullmatch(r"-*[\w.-]+", name):
            yield name, value.strip("\"';")
        else:
            yield before or numbered, word.strip("\"';")
        before = word if re.fullmatch(r"-+[A-Za-z][\w.-]*|login", word) else ""


def refuse_secret_files(folder: Path, files: Iterable[Path], excused: Collection[str] = ()) -> None:
    """Refuse files of a code folder that hold secrets: all jobs can read it in the bucket.

    Args:
        excused: paths in the folder of files that hold none.

    Raises:
        UsageError: one does.
    """
    for path in files:
        name = path.relative_to(folder).as_posix()
        if name not in excused and (place := _secret_of(path)):
            raise UsageError(
                f"--code {folder}: {name}{place} looks like it holds a secret, and would be "
                "uploaded into the bucket, which all jobs can read. Let git ignore it, and pass "
                f"what the program needs with --secret. If it holds none: --not-secret {name}"
            )


def _secret_of(path: Path) -> str:
    """Line and first characters of a secret in a file; "" where there is none."""
    if FILES.fullmatch(path.name):
        return " (by its name)"
    if path.is_symlink() or path.stat().st_size > _LARGEST:
        return ""
    content = path.read_bytes()
    is_utf_16 = content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    text = content.decode("utf-16" if is_utf_16 else "utf-8", errors="replace")
    if "\0" in text:
        return ""
    if path.suffix == ".ipynb":  # its code is strings of JSON, a line each
        text = text.replace('\\"', '"').replace("\\n", " ")
    for start, _ in secrets_in(text, is_certain=bool(_SETTINGS.fullmatch(path.name))):
        return f", line {text.count(chr(10), 0, start) + 1} ({text[start : start + SHOWN]}...)"
    return ""


def secrets(assignments: Sequence[str]) -> dict[str, str]:
    """``NAME=SECRET``: which variable has the value of which secret.

    Raises:
        InputError: a name is not usable.
    """
    found = {}
    for each in assignments:
        name, equals, secret = each.partition("=")
        if name:
            check_variable(name, what="--secret")
        if not name or not equals or not secret.startswith(SECRETS_PREFIX):
            raise UsageError(
                f"--secret is {each!r}: it must be NAME={SECRETS_PREFIX}SECRET; jobs may read no "
                "other secrets"
            )
        found[name] = secret
    return found


def check_secrets(names: Iterable[str], account: Account) -> None:
    """
    Raises:
        UsageError: the account has no secret of one of these names.
    """
    for secret in names:
        if not account.has_secret(secret):
            raise UsageError(
                f"there is no secret {secret!r}: aws secretsmanager create-secret --name {secret} "
                "--secret-string file://FILE"
            )
