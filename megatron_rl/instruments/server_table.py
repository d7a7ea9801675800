"""The command `run servers`: what the rollout servers of a run do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_DONE, InputError

SERVER_COLUMNS = ("name", "url", "version", "state", "running", "waiting", "KV cache", "why")


def add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="List the servers of this run directory.")


def run_servers(options: argparse.Namespace) -> int:
    """List a run's rollout servers: version of the weights, load, and why a server is not used.

        megatron-rl run servers RUN

    RUN is the directory of a running or finished run. The list comes from the run's own table.

        state   ready: takes requests · updating: receives weights · lost, refused: see `why` · ended: with the run ·
                found: known by its file alone
    """
    print(server_table(describe(options.run)))
    return EXIT_DONE


def describe(run_dir: Path) -> dict[str, Any]:
    """Return ``due`` (the policy version that servers should have) and ``servers`` (a row per server).

    Raises `InputError` if the directory lists no server.
    """
    from megatron_rl.rollout.servers.pool import read_table, row
    from megatron_rl.rollout.servers.rendezvous import folder, read
    from megatron_rl.rollout.servers.wire import Load

    table = read_table(run_dir) or {"written": None, "due": None, "servers": []}
    listed = {one["name"] for one in table["servers"] if one["state"] != "lost"}
    for path in sorted(folder(run_dir).glob("*.json")):
        if (address := read(path)) is not None and address.name not in listed:
            table["servers"].append(row(address.name, address.url, None, "found", Load(), ""))
    if not table["servers"]:
        raise InputError(
            f"{run_dir}: no server has been registered; set rollout.engine: vllm_server and start `serve` or `train`"
        )
    return table


def server_table(status: dict[str, Any]) -> str:
    """Return the table as text, a line per server."""
    lines = [SERVER_COLUMNS]
    for one in status["servers"]:
        version, kept = "-" if one["version"] is None else one["version"], f"{one['kv_usage']:.0%}"
        cells = (one["name"], one["url"], version, one["state"], one["running"], one["waiting"], kept, one["lost"])
        lines.append(tuple(map(str, cells)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(SERVER_COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if status["due"] is not None:
        text.append(f"policy version that is due: {status['due']}")
    return "\n".join(text)
