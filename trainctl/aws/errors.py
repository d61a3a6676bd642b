"""Errors that end a command: what a user can act on, and AWS's errors in a user's words."""

from typing import TYPE_CHECKING

from contract import faults
from contract.errors import InputError, ReportedError
from contract.exits import BAD_INPUT as EXIT_BAD_INPUT
from contract.exits import FAILED as EXIT_FAILED
from contract.exits import STORAGE as EXIT_STORAGE

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


class CliError(ReportedError):
    """Error with what happened, why, and what to do next; printed without a traceback."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(CliError):
    """The user gave a wrong value."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_BAD_INPUT)


DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_UNKNOWN_KEY = ("InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch")


def explained(error: Exception) -> CliError:
    """CliError for ``error``, in a user's words.

    Raises:
        Exception: ``error`` itself, if it is a fault of this program.
    """
    known = _known(error)
    if known is None:
        raise error
    if known is not error and faults.is_passing(error):
        known.exit_code = EXIT_STORAGE
    return known


def is_unset(error: Exception) -> bool:
    """True if no account of AWS is set up on this machine."""
    from botocore.exceptions import NoCredentialsError, NoRegionError

    return isinstance(error, NoCredentialsError | NoRegionError)


def _known(error: Exception) -> CliError | None:
    if isinstance(error, CliError):
        return error
    if isinstance(error, InputError):
        return UsageError(str(error))
    if isinstance(error, ReportedError):
        return CliError(str(error), exit_code=error.exit_code)
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as aws
    from botocore.parsers import ResponseParserError

    match error:
        case aws.ProfileNotFound():
            return UsageError(f"{error}. List the existing profiles: aws configure list-profiles")
        case aws.NoCredentialsError():
            return UsageError(
                "No AWS account is set up here: run aws configure (region and keys) or aws sso "
                "login; without an account: make local, or trainctl plan with -c preset=ddp. For "
                "runs of this machine: trainctl run, and --runs DIR of trainctl ls, show, report, "
                "top, ui, predict, generate, export"
            )
        case aws.TokenRetrievalError() | aws.SSOError() | aws.LoginError():
            return CliError("the AWS login has expired: aws sso login")
        case aws.NoRegionError():
            return UsageError("no region is set: set AWS_REGION, or run aws configure")
        case aws.ConnectionError() | aws.HTTPClientError():
            return CliError(
                f"AWS does not answer: {error}. Check the network and the region; for a local "
                "deployment, trainctl local status shows whether it is still up"
            )
        case aws.ClientError():
            return _of_the_service(error)
        case Boto3Error():
            # From an upload or a download: it keeps AWS's own error only as its context.
            cause = error.__context__
            known = _known(cause) if isinstance(cause, Exception) else None
            return known or CliError(
                f"the transfer was interrupted: {error}. Run the command again"
            )
        case ResponseParserError() | aws.IncompleteReadError():
            return CliError(f"AWS sent an unexpected answer: {error}. Run the command again")
        case _ if isinstance(error, aws.BotoCoreError) or "Invalid endpoint" in str(error):
            return UsageError(
                "no request can be sent to AWS: check its configuration (aws configure list; the "
                f"variables that begin with AWS_): {error}"
            )
        case OSError():
            return CliError(str(error))  # of this machine, such as a folder that is read-only
    return None


def _of_the_service(error: "ClientError") -> CliError:
    code = faults.code_of(error)
    said = error.response.get("Error", {}).get("Message", str(error))
    if faults.is_expired(error):
        return CliError("the AWS login has expired: log in again (aws sso login)")
    if code == "RequestTimeTooSkewed" or said.startswith("Signature "):  # expired; not yet current
        return CliError(f"this machine's clock is wrong: {said}. Set it, and try again")
    if code in _UNKNOWN_KEY:
        return CliError(
            f"AWS does not know these credentials ({code}): check the profile, and the region, "
            "which the account may have to enable"
        )
    if code in DENIED:
        return CliError(
            f"not allowed: {error.operation_name}: {said}. Ask the owner of the deployment for the "
            "permission, or use another --profile"
        )
    return CliError(f"AWS refused {error.operation_name}: {said} ({code})")
