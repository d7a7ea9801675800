"""What a run tells of its servers, while it goes on and afterwards: one file in the run directory, and metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.process.output import write_whole
from megatron_rl.rollout.servers.pool import Member, Members
from megatron_rl.rollout.servers.rendezvous import folder
from megatron_rl.rollout.servers.wire import Load


def table_path(run_dir: Path) -> Path:
    """Not ….json: those are the servers' own files."""
    return folder(run_dir) / "table"


def row(name: str, url: str, version: int | None, state: str, load: Load, lost: str) -> dict[str, Any]:
    """One server, as JSON can hold it."""
    return {
        "name": name,
        "url": url,
        "version": version,
        "state": state,
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "prefix_hits": load.prefix_hits,
        "tokens_per_s": load.tokens_per_s,
        "answered": load.answered,
        "lost": lost,
    }


def table(
    members: Members, refused: dict[str, str], ended: bool = False, aside: dict[str, str] | None = None
) -> dict[str, Any]:
    """``refused``, ``aside``: why what was found is not used, by name: a server that does not fit the recipe, and what
    does not answer as a server of the run. ``ended``: the run needs them no more."""
    aside = aside or {}
    rows = []
    for member in members.members.values():
        state = (
            "lost" if member.lost else "ended" if ended else "ready" if member.version == members.due else "updating"
        )
        address = member.address
        now = aside.get(address.name)
        lost = f"{member.lost}; now {now}" if member.lost and now else member.lost
        rows.append(row(address.name, address.url, member.version, state, _load(member), lost))
    for state, reasons in (("refused", refused), ("aside", aside)):
        rows += [
            row(name, "", None, state, Load(), why) for name, why in reasons.items() if name not in members.members
        ]
    return {"written": time.time(), "due": members.due, "servers": rows}


def write_table(run_dir: Path, content: dict[str, Any]) -> None:
    """All of it at once."""
    path = table_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def read_table(run_dir: Path) -> dict[str, Any] | None:
    """None where the run has not written one, or what is there is not one."""
    try:
        table = json.loads(table_path(run_dir).read_text())
        kinds = {name: type(value) for name, value in row("", "", 0, "", Load(), "").items()}
        is_table = {"written", "due", "servers"} <= table.keys() and _is_whole(table["due"])
        return table if is_table and all(_is_row(one, kinds) for one in table["servers"]) else None
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        return None


def _is_row(row: dict[str, Any], kinds: dict[str, type]) -> bool:
    return (
        row.keys() == kinds.keys()
        and all(isinstance(row[name], str) for name, kind in kinds.items() if kind is str)
        and all(_is_whole(row[name]) for name, kind in kinds.items() if kind is int)
        and all(_is_finite(row[name]) for name, kind in kinds.items() if kind is float)
    )


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return value is None or type(value) is int


def prompt_tokens(members: Iterable[Member]) -> tuple[int, int]:
    """Of all servers since their starts: tokens of prompts, and those of them that prefix caches held."""
    loads = [_load(member) for member in members]
    return sum(load.prompt_tokens for load in loads), sum(load.cached_tokens for load in loads)


def load_metrics(members: Members, before: tuple[int, int], at_home: float) -> dict[str, float]:
    """`rollout/servers/*` of a batch, from what servers said last. ``before``: `prompt_tokens` at its beginning.

    ``at_home``: share of its requests that went to the server which had computed their prompt.
    """
    loads = [_load(member) for member in members.ready] or [Load()]
    prompted, cached = (now - then for now, then in zip(prompt_tokens(members.members.values()), before))
    return {
        "rollout/servers/running": sum(load.running for load in loads) / len(loads),
        "rollout/servers/waiting": sum(load.waiting for load in loads) / len(loads),
        "rollout/servers/kv_usage": max(load.kv_usage for load in loads),
        "rollout/servers/tokens_per_s": sum(load.tokens_per_s for load in loads),
        "rollout/servers/prefix_hits": cached / prompted if prompted > 0 else 0.0,
        "rollout/servers/at_home": at_home,
        "rollout/servers/lost": float(sum(bool(member.lost) for member in members.members.values())),
    }


def _load(member: Member) -> Load:
    return getattr(member.client, "load", Load())
