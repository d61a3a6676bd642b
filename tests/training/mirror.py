"""A server of files on loopback, as good as a test wants it to be."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Mirror(http.server.BaseHTTPRequestHandler):
    """Serves files from memory, with ranges, and fails as it is told."""

    files: dict[str, bytes]
    asked: list[tuple[str, str]]
    break_off_after: list[int]
    """Bytes after which each of the next answers breaks off."""
    answers: list[int]
    """Status of each of the next answers, instead of a file."""
    has_ranges = True

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        self.asked.append((self.path, wanted))
        if self.answers:
            self.send_error(self.answers.pop(0))
            return
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        if wanted and self.has_ranges:
            first = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if first >= len(content):
                self.send_error(416)
                return
            content = content[first:]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.break_off_after:
            content = content[: self.break_off_after.pop(0)]
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def served(content: dict[str, bytes]) -> Iterator[tuple[str, type[Mirror]]]:
    """Serve these files, by their paths.

    Yields:
        the address, and what has been asked, fails and is there.
    """

    class Handler(Mirror):
        files = content
        asked: list[tuple[str, str]] = []  # noqa: RUF012
        break_off_after: list[int] = []  # noqa: RUF012
        answers: list[int] = []  # noqa: RUF012

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
