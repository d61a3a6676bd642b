"""``--env`` and ``--secret``: variables for a job's code; and what must not be passed openly."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from contract.job import SECRETS_PREFIX, check_variable
from trainctl.aws.account import Account
from trainctl.aws.errors import UsageError

#: Names and values of secrets. A name may be of something else: EOS_TOKEN=</s>, SORT_KEY=date.
_NAMED: Final = re.compile(
    r"(^|_)(?<!PAD_)(?<!EOS_)(?<!BOS_)(?<!UNK_)(?<!SEP_)(?<!CLS_)(?<!MASK_)TOKEN$|"
    r"(^|_)(SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY)$"
)
_LONG: Final = re.compile(r"[\w+/=.~:-]{12,}")
#: Other keys are secrets where their value is no name.
_KEY: Final = re.compile(r"_KEY(_ID)?$")
_RANDOM: Final = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~:-]{12,}")
_SHAPED: Final = re.compile(
    # One boundary for all: whole folders are searched.
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{30,}|"
    r"github_pat_\w{20,}|glpat-[\w-]{20,}|wandb_v\d_\w{20,}|AIza[\w-]{35}|"
    r"npm_\w{36}|pypi-[\w-]{50,}|"
    # scheme://user:password@host, unless the password is a variable or a placeholder
    r"[a-z][a-z\d+.-]*://[^\s/:@]*:[^\s/:@${<*][^\s/@]*@)|"
    r"xox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
#: Files that hold credentials, by their names or by a line.
_FILES: Final = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)|[._]netrc|\.(git-credentials|pypirc|pgpass|htpasswd|dockercfg)|"
    r"credentials(\.(json|csv|ya?ml|toml|ini))?|secrets\.(json|ya?ml|toml|env)|kaggle\.json|"
    r".*\.(ppk|p12|pfx|keystore|jks)|(.*[._-])?(private|secret)?_?key\.pem"
)
_LINES: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(\s|\\n)+[\w+/=]{20}|"
    r"(?i:aws_secret_access_key[\"']?\s*[=:]\s*[\"']?)[\w+/]{40}(?![\w+/])|_authToken=[\w-]{20,}"
)
#: A token that a file shows for an example has few characters, or says so.
_EXAMPLE: Final = re.compile(r"(?i)example|your|xxxx|1234|abcd|fake|dummy|placeholder")
_DIFFERENT: Final = 10
#: Larger files are data.
_LARGEST: Final = 2**20


def variables(given: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE``, or ``NAME`` with its value on this machine.

    Raises:
        InputError: a name is not usable, or has no value.
    """
    found = {}
    for each in given:
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
        if name not in none and _is_secret(name, value):
            raise UsageError(
                f"--env {name} looks like a secret, and variables are kept with the job for all "
                f"who may look at it: {_instead(name)}. If it is none: --not-secret {name}"
            )
    for name, value in named(words):
        bare = name.lstrip("-")
        if bare not in none and _is_secret(bare.replace("-", "_"), value):
            variable = re.sub(r"\W", "_", bare).upper()
            raise UsageError(
                f"the command's {name} looks like a secret, and commands are kept with the job for "
                f"all who may look at it: {_instead(variable)}, which the program reads. If it is "
                f"none: --not-secret {bare}"
            )


def _instead(name: str) -> str:
    secret = SECRETS_PREFIX + name.lower().replace("_", "-")
    return (
        f"aws secretsmanager create-secret --name {secret} --secret-string file://FILE, and then "
        f"--secret {name}={secret}"
    )


def _is_secret(name: str, value: str) -> bool:
    is_named = _NAMED.search(name.upper()) and _LONG.fullmatch(value)
    is_key = _KEY.search(name.upper()) and _RANDOM.fullmatch(value)
    return bool(is_named or is_key or _SHAPED.search(value))


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
        before = word if re.fullmatch(r"-+[A-Za-z][\w.-]*", word) else ""


def refuse_secret_files(folder: Path, files: Iterable[Path], excused: Collection[str] = ()) -> None:
    """Refuse files of a code folder that hold secrets: all jobs can read it in the bucket.

    Args:
        excused: paths in the folder of files that hold none.

    Raises:
        UsageError: one does.
    """
    for path in files:
        name = path.relative_to(folder).as_posix()
        if name not in excused and (_FILES.fullmatch(path.name) or _has_secret(path)):
            raise UsageError(
                f"--code {folder}: {name} looks like it holds a secret, and would be uploaded into "
                "the bucket, which all jobs can read. Let git ignore it, and pass what the program "
                f"needs with --secret. If it holds none: --not-secret {name}"
            )


def _has_secret(path: Path) -> bool:
    if path.is_symlink() or path.stat().st_size > _LARGEST:
        return False
    text = path.read_bytes().decode(errors="replace")
    if "\0" in text:
        return False
    return bool(_LINES.search(text)) or any(
        len({*each[0]}) >= _DIFFERENT and re.search(r"\d", each[0]) and not _EXAMPLE.search(each[0])
        for each in _SHAPED.finditer(text)
        if not each[0].startswith("-----")
    )


def secrets(given: Sequence[str]) -> dict[str, str]:
    """``NAME=SECRET``: which variable has the value of which secret.

    Raises:
        InputError: a name is not usable.
    """
    found = {}
    for each in given:
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
