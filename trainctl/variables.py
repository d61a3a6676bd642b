"""``--env`` and ``--secret``: variables for a job's code."""

import os
from collections.abc import Sequence

from contract.job import SECRETS_PREFIX, check_variable
from trainctl.aws.account import Account
from trainctl.errors import UsageError


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


def secrets(given: Sequence[str], account: Account) -> dict[str, str]:
    """``NAME=SECRET``: which variable has the value of which secret.

    Raises:
        InputError: a name is not usable, or there is no such secret.
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
        if not account.has_secret(secret):
            raise UsageError(
                f"there is no secret {secret!r}: aws secretsmanager create-secret --name {secret} "
                "--secret-string file://FILE"
            )
        found[name] = secret
    return found
