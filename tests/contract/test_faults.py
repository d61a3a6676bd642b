"""Proves that each error has one answer (the user's mistake, passing, or ours), which all share."""

import ast
import errno
import importlib
import inspect
import os
import socket
import ssl
import urllib.error
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import pytest
from boto3.exceptions import S3UploadFailedError
from botocore import exceptions as aws
from botocore.parsers import ResponseParserError
from fsspec.exceptions import FSTimeoutError
from s3fs.errors import translate_boto_error

from contract import exits, faults
from contract.errors import AdvisedError, InputError, ReportedError, UnreachableError
from contract.faults import Kind

USER, PASSING, OURS = Kind.USER, Kind.PASSING, Kind.OURS
ROOT: Final = Path(__file__).parents[2]
CONTAINER: Final = "AWS_CONTAINER_CREDENTIALS_FULL_URI"


def answer(code: str, status: int) -> aws.ClientError:
    """As botocore makes it of what a service answers."""
    answered: Any = {"HTTPStatusCode": status}
    return aws.ClientError(
        {"Error": {"Code": code, "Message": "x"}, "ResponseMetadata": answered}, "Operation"
    )


# --- every class of botocore ----------------------------------------------------------------------
#: Those that are not the user's. All others inherit from BotoCoreError, whose default that is: a
#: new class of botocore's must join this list, or those below.
OF_BOTOCORE: Final[Mapping[Kind, str]] = {
    PASSING: """CapacityNotAvailableError ChecksumError ConnectTimeoutError ConnectionClosedError
        ConnectionError EndpointConnectionError FlexibleChecksumError HTTPClientError
        IncompleteReadError MetadataRetrievalError ProxyConnectionError ReadTimeoutError
        ResponseStreamingError SSLError WaiterError""",
    OURS: """DataNotFoundError OperationNotPageableError PaginationError StubAssertionError
        StubResponseError UnStubbedResponseError UndefinedModelAttributeError MissingServiceIdError
        UnknownClientMethodError UnknownServiceError WaiterConfigError""",
    USER: """AliasConflictParameterError ApiVersionNotFoundError AwsChunkedWrapperError
        BaseEndpointResolverError BotoCoreError ConfigNotFound ConfigParseError
        CredentialRetrievalError EndpointProviderError EndpointResolutionError EndpointVariantError
        InfiniteLoopConfigError InvalidChecksumConfigError InvalidConfigError InvalidDNSNameError
        InvalidDefaultsMode InvalidEndpointConfigurationError
        InvalidEndpointDiscoveryConfigurationError InvalidExpressionError InvalidHostLabelError
        InvalidIMDSEndpointError InvalidIMDSEndpointModeError InvalidMaxRetryAttemptsError
        InvalidProxiesConfigError InvalidRegionError InvalidRetryConfigurationError
        InvalidRetryModeError InvalidS3AddressingStyleError
        InvalidS3UsEast1RegionalEndpointConfigError InvalidSTSRegionalEndpointsConfigError
        LoginAuthorizationCodeError LoginError LoginInsufficientPermissions LoginRefreshRequired
        LoginTokenLoadError MD5UnavailableError MissingDependencyException MissingParametersError
        NoAuthTokenError NoCredentialsError NoRegionError ParamValidationError
        PartialCredentialsError ProfileNotFound RangeError RefreshWithMFAUnsupportedError SSOError
        SSOTokenLoadError ServiceNotInRegionError TokenRetrievalError UnauthorizedSSOTokenError
        UnknownCredentialError UnknownEndpointError UnknownEndpointResolutionBuiltInName
        UnknownFIPSEndpointError UnknownKeyError UnknownParameterError UnknownRegionError
        UnknownServiceStyle UnknownSignatureVersionError UnknownTokenProviderError
        UnseekableStreamError UnsupportedOutpostResourceError
        UnsupportedS3AccesspointConfigurationError UnsupportedS3ArnError
        UnsupportedS3ConfigurationError UnsupportedS3ControlArnError
        UnsupportedS3ControlConfigurationError UnsupportedServiceProtocolsError
        UnsupportedSignatureVersionError UnsupportedTLSVersionWarning ValidationError""",
}
_ANSWERS: Final = {"ClientError", "EventStreamError"}  # by what is answered, see below
_WARNINGS: Final = {"ImminentRemovalWarning", "UnsupportedTLSVersionWarning"}


def classes(module: Any, *, base: type[BaseException] = Exception) -> dict[str, type[Any]]:
    found = inspect.getmembers(module, inspect.isclass)
    return {
        name: each
        for name, each in found
        if issubclass(each, base) and each.__module__ == module.__name__
    }


def bare(kind: type[Any]) -> Any:
    """An error without what its constructor wants: only its class tells."""
    silent: Any = type(kind.__name__, (kind,), {"__str__": lambda _: ""})
    return silent.__new__(silent)


def test_every_class_of_botocore_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTAINER, raising=False)
    expected = {name: kind for kind, names in OF_BOTOCORE.items() for name in names.split()}
    known = classes(aws)
    assert {*known} - _ANSWERS - _WARNINGS == {*expected} - _WARNINGS
    for name in {*known} - _ANSWERS - _WARNINGS:
        assert faults.kind(bare(known[name])) is expected[name], name


# --- what is answered -----------------------------------------------------------------------------
#: HTTP status and kind -> codes.
CODES: Final = {
    (400, PASSING): "BadDigest IncompleteBody RequestTimeout XAmzContentSHA256Mismatch "
    "ThrottlingException Throttling ThrottledException RequestThrottled RequestLimitExceeded "
    "TooManyRequestsException PriorRequestNotComplete ProvisionedThroughputExceededException "
    "KMS.ThrottlingException LimitExceededException TransactionInProgressException "
    "EC2ThrottledException",
    (400, USER): "KMS.DisabledException KMS.NotFoundException InvalidRequest InvalidURI "
    "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired "
    "AuthorizationHeaderMalformed InvalidBucketName InvalidToken 400 InvalidArgument "
    "IllegalLocationConstraintException KeyTooLongError ValidationException "
    "ResourceNotFoundException InvalidParameterException",
    (400, OURS): "EntityTooLarge EntityTooSmall InvalidDigest InvalidPart InvalidPartOrder "
    "MalformedXML",
    (411, OURS): "MissingContentLength",
    (405, OURS): "MethodNotAllowed",
    (501, OURS): "NotImplemented",
    (409, PASSING): "OperationAborted ConditionalRequestConflict",
    (409, USER): "BucketAlreadyExists BucketNotEmpty",
    (403, USER): "AccessDenied AllAccessDisabled InvalidAccessKeyId InvalidObjectState "
    "RequestTimeTooSkewed SignatureDoesNotMatch UnauthorizedOperation 403",
    (404, USER): "NoSuchBucket NoSuchKey NoSuchUpload 404",
    (301, USER): "PermanentRedirect",
    (307, PASSING): "TemporaryRedirect",
    (412, USER): "PreconditionFailed",
    (500, PASSING): "InternalError 500 InternalFailure Unknown",
    (503, PASSING): "SlowDown ServiceUnavailable 503",
    (429, PASSING): "429",
    (504, PASSING): "504",
}
ANSWERS: Final = [
    ("", 502, PASSING),
    *((code, *answered) for answered, codes in CODES.items() for code in codes.split()),
]


@pytest.mark.parametrize(("code", "status", "kind"), ANSWERS, ids=lambda each: str(each))
def test_an_answer_of_aws_has_one_answer_also_as_s3fs_and_boto3_pass_it_on(
    code: str, status: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONTAINER, raising=False)
    error = answer(code, status)
    assert faults.kind(error) is kind
    assert faults.kind(translate_boto_error(error)) is kind  # with an errno of its own
    with pytest.raises(S3UploadFailedError) as raised:
        upload(error)
    assert faults.kind(raised.value) is kind


def upload(error: Exception) -> None:
    try:
        raise error
    except Exception as found:
        raise S3UploadFailedError("Failed to upload") from found


# --- chains, other libraries, disks ---------------------------------------------------------------
def within(outer: Exception, inner: Exception) -> Exception:
    """As where an ``except`` raises an error of its own."""
    try:
        try:
            raise inner
        except Exception:
            raise outer  # noqa: B904
    except Exception as error:
        return error


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


def hub(name: str, status: int = 0) -> Any:
    from huggingface_hub import errors

    error = bare(getattr(errors, name))
    error.response = SimpleNamespace(status_code=status) if status else None
    return error


def local(inner: Any) -> Exception:
    """As the Hub's client says that it has nothing, and why it could not ask."""
    found: Exception = caused(hub("LocalEntryNotFoundError"), inner)
    return found


def httpx(name: str) -> Any:
    for module in ("httpx2", "httpx"):  # the Hub's client has one or the other
        try:
            return bare(getattr(importlib.import_module(module), name))
        except ImportError:
            continue
    raise AssertionError("the Hub's client has another HTTP library")


REFUSED: Final = aws.MetadataRetrievalError(error_msg="Received non 200 response 429")
RETRIEVAL: Final = aws.CredentialRetrievalError(provider="container-role", error_msg="429")
ROLE: Final = aws.CredentialRetrievalError(provider="custom-process", error_msg="exit 1")
ERRNOS: Final = {
    PASSING: "ENOSPC EDQUOT EIO EBUSY ESTALE ETIMEDOUT ECONNRESET ECONNREFUSED ENETUNREACH "
    "EHOSTUNREACH EMFILE EREMOTEIO EPIPE ENOMEM",
    USER: "ENOENT EACCES EPERM EROFS ENOTDIR EISDIR EEXIST ENAMETOOLONG EINVAL",
}
OTHERS: Final[list[tuple[str, Exception, Kind]]] = [
    ("credentials endpoint busy", within(RETRIEVAL, REFUSED), PASSING),
    ("process of credentials", within(ROLE, OSError(errno.ENOENT, "no such program")), USER),
    ("login expired", aws.TokenRetrievalError(provider="sso", error_msg="x"), USER),
    ("unparsable", ResponseParserError("x"), PASSING),
    ("fsspec", FSTimeoutError(), PASSING),
    (
        "certificate",
        caused(aws.SSLError(endpoint_url="x", error=OSError()), bare(ssl.SSLCertVerificationError)),
        USER,
    ),
    ("tls", ssl.SSLError(1, "[SSL] record layer failure"), PASSING),
    ("no cache on the way of another", within(OSError(errno.ENOENT, "x"), KeyError("x")), USER),
    *(
        (name, bare(getattr(aiohttp, name)), kind)
        for name, kind in {
            "ClientPayloadError": PASSING,
            "ServerDisconnectedError": PASSING,
            "ClientConnectorError": PASSING,
            "ServerTimeoutError": PASSING,
            "ClientConnectorCertificateError": USER,
            "InvalidURL": USER,
        }.items()
    ),
    *(
        (f"Hub {status}", local(hub("HfHubHTTPError", status)), PASSING)
        for status in (408, 429, 500, 502, 503, 504)
    ),
    *((f"Hub {status}", hub("HfHubHTTPError", status), USER) for status in (400, 401, 403, 404)),
    ("Hub down", local(httpx("ConnectError")), PASSING),
    ("Hub slow", httpx("ReadTimeout"), PASSING),
    ("Hub breaks off", httpx("RemoteProtocolError"), PASSING),
    ("Hub xet", hub("XetDownloadError"), PASSING),
    ("Hub offline", local(hub("OfflineModeIsEnabled")), USER),
    *(
        (name, hub(name), USER)
        for name in (
            "GatedRepoError",
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
            "HFValidationError",
            "BadRequestError",
            "DisabledRepoError",
            "LocalTokenNotFoundError",
        )
    ),
    *(
        (f"HTTP {status}", urllib.error.HTTPError("u", status, "x", Message(), None), kind)
        for status, kind in {429: PASSING, 503: PASSING, 403: USER, 404: USER}.items()
    ),
    ("no name", urllib.error.URLError(socket.gaierror(-3, "Temporary failure")), PASSING),
    ("gaierror", socket.gaierror(-2, "Name or service not known"), PASSING),
    *(
        (name, OSError(getattr(errno, name), os.strerror(getattr(errno, name))), kind)
        for kind, names in ERRNOS.items()
        for name in names.split()
    ),
    ("a library's own", OSError("cannot identify image file"), OURS),
    ("full, in words", RuntimeError("I/O error: No space left on device (os error 28)"), PASSING),
    (
        "full, of torch",
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        PASSING,
    ),
    (
        "full, below",
        within(RuntimeError("x"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        PASSING,
    ),
    ("told", InputError("x"), USER),
    ("told that it passes", AdvisedError("x"), PASSING),
    ("told over another", caused(InputError("x"), ConnectionError()), USER),
    ("a bug", KeyError("x"), OURS),
    ("a bug on the way of another", within(KeyError("x"), ConnectionError("x")), OURS),
    ("an unknown one", RuntimeError("x"), OURS),
    ("of another", within(RuntimeError("x"), ConnectionError("x")), PASSING),
    ("of another, ours", within(RuntimeError("x"), InputError("x")), USER),
    ("in the handler of ours", within(TimeoutError(), InputError("x")), PASSING),
    ("memory", MemoryError(), OURS),
]


@pytest.mark.parametrize(
    ("error", "kind"), [each[1:] for each in OTHERS], ids=[each[0] for each in OTHERS]
)
def test_an_error_of_a_library_a_disk_or_a_chain_has_one_answer(
    error: Exception, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONTAINER, raising=False)
    assert faults.kind(error) is kind


@pytest.mark.parametrize(
    "error",
    [
        aws.NoCredentialsError(),
        aws.PartialCredentialsError(provider="env", cred_var="x"),
        aws.CredentialRetrievalError(provider="container-role", error_msg="refused"),
        answer("ExpiredToken", 400),
    ],
    ids=lambda each: type(each).__name__,
)
def test_where_ecs_gives_the_credentials_a_lack_of_them_passes(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert faults.kind(error) is USER
    monkeypatch.setenv(CONTAINER, "http://169.254.170.2/x")
    assert faults.kind(error) is PASSING
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a user's own")
    assert faults.kind(error) is USER


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("--x is 3"), exits.BAD_INPUT, "error: --x is 3"),
        (UnreachableError("S3 is down"), exits.STORAGE, "error: S3 is down; check the address, or"),
        (AdvisedError("S3 is down: wait"), exits.STORAGE, "error: S3 is down: wait"),
        (aws.ReadTimeoutError(endpoint_url="u"), exits.STORAGE, "error: Read timeout on endpoint"),
        (
            PermissionError(errno.EACCES, "denied", "/x"),
            exits.BAD_INPUT,
            "error: [Errno 13] denied",
        ),
        (ReportedError("it ended"), exits.FAILED, "error: it ended"),
        (InputError("x: No space left on device"), exits.STORAGE, "error: x: No space left"),
        (KeyboardInterrupt(), exits.INTERRUPTED, "interrupted"),
        (KeyError("a bug"), None, ""),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else "",
)
def test_a_command_ends_with_a_sentence_and_a_code_and_only_a_bug_with_its_traceback(
    error: BaseException, code: int | None, said: str
) -> None:
    lines: list[str] = []

    @faults.command(say=lines.append)
    def main() -> int:
        raise error

    if code is None:
        with pytest.raises(KeyError):
            main()
    else:
        assert main() == code
    assert " ".join(lines).startswith(said)
    assert len(lines) == (code is not None)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (answer("AccessDenied", 403), InputError, r"check the name, the region and the cred"),
        (answer("ExpiredToken", 400), InputError, "log in again: aws sso login"),
        (aws.SSOTokenLoadError(error_msg="x"), InputError, "log in again: aws sso login"),
        (answer("SlowDown", 503), UnreachableError, "SlowDown"),
        (PermissionError(errno.EACCES, "denied"), InputError, "denied$"),
        (UnreachableError("S3 is down"), UnreachableError, "^S3 is down$"),
        (KeyError("a bug"), KeyError, "^'a bug'$"),
    ],
)
def test_an_explained_error_says_what_happened_and_what_to_do(
    error: Exception, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONTAINER, raising=False)
    with pytest.raises(kind, match=said):
        raise faults.explained(error, "s3://b cannot be read")


# --- nobody else decides --------------------------------------------------------------------------
PRODUCT: Final = ("contract", "store", "containers", "stacks", "trainctl", "training")
#: A type's name, in an annotation.
ELSEWHERE: Final = {("trainctl/aws/errors.py", "ClientError")}
#: Commands that end in another way.
NO_BOUNDARY: Final = {
    "containers/health.py": "a check of ECS: any failure is an unhealthy container",
    "containers/ray_start.py": "Ray's own command",
    "containers/ray_watch.py": "its node goes on without it",
    "containers/program/start/supervisor.py": "run() reports a mistake as the job's outcome",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for top in PRODUCT:
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_no_other_module_knows_a_code_a_status_or_an_errno_of_the_table() -> None:
    words = {
        *(faults._PASSING_CODES | faults._OUR_CODES),
        *frozenset().union(*faults._CLASSES.values()),
    }
    numbers = {408, 425, 429, 501, 502, 503, 504}
    found = {
        (name, node.value)
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and node.value in (words if isinstance(node.value, str) else numbers)
        and name != "contract/faults.py"
    }
    assert found == ELSEWHERE


def test_every_command_ends_at_the_one_place_where_errors_end() -> None:
    without = {
        name
        for name, tree in trees()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name == "main"
        and not any("faults.command" in ast.unparse(each) for each in node.decorator_list)
    }
    assert without == {*NO_BOUNDARY}
