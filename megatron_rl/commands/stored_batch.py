"""Shared by the commands on stored batches: their arguments, and the start of several ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def add_stored_batch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``run``, ``step``, ``weights``, ``layout`` and ``json``."""
    parser.add_argument("run", type=Path, help="Read this run directory.")
    parser.add_argument("--step", type=int, required=True, help="Analyse the stored batch of this step.")
    parser.add_argument(
        "--weights", default="exact", metavar="exact|nearest|DIR", help="Choose the weights as in `batch replay`."
    )
    parser.add_argument(
        "--layout",
        default="tp=1",
        help="Use this layout, for example tp=2,ep=2; sizes that are not named are 1 (default: tp=1).",
    )
    parser.add_argument("--json", type=Path, help="Write the numbers to this file as well.")


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def needs_ranks(ranks: int) -> bool:
    """Return whether this process must start ``ranks`` processes instead of computing itself."""
    return ranks > 1 and "WORLD_SIZE" not in os.environ


def start_ranks(arguments: list[str], ranks: int) -> int:
    """Run the command line ``arguments`` on ``ranks`` processes and return its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*torchrun, "-m", "megatron_rl", *arguments], env=environment, check=False).returncode
