"""The commands `run watch` and `run samples`."""

from __future__ import annotations

import argparse
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.arguments import COUNT, INDEX, PORT
from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.instruments.watch.run import WatchedRun

DEFAULT_PORT = 8420


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="Watch this run directory, which may be written as label=RUN."
    )
    parser.add_argument("--page", action="store_true", help="Serve a page instead of drawing in the terminal.")
    parser.add_argument("--port", type=PORT, help=f"Serve a page at this port; 0: any (default: {DEFAULT_PORT}).")
    parser.add_argument("--once", action="store_true", help="Print what there is and end.")


def run_watch(options: argparse.Namespace) -> int:
    """Watch runs live, in the terminal (state, curves, alarms) or on a page (also mismatch, routes, sampled texts).

        megatron-rl run watch RUN [RUN ...]                in the terminal, until Ctrl-C; not a terminal: once, as text
        megatron-rl run watch RUN [RUN ...] --page         as a page of this machine, which prints its address
        megatron-rl run watch RUN [RUN ...] --port 8421    the same at another port

    RUN is a run directory, or label=RUN; several runs are drawn over each other. A run may be finished or not yet
    begun. The command reads only the run directory and the tokenizer of its recipe, and writes no file.

    The page is served on 127.0.0.1 only, and its address has a secret token. From another machine, use
    `ssh -L 8420:127.0.0.1:8420 HOST` (a compute node: with -J LOGIN), then the same address there.
    """
    from megatron_rl.instruments.watch.run import open_runs

    runs = open_runs(options.runs)
    if options.page or options.port is not None:
        return serve(runs, DEFAULT_PORT if options.port is None else options.port)
    from megatron_rl.instruments.watch.terminal import watch

    watch(runs, options.once)
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


def add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Read this run directory or file of samples.")
    parser.add_argument("--step", type=INDEX, help="Print only the samples of this step.")
    parser.add_argument(
        "--number", type=COUNT, default=4, help="Print at most this number of samples (default: %(default)s)."
    )


def run_samples(options: argparse.Namespace) -> int:
    """Print sampled responses of a run, the newest first: prompt, response, reward, length, ratio to the engine.

        megatron-rl run samples RUN [--step N] [--number N]

    RUN is a run directory, or a file of `eval --output` (….samples.jsonl). The recipe's `monitor.samples` sets how many
    samples are written and how long they may be. Control characters are shown as escapes.
    """
    from megatron_rl.monitor.run_directory import RunDirectory
    from megatron_rl.monitor.samples import read_samples, render

    if not options.run.exists():
        raise InputError(f"{options.run}: no such folder; expected a run directory (run_root/name of its recipe)")
    file = RunDirectory(options.run).samples if options.run.is_dir() else options.run
    samples = list(read_samples(file))
    if options.step is not None:
        steps = sorted({sample["step"] for sample in samples})
        samples = [sample for sample in samples if sample["step"] == options.step]
        if not samples:
            raise InputError(f"--step {options.step}: {file} has samples of {_some(steps)}")
    newest_first = sorted(
        samples, key=lambda sample: -sample["step"]
    )  # the sort is stable, so samples of a step stay in order
    for sample in newest_first[: options.number]:
        print(render(sample))
    return EXIT_DONE


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-20:]))
    return f"step {shown}" if len(steps) <= 20 else f"{len(steps)} steps, the last {shown}"
