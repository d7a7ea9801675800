"""The command `run servers`: what the rollout servers of a run do."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import EXIT_DONE, InputError

if TYPE_CHECKING:
    from megatron_rl.rollout.servers.rendezvous import Address


SERVER_COLUMNS = ("name", "url", "version", "state", "running", "waiting", "KV cache", "why")
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
    return (
        one["name"],
        one["url"],
        version,
        one["state"],
        str(one["running"]),
        str(one["waiting"]),
        f"{100 * one['kv_usage']:.0f}%",
        one["lost"],
    )
