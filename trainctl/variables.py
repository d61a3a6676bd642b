"""``--env`` and ``--secret``: variables for a job's code."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
    r"hf_\w{20,}|sk-[\w-]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{30,}|github_pat_\w{20,}|"
    r"xox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


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


def refuse_secrets(found: Mapping[str, str]) -> None:
    """Refuse variables of a job that look like secrets: its order is kept, and logged.

    Raises:
        UsageError: one does.
    """
    for name, value in found.items():
        is_named = _NAMED.search(name.upper()) and _LONG.fullmatch(value)
        is_key = _KEY.search(name.upper()) and _RANDOM.fullmatch(value)
        if is_named or is_key or _SHAPED.search(value):
            secret = SECRETS_PREFIX + name.lower().replace("_", "-")
            raise UsageError(
                f"--env {name} looks like a secret, and variables are kept with the job for all "
                "who may look at it: aws secretsmanager create-secret --name "
                f"{secret} --secret-string file://FILE, and then --secret {name}={secret}"
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
