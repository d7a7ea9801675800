"""The page's server: a read-only server on one loopback port of this machine.

Other users of the machine can reach its loopback ports, and so can web pages through names that resolve to 127.0.0.1.
Every address therefore has a secret token, made at the start, and a request whose Host is not the loopback is refused.
All addresses in the page are relative, so that it works at any port and through tunnels.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import secrets
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_rl.errors import InputError
from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun, dumps
from megatron_rl.monitor.plots import X_LABELS

REFRESH_S = 1.0
COMPRESS_FROM = 1024  # bytes
_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_STATIC = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Query:
    """The arguments of a request. Raises `InputError` for missing ones and invalid numbers."""

    def __init__(self, text: str, runs: Sequence[WatchedRun]) -> None:
        try:
            self._values, self._runs = parse_qs(text, max_num_fields=50), runs
        except ValueError as error:
            raise InputError("more than 50 arguments") from error

    def text(self, name: str, default: str) -> str:
        return self._values.get(name, [default])[0]

    def texts(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def number(self, name: str, default: int | None = None) -> int | None:
        if name not in self._values:
            return default
        text = self._values[name][0]
        if not text.isascii() or not text.isdigit() or len(text) > 12:
            raise InputError(f"{name}={text!r}: a number from 0 on")
        return int(text)

    def needed(self, name: str) -> int:
        value = self.number(name)
        if value is None:
            raise InputError(f"{name}: is missing")
        return value

    @property
    def run(self) -> WatchedRun:
        index = self.number("run", 0)
        if index >= len(self._runs):
            raise InputError(f"run={index}: there are {len(self._runs)}")
        return self._runs[index]

    @property
    def axis(self) -> str:
        axis = self.text("x", "step")
        if axis not in X_LABELS:
            raise InputError(f"x={axis!r}: one of {', '.join(X_LABELS)}")
        return axis


def _locked(runs: Sequence[WatchedRun], view: Callable[[], Any]) -> Any:
    """Return ``view()`` while no run is refreshed; the runs are locked in a fixed order."""
    if not runs:
        return view()
    with runs[0].lock:
        return _locked(runs[1:], view)


_POINTS = 400
_ANSWERS: dict[str, Callable[[Sequence[WatchedRun], Query], Any]] = {
    "state": lambda runs, _: views.state(runs),
    "metrics": lambda runs, _: _locked(runs, lambda: views.metric_names(runs)),
    "panels": lambda runs, q: _locked(
        runs, lambda: views.panels(runs, q.axis, q.number("points", _POINTS), q.texts("metric")[:12])
    ),
    "bands": lambda runs, q: _locked(runs, lambda: views.bands(runs, q.number("step"), q.number("points", _POINTS))),
    "routes": lambda runs, q: _locked(runs, lambda: [views.routes(run) for run in runs]),
    "samples": lambda runs, q: _locked(
        [q.run], lambda: views.samples(q.run, q.number("before"), q.number("number", 10))
    ),
    "why": lambda _, q: views.why(q.run),
    "log": lambda runs, q: _locked([q.run], lambda: list(q.run.log)),
    "batch": lambda runs, q: views.responses(
        q.run, q.needed("step"), q.text("order", "mismatch"), q.number("start", 0), min(q.number("number", 20), 200)
    ),
    "response": lambda runs, q: views.response(
        q.run, q.needed("step"), q.needed("sequence"), q.number("start", 0), q.number("number", views.WINDOW)
    ),
}


class WatchServer(ThreadingHTTPServer):
    """Serves ``runs`` on 127.0.0.1 at ``port`` (0: a free one) and refreshes them in a thread."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], port: int) -> None:
        self.runs, self.token = runs, secrets.token_urlsafe(18)
        self._stop = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self._refresh, name="watch-refresh", daemon=True).start()

    @property
    def path(self) -> str:
        """Path of the page, below any address that reaches this port."""
        return f"/{self.token}/"

    def _refresh(self) -> None:
        while not self._stop.is_set():
            for run in self.runs:
                try:
                    run.refresh()
                except Exception:  # noqa: BLE001 - one file that cannot be read must not end the page
                    traceback.print_exc()
            if all(run.share_read >= 1 for run in self.runs):
                self._stop.wait(REFRESH_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a browser that disconnects."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self._stop.set()
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "megatron-rl", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer requests for the page, its parts and their data."""
        try:
            status, kind, body = self._answer()
        except InputError as error:
            status, kind, body = HTTPStatus.NOT_FOUND, "application/json", dumps({"error": str(error)})
        except Exception as error:  # noqa: BLE001 - one answer that fails must not end the page
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}; the terminal of megatron-rl run watch has the full error"}
            status, kind, body = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json", dumps(answer)
        self._send(status, kind, body)

    do_HEAD = do_GET

    def _answer(self) -> tuple[HTTPStatus, str, bytes]:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if name.lower() not in _HOSTS or not (port or "0").isdigit():
            return (
                HTTPStatus.MISDIRECTED_REQUEST,
                "text/plain",
                b"this server answers to localhost and 127.0.0.1 alone\n",
            )
        try:
            address = urlsplit(self.path)
        except ValueError as error:
            raise InputError("no address") from error
        _, token, *parts = address.path.split("/") if address.path.count("/") > 1 else ("", "")
        if not parts or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return (
                HTTPStatus.NOT_FOUND,
                "text/plain",
                b"no such page; megatron-rl run watch has printed its whole address\n",
            )
        if parts[0] == "api" and len(parts) == 2 and parts[1] in _ANSWERS:
            query = Query(address.query, self.server.runs)
            return HTTPStatus.OK, "application/json", dumps(_ANSWERS[parts[1]](self.server.runs, query))
        asked = "/".join(parts) or "index.html"
        file = next((file for file in _STATIC.iterdir() if file.name == asked and file.suffix in _TYPES), None)
        if file is None:
            return HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n"
        return HTTPStatus.OK, _TYPES[file.suffix], file.read_bytes()

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
        is_known = status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        is_compressed = len(body) >= COMPRESS_FROM and "gzip" in self.headers.get("Accept-Encoding", "")
        if is_known:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        elif is_compressed:
            body = gzip.compress(body, compresslevel=5, mtime=0)
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("ETag", tag)
        for header, value in SECURITY.items():
            self.send_header(header, value)
        if not is_known:
            self.send_header("Content-Length", str(len(body)))
            if is_compressed:
                self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a page that sends a request every two seconds would fill the terminal."""
