"""One table for one question: is an error the user's mistake, will it pass, or is it ours?

Errors are told by the names of their classes, the codes and statuses of answers, and errno, so that
nothing of what raises them is imported. An error of a library that is in no list is ours, but for
botocore's: most of what it raises itself is about its configuration.
"""

import errno
import functools
import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, ParamSpec

from contract import exits
from contract.errors import InputError, ReportedError, UnreachableError

_P = ParamSpec("_P")


class Kind(Enum):
    """Who can do something about an error, and the exit code of a command that ends with it."""

    USER = exits.BAD_INPUT
    """The user: a name, a right, a setting, a file, credentials."""
    PASSING = exits.STORAGE
    """Nobody: another attempt may succeed, perhaps on another host."""
    OURS = exits.FAILED
    """The authors of this program."""


# --- the table ------------------------------------------------------------------------------------
def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Codes of answers that pass though their statuses are those of mistakes; and all with "Throttl".
#: Amazon S3's API reference, "Error responses"; those of botocore.retries.standard. The last three
#: are those of content that was damaged on the way.
_PASSING_CODES: Final = _names("""
    BandwidthLimitExceeded LimitExceededException RequestLimitExceeded SlowDown
    ProvisionedThroughputExceededException TooManyRequestsException TransactionInProgressException
    PriorRequestNotComplete RequestTimeout RequestTimeoutException TemporaryRedirect
    ServiceUnavailable InternalError InternalFailure OperationAborted ConditionalRequestConflict
    BadDigest IncompleteBody XAmzContentSHA256Mismatch
""")
#: Those of requests that should not have been made so.
_OUR_CODES: Final = _names("""
    EntityTooLarge EntityTooSmall InvalidDigest InvalidPart InvalidPartOrder MalformedXML
    MethodNotAllowed MissingContentLength NotImplemented
""")
#: Codes, and classes of botocore.
_EXPIRED: Final = _names("""
    ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired
    SSOError LoginError TokenRetrievalError
""")
#: What a node's credentials fail with while their endpoint is busy: a laptop has none.
_OF_CREDENTIALS: Final = _EXPIRED | _names("""
    CredentialRetrievalError NoCredentialsError PartialCredentialsError
""")
#: Classes: what is found first from a class to those that it inherits from counts. By lines:
#: Python's own, as s3fs raises them without a number; of HTTP libraries; of the Hub's client; of
#: botocore and boto3.
_CLASSES: Final = {
    Kind.USER: _OF_CREDENTIALS
    | _names("""
        FileExistsError FileNotFoundError PermissionError SSLCertVerificationError
        ClientConnectorCertificateError InvalidProxyURL InvalidURL UnsupportedProtocol
        BadRequestError DisabledRepoError EntryNotFoundError HFValidationError
        LocalTokenNotFoundError OfflineModeIsEnabled RepositoryNotFoundError RevisionNotFoundError
        BotoCoreError
    """),
    Kind.PASSING: _names("""
        ConnectionError TimeoutError HTTPException SSLError URLError
        ClientError HTTPError RequestException TransportError
        FileMetadataError LocalEntryNotFoundError XetDownloadError
        CapacityNotAvailableError ChecksumError FlexibleChecksumError HTTPClientError
        IncompleteReadError MetadataRetrievalError ResponseParserError WaiterError Boto3Error
        RetriesExceededError
    """),
    Kind.OURS: _names("""
        AssertionError AttributeError ImportError LookupError NameError TypeError
        DataNotFoundError OperationNotPageableError PaginationError StubResponseError
        UndefinedModelAttributeError UnknownClientMethodError WaiterConfigError
    """),
}
#: Classes that say of another error only that it has occurred: what it is comes first.
_WRAPPERS: Final = _names("""
    ClientConnectorError CredentialRetrievalError HTTPClientError LocalEntryNotFoundError
    RetriesExceededError S3TransferFailedError S3UploadFailedError SSLError
""")
#: Numbers of the system that a user can do something about; any other one passes.
_OF_USER: Final = _names("""
    ENOENT EACCES EPERM EINVAL ENOTDIR EISDIR EEXIST ENAMETOOLONG ELOOP ENOEXEC EROFS
""")
#: Of torch's writer: it cannot tell why it could not write.
_TORCH_WRITES: Final = "[enforce fail at inline_container"


def kind(error: BaseException) -> Kind:
    """Who can do something about an error. It looks through what others have made of it."""
    if is_full(error):
        return Kind.PASSING
    if _of_class(error) is Kind.OURS:  # whatever it came upon
        return Kind.OURS
    others = [each for each in chain(error) if _of_class(each) is not Kind.OURS]
    if _kind(error):
        # It comes from the handler of an error of ours, which no library translates.
        others = [each for each in others if each is error or not isinstance(each, ReportedError)]
    return next(filter(None, map(_kind, sorted(others, key=_vagueness))), Kind.OURS)


def is_passing(error: BaseException) -> bool:
    """True if another attempt may succeed."""
    return kind(error) is Kind.PASSING


def chain(error: BaseException | None) -> list[BaseException]:
    """An error, and those that it was made of."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _vagueness(error: BaseException) -> int:
    """0: it is no translation; 1: it may be one, as s3fs's of what S3 answers, and knows less."""
    if _of_answer(error):
        return 0
    return 2 if type(error).__name__ in _WRAPPERS else int(isinstance(error, OSError))


def _kind(error: BaseException) -> Kind | None:
    """None: it does not tell by itself."""
    if isinstance(error, ReportedError):
        return Kind.PASSING if error.exit_code == exits.STORAGE else Kind.USER
    found = _of_answer(error) or _of_class(error)
    if found is None and isinstance(error, OSError) and error.errno is not None:
        is_of_user = errno.errorcode.get(error.errno) in _OF_USER
        return Kind.USER if is_of_user else Kind.PASSING
    return found


def _of_class(error: BaseException) -> Kind | None:
    return next(filter(None, map(_of_name, _names_of(error))), None)


def _names_of(error: BaseException) -> list[str]:
    return [each.__name__ for each in type(error).__mro__]


def _of_name(name: str) -> Kind | None:
    if name in _OF_CREDENTIALS and _is_node():
        return Kind.PASSING
    return next((kind for kind, names in _CLASSES.items() if name in names), None)


def _is_node() -> bool:
    """True where ECS gives the credentials: they never expire, and are always there."""
    is_container = any(name.startswith("AWS_CONTAINER_CREDENTIALS_") for name in os.environ)
    return is_container and "AWS_ACCESS_KEY_ID" not in os.environ


def code_of(error: BaseException) -> str:
    """AWS's code of an error, such as ``NoSuchKey``; "" where it is no answer of AWS."""
    answer = getattr(error, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, Mapping) else ""


def status_of(error: BaseException) -> int:
    """HTTP status of an answer that is an error: of AWS, the Hub or another server; else 0."""
    answer = getattr(error, "response", None)
    if isinstance(answer, Mapping):
        return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    places = ((answer, "status_code"), (error, "status"), (error, "code"))
    found = [getattr(place, name, None) for place, name in places]
    return next((each for each in found if isinstance(each, int) and each >= 300), 0)


def _of_answer(error: BaseException) -> Kind | None:
    code, status = code_of(error), status_of(error)
    if code in _OF_CREDENTIALS:
        return _of_name(code)
    if "Throttl" in code or code in _PASSING_CODES or status in (307, 408, 425, 429):
        return Kind.PASSING
    if code in _OUR_CODES or status == 501:
        return Kind.OURS
    if status >= 500:
        return Kind.PASSING
    return Kind.USER if code or status else None


def is_full(error: BaseException) -> bool:
    """True if a disk or a quota is full; uv, safetensors and ``copytree`` report it in words only,
    and torch not even that."""
    return _says(error, os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), _TORCH_WRITES)


def is_read_only(error: BaseException) -> bool:
    """True if a disk is, as after errors of its own."""
    return _says(error, os.strerror(errno.EROFS))


def _says(error: BaseException, *words: str) -> bool:
    said = "\n".join(map(str, chain(error)))
    return any(each in said for each in words)


def is_taken(answer: BaseException) -> bool:
    """True if there is an object already that was to be created, or is at this moment."""
    return code_of(answer) in ("PreconditionFailed", "ConditionalRequestConflict")


def is_expired(error: BaseException) -> bool:
    """True if the user has to log in to AWS again."""
    return any(_EXPIRED & {code_of(each), *_names_of(each)} for each in chain(error))


# --- what becomes of it ---------------------------------------------------------------------------
def text(error: BaseException) -> str:
    """An error in a line: its first one, or the name of its class where it has no text."""
    if isinstance(error, ReportedError):
        return str(error)
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"{os.strerror(errno.ENOSPC)} ({said})" if said.startswith(_TORCH_WRITES) else said


def explained(error: Exception, what: str = "") -> ReportedError:
    """InputError or UnreachableError in the place of ``error``, which begins with ``what``; itself
    if it is such an error.

    Raises:
        Exception: ``error``, if it is a fault of the program.
    """
    if isinstance(error, ReportedError):
        return error
    found, said = kind(error), ": ".join(filter(None, (what, text(error))))
    if found is Kind.OURS:
        raise error
    if found is Kind.PASSING:
        return UnreachableError(said)
    if is_expired(error):
        said = f"{said}; log in again: aws sso login"
    elif any(code_of(each) or "botocore" in type(each).__module__ for each in chain(error)):
        who = "aws sts get-caller-identity"
        said = f"{said}; check the name, the region and the credentials ({who})"
    return InputError(said)


def exit_code(error: BaseException) -> int:
    """Exit code of a command that ended with an error."""
    found = kind(error)
    if isinstance(error, ReportedError) and found is Kind.USER:
        return error.exit_code
    return found.value


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def command(
    *,
    say: Callable[[str], object] = say,
    interrupted: str = "interrupted",
    explain: Callable[[Exception], ReportedError] = explained,
) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """Decorator of the ``main`` of each command, the one place where errors end: it prints them,
    and turns them into the exit code.

    Args:
        say: prints a line.
        interrupted: what it prints after Ctrl-C.
        explain: as ``explained``, in the command's own words.
    """

    def decorated(main: Callable[_P, int]) -> Callable[_P, int]:
        @functools.wraps(main)
        def run(*arguments: _P.args, **named: _P.kwargs) -> int:
            try:
                return main(*arguments, **named)
            except KeyboardInterrupt:
                say(interrupted)
                return exits.INTERRUPTED
            except Exception as error:  # the command's boundary
                reported = explain(error)
                say(f"error: {reported}{reported.then}")
                return exit_code(reported)

        return run

    return decorated
