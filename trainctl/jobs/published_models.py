"""Check of a Hugging Face model against the Hub's file list, before a host starts."""

import http.client
import json
import os
import re
import urllib.parse
import urllib.request
from typing import Final

from training.models.weight_files import check_weights

_HUB: Final = "https://huggingface.co"
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: The answer is a courtesy: the job's node looks again.
_TIMEOUT_S: Final = 5.0


def check_model(model: str) -> None:
    """Look whether a model of the Hub has weights.

    Nothing is known of other models, nor where this machine does not reach the Hub or may not see
    the model; the node finds out then.

    Args:
        model: as the setting ``--model`` has it.

    Raises:
        InputError: it has no weights that can be used.
    """
    repository, _, revision = model.partition("@")
    if not _ID.fullmatch(repository) or os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return
    names = _names(repository, revision or "main")
    if names is not None:
        check_weights(names, model)


def _names(repository: str, revision: str) -> list[str] | None:
    hub = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    url = f"{hub}/api/models/{repository}/revision/{urllib.parse.quote(revision, safe='')}"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            files = json.load(response)["siblings"]
            return [str(each["rfilename"]) for each in files]
    # HTTPError and URLError are OSErrors.
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
