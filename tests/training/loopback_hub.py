"""The Hugging Face Hub on loopback: it answers as the real one does."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONVERTED_COMMIT = COMMIT[::-1]

Files = Mapping[str, bytes]


@contextmanager
def serve(
    repositories: Mapping[str, tuple[str, Files]],
    converted: Mapping[str, Files] | None = None,
    *,
    host: str = "127.0.0.1",
) -> Iterator[str]:
    """Serve repositories; yield the address.

    Args:
        repositories: where the API has each, and where its files are -> the files.
        converted: what the Hub makes of some data sets, in a revision of its own.
    """
    handler = partial(_Hub, repositories, converted or {})
    with ThreadingHTTPServer((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{host}:{server.server_port}"
        server.shutdown()
        thread.join()


class _Hub(BaseHTTPRequestHandler):
    def __init__(
        self,
        repositories: Mapping[str, tuple[str, Files]],
        converted: Mapping[str, Files],
        *arguments: Any,
    ) -> None:
        self._repositories, self._converted = repositories, converted
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        for api, (place, files) in self._repositories.items():
            converted = self._converted.get(api, {})
            if path.startswith(api):
                commit = COMMIT
                if "refs%2Fconvert%2Fparquet" in path or CONVERTED_COMMIT in path:
                    files, commit = converted, CONVERTED_COMMIT
                tree = [
                    {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40}
                    for name in files
                ]
                siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
                info = {"id": api.partition("s/")[2], "sha": commit, "siblings": siblings}
                answer = tree if "/tree/" in path else info
                self._send(200, json.dumps(answer).encode(), with_body)
                return
            for commit, content in ((COMMIT, files), (CONVERTED_COMMIT, converted)):
                name = path.removeprefix(f"{place}/resolve/{commit}/")
                if name in content:
                    tag = {"ETag": f'"{name}"', "X-Repo-Commit": commit}
                    self._send(200, content[name], with_body, **tag)
                    return
        if "owner/gated" in path:
            self._send(403, b"{}", with_body, **{"X-Error-Code": "GatedRepo"})
        else:
            self._send(401, b"{}", with_body, **{"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, body: bytes, with_body: bool, **headers: str) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass
