"""Commands that show a run: `run watch`, `samples`, `plot` and `servers`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.commands.arguments import COUNT, INDEX, PORT, output
from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.instruments.watch.run import WatchedRun
    from megatron_rl.monitor.plots import Curves
    from megatron_rl.rollout.servers.rendezvous import Address

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


def add_plot(parser: argparse.ArgumentParser) -> None:
    from megatron_rl.instruments.paper_figures import PAPERS
    from megatron_rl.monitor.plots import X_LABELS  # matplotlib is for this command alone

    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="Read this run directory, metrics.jsonl or other project's log, which may be written as label=RUN.",
    )
    parser.add_argument(
        "--out", type=output, default=Path("plots"), help="Write curves.png and curves.html to this folder."
    )
    parser.add_argument(
        "--title", default=None, help="Write this heading (default: the label, or the number of experiments)."
    )
    parser.add_argument(
        "--x", choices=tuple(X_LABELS), default="step", help="Draw over steps, time or tokens (default: %(default)s)."
    )
    parser.add_argument(
        "--smooth",
        type=COUNT,
        metavar="STEPS",
        help="Smooth with an exponential mean over this span (default: by length).",
    )
    parser.add_argument("--paper", choices=PAPERS, help="Draw the figures of this paper.")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        help="Draw only this figure of --paper. The option may be given several times.",
    )


def run_plot(options: argparse.Namespace) -> int:
    """Draw the curves of several runs over each other: one PNG and one self-contained HTML page.

        megatron-rl run plot RUN [RUN ...] [--out DIR] [--title TEXT] [--x step|time|tokens] [--smooth STEPS]
        megatron-rl run plot --paper length-decay RUN [RUN ...] [--figure fig05]

    RUN is a run directory (or its metrics.jsonl), a log of verl, slime, miles, NeMo-RL, prime-rl or TRL
    (docs/coming-from.md), or label=RUN. Runs with the same label are seeds of one experiment: a line shows their mean
    and a band their range. The default label is the folder's name without a trailing `-seed<n>` or `-s<n>`. Curves of
    more than 40 steps are smoothed; `--smooth 1` draws every value. Panels that are always 0 are left out, and
    identical curves are drawn once.

    --paper draws the figures of a paper instead, one PNG each, and names the metrics that a run lacks. Give the runs of
    the figure's arms; --figure limits the command to figures that fit these runs.
    """
    from megatron_rl.instruments.foreign.read import read_run
    from megatron_rl.monitor.plots import View, build_page, draw_figure, drawable_panels, group_runs

    source_lines: list[str] = []

    def read(path: Path) -> list[dict[str, float]]:
        run = read_run(path)
        source_lines.extend(run.source_lines())
        return run.records

    groups = group_runs(options.runs, read)
    print("\n".join(source_lines), end="\n" if source_lines else "")
    if options.paper:
        return draw_figures(options, groups)
    if not drawable_panels(groups):
        raise InputError(f"{', '.join(options.runs)}: no step with a metric that has a panel was recorded")
    view = View(options.x, options.smooth)
    title = options.title or (groups[0].label if len(groups) == 1 else f"{len(groups)} experiments")
    options.out.mkdir(parents=True, exist_ok=True)
    draw_figure(groups, title, view=view).savefig(options.out / "curves.png", dpi=110)
    (options.out / "curves.html").write_text(build_page(groups, title, view), encoding="utf-8")
    for group in groups:
        print(f"{group.label}: {len(group.runs)} run(s), {group.num_steps} steps")
    print(f"wrote {options.out / 'curves.png'} and {options.out / 'curves.html'}")
    return EXIT_DONE


SCATTER = {"hacking": "fig03", "fp16": "fig02-tokens"}
"""The figure of each paper that needs runs with stored batches (recorder.record_batches)."""


def draw_figures(options: argparse.Namespace, groups: list[Curves]) -> int:
    """Draw the figures of `--paper` and return the exit status. Raises `InputError` if none can be drawn."""
    from megatron_rl.instruments.paper_figures import PAPERS, draw_paper

    scatter = SCATTER.get(options.paper)
    available = [figure.name for figure in PAPERS[options.paper]] + ([scatter] if scatter else [])
    if unknown := [name for name in options.figure if name not in available]:
        raise InputError(f"--figure {unknown[0]}: {options.paper} has {', '.join(available)}")
    options.out.mkdir(parents=True, exist_ok=True)
    written, missing = draw_paper(options.paper, groups, options.out, options.figure)
    if scatter and (not options.figure or scatter in options.figure):
        from megatron_rl.instruments.paper_figures import draw_scatter

        figure = draw_scatter([named_folder(text) for text in options.runs], f"{options.paper}, {scatter}")
        if figure is None:
            missing.append(f"{scatter}: no run has stored batches (recorder.record_batches)")
        else:
            written.append(options.out / f"{options.paper}-{scatter}.png")
            figure.savefig(written[-1], dpi=110)
    for sentence in missing:
        print(sentence)
    if not written:
        raise InputError(f"--paper {options.paper}: no run has the metrics of any of these figures")
    print("wrote " + ", ".join(map(str, written)))
    return EXIT_DONE


def named_folder(argument: str) -> tuple[str, Path]:
    """Return label and folder of a RUN argument."""
    label, _, path = argument.rpartition("=") if not Path(argument).exists() else ("", "", argument)
    folder = Path(path).resolve()
    folder = folder.parent if folder.is_file() else folder
    return label or folder.name, folder


SERVER_COLUMNS = ("name", "url", "version", "state", "running", "waiting", "KV cache", "prefix hits", "tokens/s", "why")
ASK_S = 10.0


def add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="Ask the servers of this run directory.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def run_servers(options: argparse.Namespace) -> int:
    """List a run's rollout servers: version of the weights, load, and why a server is not used.

        megatron-rl run servers RUN [--json]

    RUN is the directory of a running or finished run. The list comes from the run's own table. With the token
    (MRL_SERVER_TOKEN) the command also queries servers that are not lost.

        state   ready: takes requests · updating: receives weights · lost, refused: see `why` · ended: with the run ·
                answers, silent: result of the query just now · found: known by its file alone
    """
    table = describe(options.run)
    if options.json:
        print(json.dumps(table, indent=1))
    else:
        print(server_table(table))
    return EXIT_DONE


def describe(run_dir: Path) -> dict[str, Any]:
    """Return ``due`` (the policy version that servers should have) and ``servers`` (a row per server).

    Rows come from the run's table and from the servers' own answers. Raises `InputError` if the directory lists no
    server.
    """
    from megatron_rl.rollout.servers.pool import read_table, row
    from megatron_rl.rollout.servers.rendezvous import folder, read, read_token
    from megatron_rl.rollout.servers.wire import Load

    table = read_table(run_dir) or {"written": None, "due": None, "servers": []}
    addresses = [read(path) for path in sorted(folder(run_dir).glob("*.json"))]
    listed = {one["name"] for one in table["servers"] if one["state"] != "lost"}
    for address in addresses:
        if address is not None and address.name not in listed:
            table["servers"].append(row(address.name, address.url, None, "found", Load(), ""))
    if not table["servers"]:
        raise InputError(
            f"{run_dir}: no server has been registered; set rollout.engine: vllm_server and start `serve` or `train`"
        )
    token = read_token()
    if token is not None:
        asyncio.run(_ask(table["servers"], {address.name: address for address in addresses if address}, token))
    return table


async def _ask(servers: list[dict[str, Any]], addresses: dict[str, Address], token: str) -> None:
    """Query ``servers`` and update their rows in place. ``addresses``: the published ones, by name."""
    from megatron_rl.rollout.servers.client import ServerClient, ServerError
    from megatron_rl.rollout.servers.pool import row
    from megatron_rl.rollout.servers.rendezvous import Address, ServerSettings

    async def ask(one: dict[str, Any]) -> None:
        client = ServerClient(addresses.get(one["name"]) or Address(one["name"], one["url"]), token, ASK_S)
        try:
            settings = ServerSettings.of(await client.settings())
            state = "answers" if one["state"] == "found" else one["state"]
            one |= row(one["name"], one["url"], settings.version, state, settings.load, "")
        except (ServerError, ValueError) as error:
            one |= {"state": "silent", "lost": str(error)}
        finally:
            await client.close()

    await asyncio.gather(*(ask(one) for one in servers if one["state"] in ("ready", "updating", "found")))


def server_table(status: dict[str, Any]) -> str:
    """Return the table as text, a line per server."""
    lines = [SERVER_COLUMNS, *(_server_cells(one) for one in status["servers"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(SERVER_COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if status["due"] is not None:
        text.append(f"policy version that is due: {status['due']}")
    return "\n".join(text)


def _server_cells(one: dict[str, Any]) -> tuple[str, ...]:
    version = "-" if one["version"] is None else str(one["version"])
    shares = (f"{100 * one['kv_usage']:.0f}%", f"{100 * one['prefix_hits']:.0f}%", f"{one['tokens_per_s']:.0f}")
    return (
        one["name"],
        one["url"],
        version,
        one["state"],
        str(one["running"]),
        str(one["waiting"]),
        *shares,
        one["lost"],
    )
