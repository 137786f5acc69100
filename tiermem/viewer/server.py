"""The viewer's server: on this machine only, and only for who knows the address that it printed.

A trace can be read by its owner alone, while any user of a machine can connect to its ports. So the address has a
secret in it, which also keeps other pages in the browser out.
"""

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tiermem.trace.errors import TraceError
from tiermem.trace.place import reason
from tiermem.viewer.page import served
from tiermem.viewer.session import Session


class Server:
    """Serves ``session`` at ``url``, from `run` on, until `stop`."""

    def __init__(self, session: Session, port: int = 0) -> None:
        """Listen on ``port`` of 127.0.0.1, any free one for 0. Raises `TraceError` where it can't be had."""
        self.session = session
        self.secret = secrets.token_urlsafe(16)
        try:
            self._http = _HTTP(("127.0.0.1", port), _Answer)
        except OSError as error:
            raise TraceError(f"can't serve on port {port} of 127.0.0.1: {reason(error)}") from error
        self._http.server = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/{self.secret}/"

    def run(self) -> None:
        """Answer until `stop` is called, or Ctrl-C."""
        self._http.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """Have `run` return; from another thread than its own."""
        self._http.shutdown()

    def close(self) -> None:
        """Give the port back."""
        self._http.server_close()

    def answer(self, target: str) -> tuple[int, str, bytes]:
        """Status, type and content of what is asked for by a GET of ``target``."""
        parts = urlsplit(target)
        first, _, path = parts.path.lstrip("/").partition("/")
        if not secrets.compare_digest(first.encode(), self.secret.encode()):
            return (
                403,
                "text/plain",
                b"The address that tiermem printed has a secret in it, which is missing here.\n",
            )
        if path == "":
            return 200, "text/html; charset=utf-8", served().encode()
        try:
            return (
                200,
                "application/json",
                json.dumps(self._data(path, parts.query), separators=(",", ":")).encode(),
            )
        except (ValueError, IndexError):
            return 404, "text/plain", b"There is no such thing here.\n"
        except TraceError as error:
            return 500, "text/plain; charset=utf-8", str(error).encode("utf-8", "replace")

    def _data(self, path: str, query: str) -> Any:
        kind, *rest = path.split("/")
        if kind == "session" and not rest:
            pairs = [text.split("-") for text in parse_qs(query).get("seen", [])]
            return self.session.document([(int(generation), int(number)) for generation, number in pairs])
        numbers = [_natural(text) for text in rest]
        if kind == "tile" and len(numbers) == 3:
            run, level, index = numbers
            return self.session.runs[run].tile(level, index)
        if kind == "units" and len(numbers) == 1:
            return self.session.runs[numbers[0]].units()
        if kind == "comparison" and not numbers:
            return self.session.comparison()
        raise ValueError(path)


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    server: Server


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HTTP

    def do_GET(self) -> None:
        """Answer, and never in a way that a browser would keep or take for something else."""
        status, kind, content = self.server.server.answer(self.path)
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal is for the address."""


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(text)
    return int(text)
