"""What the commands on stored batches share: their arguments, and a start on several ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def add_stored_batch(parser: argparse.ArgumentParser) -> None:
    """``options.run``, ``step``, ``weights``, ``layout`` and ``json``."""
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, required=True, help="step of the stored batch")
    parser.add_argument("--weights", default="exact", metavar="exact|nearest|DIR", help="as in `megatron-rl replay`")
    parser.add_argument("--layout", default="tp=1", help="for example tp=2,ep=2; sizes not named are 1 (default: tp=1)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def is_main_rank() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def needs_ranks(ranks: int) -> bool:
    """Whether this process has to start ``ranks`` others instead of computing by itself."""
    return ranks > 1 and "WORLD_SIZE" not in os.environ


def start_ranks(arguments: list[str], ranks: int) -> int:
    """The command line ``arguments`` on ``ranks`` processes; its exit status."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run([*torchrun, "-m", "megatron_rl", *arguments], env=environment, check=False).returncode
