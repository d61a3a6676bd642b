"""Server of ``trainctl ui``: loopback only, for those who know the token in its address.

Another page in the same browser, or a name that resolves to this machine, gets nothing: ``Host``
must be this server's, and nothing here can be framed, or read without the token. A report may be
written by any job, so it is shown in a sandbox.
"""

import contextlib
import os
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote

from trainctl.ui.pages import Page, Pages

LOOPBACK: Final = "127.0.0.1"
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_SANDBOX: Final = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Server(ThreadingHTTPServer):
    """Serves pages until it is shut down."""

    def __init__(self, pages: Pages, *, port: int = 0) -> None:
        """
        Args:
            port: 0: any free one.

        Raises:
            OSError: the port is taken.
        """
        super().__init__((LOOPBACK, port), _Handler)
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state", "trainctl")
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self.pages, self.token = pages, _kept(folder / "ui-token") or secrets.token_urlsafe(16)
        (folder / "ui-token").write_text(self.token)
        self.hosts = [f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")]
        self.url = f"http://{self.hosts[0]}/{self.token}/"
        # Other users of this machine can read what a browser is started with, but not this file.
        leads_there = folder / f"ui-{self.server_port}.html"
        _kept(leads_there)
        leads_there.write_text(f'<meta http-equiv="refresh" content="0; url={self.url}">')
        self.address = leads_there.as_uri()


def _kept(file: Path) -> str:
    """Content of a file that only this user can read."""
    file.touch(0o600)
    return file.read_text()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; ``http.server`` refuses all other methods."""

    server: Server
    timeout = 30  # seconds in which a client sends nothing

    def do_GET(self) -> None:
        token, _, path = self.path[1:].partition("/")
        path, _, query = path.partition("?")
        if self.headers.get("Host") not in self.server.hosts:
            self._send(Page(b"another host's name"), HTTPStatus.FORBIDDEN)
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(Page(b"trainctl ui prints its address"), HTTPStatus.NOT_FOUND)
        else:
            runs = ",".join(parse_qs(query).get("runs", ()))
            self._send(self.server.pages.page(unquote(path), f"/{token}/", runs=runs))

    def _send(self, page: Page, status: HTTPStatus = HTTPStatus.OK) -> None:
        headers = {
            "Content-Type": f"{page.type}; charset=utf-8",
            "Content-Security-Policy": _SANDBOX if page.is_foreign else _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        with contextlib.suppress(ConnectionError):  # the browser has left the page
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page.content)

    def log_message(self, *_: object) -> None:
        """Print nothing: an address has the token."""
