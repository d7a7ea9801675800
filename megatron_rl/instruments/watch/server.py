"""The server of the pages: it reads only, on one loopback port of this machine.

Other users of the machine can reach its loopback ports, and so can web pages through names that resolve to 127.0.0.1.
Every address therefore has a secret token, made at the start, and a request whose Host is not the loopback is refused.
All addresses in the pages are relative, so that they work at any port and through tunnels.
"""

from __future__ import annotations

import hmac
import html
import secrets
import sys
import threading
import traceback
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron_rl.errors import InputError, printable
from megatron_rl.instruments.watch import page
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor.html_page import html_page

_HOSTS = ("localhost", "127.0.0.1", "[::1]")
SECURITY = {
    # The figures have styles and images within them; nothing runs, and nothing is loaded.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchServer(ThreadingHTTPServer):
    """Serves ``runs`` on 127.0.0.1 at ``port`` (0: a free one). Each request reads what is new."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], port: int) -> None:
        self.runs, self.token, self.lock = runs, secrets.token_urlsafe(18), threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def path(self) -> str:
        """Path of the page, below any address that reaches this port."""
        return f"/{self.token}/"

    def answer(self, name: str, query: str) -> str | None:
        """Return the page of this name; None where there is none. Raises `InputError` for wrong arguments."""
        arguments = {key: values[0] for key, values in parse_qs(query, max_num_fields=50).items()}

        def number(key: str, default: int | None) -> int | None:
            text = arguments.get(key)
            if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 12):
                raise InputError(f"{key}={text!r}: a number from 0 on")
            return default if text is None else int(text)

        index = number("run", 0)
        if index >= len(self.runs):
            raise InputError(f"run={index}: there are {len(self.runs)}")
        for run in self.runs:
            run.refresh()
        if name == "batch":
            return page.batch_page(self.runs[index], number("step", 0), number("sequence", None), index)
        if name == "why":
            return page.why_page(self.runs[index])
        return None if name else page.overview(self.runs, arguments.get("x", "step"))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a browser that disconnects."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "megatron-rl", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer requests for a page."""
        try:
            status, text = self._answer()
        except (InputError, ValueError) as error:
            status, text = HTTPStatus.NOT_FOUND, str(error)
        except Exception as error:  # noqa: BLE001 - one answer that fails must not end the page
            traceback.print_exc()
            told = "the terminal of megatron-rl run watch has the full error"
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}; {told}"
        self._send(status, text)

    do_HEAD = do_GET

    def _answer(self) -> tuple[HTTPStatus, str]:
        host = self.headers.get("Host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if name.lower() not in _HOSTS or not (port or "0").isdigit():
            return HTTPStatus.MISDIRECTED_REQUEST, "this server answers to localhost and 127.0.0.1 alone\n"
        address = urlsplit(self.path)
        _, token, *parts = address.path.split("/") if address.path.count("/") > 1 else ("", "")
        if not parts or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return HTTPStatus.NOT_FOUND, "no such page; megatron-rl run watch has printed its whole address\n"
        with self.server.lock:
            found = self.server.answer("/".join(parts), address.query)
        return (HTTPStatus.NOT_FOUND, "no such page\n") if found is None else (HTTPStatus.OK, found)

    def _send(self, status: HTTPStatus, text: str) -> None:
        if status != HTTPStatus.OK:
            text = html_page("no page", f"<p>{html.escape(printable(text))}</p>")
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        for header, value in SECURITY.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""
