"""A proxy in front of a real server that does harm to what it answers: for tests of what comes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

Alter = Callable[[str, bytes, bytes], tuple[bytes, bytes]]
"""(path, head, body) of an answer → those that are sent on. `ConnectionError`: the connection is cut instead."""


class HttpProxy:
    """Passes requests on to ``target`` (http://host:port) and answers back, through ``alter`` where one is set.

    ``paths``: that were asked. Answers need a Content-Length, or to have no body.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self.alter: Alter | None = None
        self.paths: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(*self._target)
            try:
                while True:
                    head, body = await _message(reader)
                    path = head.split(b" ", 2)[1].decode()
                    self.paths.append(path)
                    back.write(head + body)
                    head, body = await _message(there)
                    if self.alter is not None:
                        head, body = self.alter(path, head, body)
                    writer.write(head + body)
                    await writer.drain()
            finally:
                back.close()
                writer.close()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head, await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""


def with_body(head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """``head`` with the length of ``body``, and ``body``."""
    lines = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]), body
