"""How servers and the trainer find each other: one file per server in the run directory, and a token that is not in it.

The file is written when the server can answer and names its address, so that neither side needs a list of nodes or
fixed ports. The token comes from the environment or a private file, and goes nowhere else.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.config.servers import TOKEN_VARIABLE, ServersConfig
from megatron_rl.errors import InputError

MIN_TOKEN_LENGTH = 16  # characters; what a person makes up in passing is shorter


@dataclass(frozen=True)
class Address:
    """Where a server is. ``instance`` tells a server that was started again from the one before; "" is not known."""

    name: str
    url: str
    instance: str = ""
    pid: int = 0
    host: str = ""


def read_token(config: ServersConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """The shared secret; None where the recipe names no file and the environment has none.

    Raises `InputError` for a file that others may read, or a token too short to be one.
    """
    source, token = TOKEN_VARIABLE, environment.get(TOKEN_VARIABLE, "")
    if config.token_file is not None:
        source = f"rollout.servers.token_file: {config.token_file}"
        try:
            mode = config.token_file.stat().st_mode
            token = config.token_file.read_text().strip()
        except OSError as error:
            raise InputError(f"{source}: cannot be read ({error.strerror}); write a secret there, mode 600") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InputError(f"{source}: others than its owner may read it (mode {mode & 0o777:o}); chmod 600 it")
    if not token:
        return None
    if len(token) < MIN_TOKEN_LENGTH:
        raise InputError(f"{source}: holds {len(token)} characters; at least {MIN_TOKEN_LENGTH} are wanted")
    return token


def require_token(config: ServersConfig) -> str:
    """As `read_token`, but a missing one is an `InputError`."""
    token = read_token(config)
    if token is None:
        raise InputError(
            f"no token: set the environment variable {TOKEN_VARIABLE} (the same for trainer and servers, for example "
            "from `openssl rand -hex 32`), or name a file of mode 600 in rollout.servers.token_file"
        )
    return token


def folder(run_dir: Path) -> Path:
    """Where the servers of a run write their addresses."""
    return run_dir / "servers"


def publish(run_dir: Path, address: Address) -> Path:
    """Write the server's file, all of it at once."""
    path = folder(run_dir) / f"{address.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(asdict(address), indent=2) + "\n")
    partial.replace(path)
    return path


def withdraw(path: Path, address: Address) -> None:
    """Take the file away, unless another server has taken the name since."""
    if path.is_file() and read(path) == address:
        path.unlink(missing_ok=True)


def read(path: Path) -> Address | None:
    """The address in a file; None where the file went or is no address."""
    try:
        return Address(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def discover(config: ServersConfig, run_dir: Path) -> list[Address]:
    """Addresses that the recipe lists, else those that servers have published."""
    if config.addresses:
        return [Address(name=url.split("://", 1)[1], url=url.rstrip("/")) for url in config.addresses]
    found = (read(path) for path in sorted(folder(run_dir).glob("*.json")))
    return [address for address in found if address is not None]
