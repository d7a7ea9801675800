"""What a run tells of its servers, while it goes on and afterwards: one file in the run directory, and metrics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.rollout.servers.load import Load
from megatron_rl.rollout.servers.members import Member, Members
from megatron_rl.rollout.servers.rendezvous import folder


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


def table(members: Members, refused: dict[str, str], ended: bool = False) -> dict[str, Any]:
    """``refused``: why servers that were found are not used, by name. ``ended``: the run needs them no more."""
    rows = []
    for member in members.members.values():
        state = (
            "lost" if member.lost else "ended" if ended else "ready" if member.version == members.due else "updating"
        )
        address = member.address
        rows.append(row(address.name, address.url, member.version, state, _load(member), member.lost))
    rows += [
        row(name, "", None, "refused", Load(), why) for name, why in refused.items() if name not in members.members
    ]
    return {"written": time.time(), "due": members.due, "servers": rows}


def write_table(run_dir: Path, content: dict[str, Any]) -> None:
    """All of it at once."""
    path = table_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def read_table(run_dir: Path) -> dict[str, Any] | None:
    """None where the run has not written one, or it is none."""
    try:
        found = json.loads(table_path(run_dir).read_text())
        return found if {"written", "due", "servers"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


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
