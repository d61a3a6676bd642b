"""Files of the Hugging Face Hub, in the cache of this node."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from contract import faults
from contract.errors import InputError
from training.data import download

_TIMEOUT_S: Final = 10.0


def fetch(
    name: str,
    patterns: tuple[str, ...],
    *,
    kind: str = "model",
    what: str = "model",
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Files of a repository of the Hugging Face Hub, in the node's cache.

    Args:
        name: ``owner/name`` or ``owner/name@revision``.
        patterns: of the file names wanted.
        kind: ``model`` or ``dataset``.
        what: how an error calls it.

    Raises:
        InputError: there is none, or it needs a token.
        UnreachableError: the Hub cannot be reached, or is busy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    try:
        folder = download.persistently(
            lambda: snapshot_download(
                repository, repo_type=kind, revision=revision or None, allow_patterns=[*patterns]
            ),
            what=f"{what} {name} could not be fetched",
            sleep=sleep,
        )
    except GatedRepoError:
        raise InputError(
            f"{what} {name} is only for accounts that its owner has admitted: ask on its page, "
            "then set HF_TOKEN to a token of that account"
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"{what} {repository} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        token = (
            "the token in HF_TOKEN may not see it"
            if os.environ.get("HF_TOKEN")
            else ("if it is private, set HF_TOKEN to a token that may read it")
        )
        raise InputError(
            f"{what} {name} is not known to the Hugging Face Hub: check the name; {token}"
        ) from None
    except HFValidationError:
        raise InputError(
            f"{what} {name!r} is neither a folder, nor an s3:// address, nor a Hugging Face id "
            "(owner/name)"
        ) from None
    except Exception as error:  # those of its HTTP library, too
        said = f"{what} {name} is no folder here, and huggingface.co does not provide it"
        raise faults.explained(error, said) from None
    return Path(folder)


def names(name: str, *, kind: str = "model") -> list[str] | None:
    """Names of the files of a repository; None where the Hub refuses to tell: ``fetch`` says why.

    Raises:
        UnreachableError: it does not answer.
    """
    from huggingface_hub import HfApi

    repository, _, revision = name.partition("@")
    try:
        found: Any = HfApi().repo_info(
            repository, repo_type=kind, revision=revision or None, timeout=_TIMEOUT_S
        )
    except Exception as error:  # those of its HTTP library, too
        if faults.is_passing(error):
            raise faults.explained(error, f"{kind} {name} is not provided") from None
        return None
    return [each.rfilename for each in found.siblings or []]
