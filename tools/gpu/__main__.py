"""Run one part of the campaign, all of a rehearsal, or pack what it needs.

python -m tools.gpu r1 --out r1.json                    on a GPU; status 0 green, 1 red, 3 something is open
python -m tools.gpu r1 --rehearse                       here: gloo for NCCL, CPU engines, small sizes
python -m tools.gpu r1 --rehearse --plant rounded       with a planted fault, of which the verdict must tell
python -m tools.gpu pack --help                         make what travels small; extension --help compiles

In this order, with minutes by arithmetic; the first line of each file says what it checks:
r1 (4)  several ranks over NCCL     r2 (4)  lost ranks, weights to servers     r3 (3)  TransformerEngine on two ranks
r5 (3)  vLLM with TP 2              r6 (4)  speed beside vLLM and Megatron     r9 (5)  servers in flight
r8 (8 a seed)  a learning curve: --keep FOLDER --only "pre|seed 0|curves"
r4 (14)  the doctor, in two runs: --only rank, --only planted
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from tools.gpu.run import SECONDS, Run

NAMES = ("r1", "r2", "r3", "r4", "r5", "r6", "r8", "r9")  # r6 has R7, too


def script_of(name: str) -> Any:
    return importlib.import_module(f"tools.gpu.{name}")


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["pack"], ["extension"]):
        return script_of(arguments[0]).main(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--out", type=Path, help="the result, written after every part (default: NAME.json)")
    parser.add_argument("--rehearse", action="store_true", help="on this machine's processors")
    parser.add_argument("--plant", metavar="FAULT", default="", help="of the part's PLANTS")
    parser.add_argument("--only", metavar="PATTERN", default="", help="parts with this in their name")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="go on with what is there and in the result")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts (default %(default)g)")
    options = parser.parse_args(arguments)
    script = script_of(options.name)
    if options.plant and options.plant not in script.PLANTS:
        parser.error(f"--plant {options.plant}: {options.name} has {', '.join(script.PLANTS)}")
    out = options.out or Path(f"{options.name}.json")
    how = {"plant": options.plant, "seconds": options.seconds, "only": options.only, "keep": options.keep}
    script.main(run := Run(options.name, out, options.rehearse, **how))
    return run.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
