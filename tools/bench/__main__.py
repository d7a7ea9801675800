"""Benchmarks of tools/bench: each in a process of its own, with one thread.

    python -m tools.bench [NAME …]                    print each one's figures (default: all)
    python -m tools.bench --smoke [NAME …]            the smallest sizes: does each still run? Seconds each
    python -m tools.bench --record FILE [NAME …]      also put command, output, commit and date in FILE (make figures)

Records are kept under "records" in FILE (docs/performance.json); what else is there stays. Exit status 1 where a
benchmark fails; the others run all the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Benchmark → the sizes of its smoke form. No smoke form judges times: one round says nothing.
SMOKE: dict[str, dict[str, Any]] = {
    "endpoint": {"prompts": 1, "group": 2, "length": 4},
    "engines": {"prompts": 1, "group": 2, "length": 4},
    "exact": {"sizes": (2,), "length": 4},
    "learner": {"sizes": ((2, 16),)},
    "refit": {},
    "replay": {"length": 64},
    "servers": {"prompts": 1, "group": 2, "length": 4},
}


def measure(name: str, smoke: bool) -> None:
    """Print the figures of one benchmark, in this process."""
    import torch

    from megatron_rl.learner.process_groups import shutdown
    from tools.bench.endpoint import endpoint
    from tools.bench.engines import engines
    from tools.bench.parts import ALL

    torch.set_num_threads(1)
    (ALL | {"endpoint": endpoint, "engines": engines})[name](**(SMOKE[name] | {"rounds": 1} if smoke else {}))
    shutdown()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def record(file: Path, name: str, output: str) -> None:
    changed = " and changes that no commit has" if git("status", "--porcelain", "--untracked-files=no") else ""
    document = json.loads(file.read_text()) if file.exists() else {}
    document.setdefault("records", {})[name] = {
        "command": f"python -m tools.bench {name}",
        "commit": git("rev-parse", "--short=7", "HEAD") + changed,
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "output": output.splitlines(),
    }
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SMOKE)}")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what each printed to FILE")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SMOKE]:
        parser.error(f"{unknown[0]}: no benchmark; one of {', '.join(SMOKE)}")
    if options.smoke and options.record:
        parser.error("--smoke measures nothing that is worth a record; leave out one of --smoke and --record")
    if len(options.names) == 1 and not options.record:
        measure(options.names[0], options.smoke)
        return 0
    failed = []
    for name in options.names or SMOKE:
        command = [sys.executable, "-m", "tools.bench", name, *(["--smoke"] if options.smoke else [])]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        print(f"== {name}\n{done.stdout}", end="", flush=True)
        if done.returncode:
            failed.append(name)
        elif options.record:
            record(options.record, name, done.stdout)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
