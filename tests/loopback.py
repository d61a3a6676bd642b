"""Servers of HTTP on loopback, for what asks one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Status and text of the answer to a request with this body.
Answer = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, str]]


@contextmanager
def answering(answer: Answer, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Answer requests, whatever their method; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = answer(self, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_PUT = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer((host, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
