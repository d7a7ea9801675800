"""Watch runs live, in the terminal or on a page: curves, alarms, mismatch, routes, samples token by token.

    megatron-rl run watch RUN [RUN ...]                in the terminal, until Ctrl-C; not a terminal: once, as text
    megatron-rl run watch RUN [RUN ...] --page         as a page of this machine, which prints its address
    megatron-rl run watch RUN [RUN ...] --port 8421    the same at another port

RUN is a run directory, or label=RUN; several runs are drawn over each other. A run may be finished or not yet begun.
The command reads only the run directory and the tokenizer of its recipe, and writes no file.

The page is served on 127.0.0.1 only, and its address has a secret token. From another machine, use
`ssh -L 8420:127.0.0.1:8420 HOST`, then the same address there (docs/reading-a-run.md).
"""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.instruments.watch.run import WatchedRun

PORT = 8420


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="Watch this run directory, which may be written as label=RUN."
    )
    parser.add_argument("--page", action="store_true", help="Serve a page instead of drawing in the terminal.")
    parser.add_argument("--port", type=int, help=f"Serve a page at this port; 0 is a free one (default: {PORT}).")
    parser.add_argument("--once", action="store_true", help="Print what there is and end.")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="Draw in the terminal at this interval (default: 2).",
    )


def run(options: argparse.Namespace) -> int:
    from megatron_rl.instruments.watch.run import open_runs

    if options.port is not None and not 0 <= options.port < 65536:
        raise InputError(f"--port {options.port}: must be from 0 to 65535")
    if not options.every > 0:
        raise InputError(f"--every {options.every}: must be more than 0 seconds")
    runs = open_runs(options.runs)
    if options.page or options.port is not None:
        return serve(runs, PORT if options.port is None else options.port)
    from megatron_rl.instruments.watch.terminal import watch

    watch(runs, options.every, options.once)
    return EXIT_DONE


def serve(runs: Sequence[WatchedRun], port: int) -> int:
    """Serve the page until Ctrl-C and return the exit status. Raises `InputError` if the port is taken."""
    from megatron_rl.instruments.watch.server import WatchServer

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
