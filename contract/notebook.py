"""The notebook of a standing cluster: how the command line starts it, and finds its page.

JupyterLab runs on the head, as a job of Ray's that ``trainctl notebook`` submits.
"""

import hashlib
import hmac
from typing import Final

PORT: Final = 8888  # on the head
RUN: Final = "notebook"  # its files are kept as those of a run of this name
JOB: Final = "notebook-"  # beginning of the names of its jobs; a number follows
READY: Final = "notebook: ready"  # the line of its log that tells that the page answers


def page_token(cluster_token: str) -> str:
    """What the page asks for: known to all who know the token of the cluster.

    The page's address holds it and lands in browser histories, so the cluster's own token cannot be
    computed from it.
    """
    return hmac.new(cluster_token.encode(), b"notebook", hashlib.sha256).hexdigest()[:40]
