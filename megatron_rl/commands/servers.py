"""The rollout servers of a run: which there are, what they hold and how busy they are, or why they are not used.

    megatron-rl servers RUN [--json]

RUN is a run directory; the run may go on or have ended. It says which servers it uses; where the token is at hand
(MRL_SERVER_TOKEN, or `rollout.servers.token_file` of the run's recipe) servers that are not lost are asked as well.

    state   ready: it may be asked · updating: it takes weights · lost, refused: `why` says so · ended: with the run ·
            answers, silent: found by its file alone, or asked just now
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_DONE, InputError

COLUMNS = ("name", "url", "version", "state", "running", "waiting", "KV cache", "prefix hits", "tokens/s", "why")
ASK_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    found = describe(options.run)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(render(found))
    return EXIT_DONE


def describe(run_dir: Path) -> dict[str, Any]:
    """``due``: policy version that servers should hold; ``servers``: one row each, as the run and they themselves say.

    Raises `InputError` where the directory knows of no server.
    """
    from megatron_rl.rollout.servers.load import Load
    from megatron_rl.rollout.servers.rendezvous import folder, read
    from megatron_rl.rollout.servers.table import read_table, row

    told = read_table(run_dir) or {"written": None, "due": None, "servers": []}
    addresses = [read(path) for path in sorted(folder(run_dir).glob("*.json"))]
    known = {one["name"] for one in told["servers"] if one["state"] != "lost"}
    for address in addresses:
        if address is not None and address.name not in known:
            told["servers"].append(row(address.name, address.url, None, "found", Load(), ""))
    if not told["servers"]:
        raise InputError(
            f"{run_dir}: no server has been there; rollout.engine: vllm_server, and `serve` or `train` once"
        )
    token = _token(run_dir)
    if token is not None:
        asyncio.run(_ask(told["servers"], token))
    return told


def _token(run_dir: Path) -> str | None:
    from megatron_rl.config import load_recipe
    from megatron_rl.monitor.run_directory import RunDirectory
    from megatron_rl.rollout.servers.rendezvous import read_token

    recipe = RunDirectory(run_dir).recipe
    return read_token(load_recipe(recipe).rollout.servers) if recipe.is_file() else None


async def _ask(servers: list[dict[str, Any]], token: str) -> None:
    """What servers say of themselves, in place."""
    from megatron_rl.rollout.servers.client import ServerClient, ServerError
    from megatron_rl.rollout.servers.load import Load
    from megatron_rl.rollout.servers.rendezvous import Address
    from megatron_rl.rollout.servers.table import row

    async def ask(one: dict[str, Any]) -> None:
        client = ServerClient(Address(one["name"], one["url"]), token, ASK_S)
        try:
            found = await client.settings()
            state = "answers" if one["state"] == "found" else one["state"]
            one |= row(one["name"], one["url"], found["version"], state, Load.of(found.get("load")), "")
        except ServerError as error:
            one |= {"state": "silent", "lost": str(error)}
        finally:
            await client.close()

    await asyncio.gather(*(ask(one) for one in servers if one["state"] in ("ready", "updating", "found")))


def render(found: dict[str, Any]) -> str:
    """A table, a line for each server."""
    lines = [COLUMNS, *(_cells(one) for one in found["servers"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if found["due"] is not None:
        text.append(f"policy version that is due: {found['due']}")
    return "\n".join(text)


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
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
