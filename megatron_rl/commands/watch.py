"""Watch runs as they go on, in the terminal or on a page: curves, alarms, mismatch, routes, samples token by token.

    megatron-rl watch RUN [RUN ...]                in the terminal, until Ctrl-C; not a terminal: once, as text
    megatron-rl watch RUN [RUN ...] --page         as a page of this machine, which prints its address
    megatron-rl watch RUN [RUN ...] --port 8421    the same at another port

RUN is a run directory, or label=RUN; several are drawn over each other. It need not have begun, and may be finished.
Nothing is read but the run directory and the tokenizer that its recipe names, nothing is written.

The page is served on 127.0.0.1 alone, and its address holds a token: keep it to yourself. From elsewhere it is reached
through ssh: `ssh -L 8420:127.0.0.1:8420 HOST`, then the same address here (docs/reading-a-run.md).
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.watch.run import WatchedRun

PORT = 8420


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or label=RUN")
    parser.add_argument("--page", action="store_true", help="serve a page instead of drawing in the terminal")
    parser.add_argument("--port", type=int, help=f"of the page, which it implies; 0: a free one (default: {PORT})")
    parser.add_argument("--once", action="store_true", help="in the terminal: print what there is and end")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="in the terminal (default: 2)")


def run(options: argparse.Namespace) -> int:
    from megatron_rl.watch.run import open_runs

    if options.port is not None and not 0 <= options.port < 65536:
        raise InputError(f"--port {options.port}: from 0 to 65535")
    if not options.every > 0:
        raise InputError(f"--every {options.every}: seconds, above 0")
    runs = open_runs(options.runs)
    if options.page or options.port is not None:
        return serve(runs, PORT if options.port is None else options.port)
    from megatron_rl.watch.terminal import watch

    watch(runs, options.every, options.once)
    return EXIT_DONE


def serve(runs: Sequence[WatchedRun], port: int) -> int:
    """The page until Ctrl-C. `InputError` where the port is taken."""
    from megatron_rl.watch.server import WatchServer

    try:
        server = WatchServer(runs, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise InputError(f"--port {port}: {error.strerror}; --port 0 takes a free one") from error
    port = server.server_address[1]
    print(f"http://127.0.0.1:{port}{server.path}")
    print(
        f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS-HOST, then the same address. Ctrl-C ends.",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return EXIT_DONE
