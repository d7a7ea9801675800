"""Whether `megatron-rl parity` names the operator in which a fault was planted.

    python -m tools.dev.parity_faults make docs/parity.json     # all faults, about two minutes of one core
    python -m tools.dev.parity_faults table docs/parity.json
    python -m tools.dev.parity_faults show docs/images/parity.png --only "position off by one in decode"

Each fault is in one operator of one witness, of a small random model of its family. A fault counts as located if the
first operator beyond its bound is that operator, in that witness alone (or in those that share the fault). Faults of
vLLM's weights go in as a weight update, as in a run. All others replace a number or a function, and put it back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.instruments.parity import report
from megatron_rl.instruments.parity.compare import compare
from tools.dev import parity_learner_faults, parity_vllm_faults  # noqa: F401 - they fill `FAULTS`
from tools.dev.parity_bench import FAULTS, GENERATION, Bench, Fault, make_models


def examine(bench: Bench, fault: Fault) -> dict[str, Any]:
    """What parity says of a planted fault. JSON-able."""
    others = [who for who in ("transformers", "learner", "vllm") if who not in fault.who]
    result = compare(bench.checkpoint, bench.under(fault, others))
    first = result.first
    named = first[0].tap if first else None
    witnesses_ = sorted(e.witness for e in first)
    if not first and result.generation and result.generation[1]:
        named, witnesses_ = result.generation[1][0], [GENERATION]
    experts = sorted({e for error in first for e in error.experts})
    located = named == fault.taps and witnesses_ == sorted(fault.witnesses)
    if fault.experts is not None:
        located = located and tuple(experts) == fault.experts
    return {
        "fault": fault.name,
        "model": fault.model,
        "planted": fault.taps,
        "named": named,
        "witnesses": witnesses_,
        "experts": experts,
        "ratio": min(max((e.ratio for e in first), default=0.0), 1e30),
        "located": located,
        "sentence": result.verdict(),
    }


def examine_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Every fault, model by model; and what the sound witnesses of each model give."""
    models = make_models(folder, list(dict.fromkeys(FAULTS[name].model for name in names)))
    results, clean = {}, {}
    for family, path in models.items():
        with Bench(path) as bench:
            who = ("transformers", "learner", "exact", "vllm")
            result = compare(bench.checkpoint, [record for name in who for record in bench.clean(name)])
            clean[family] = {"beyond": len(result.failures), "operators": len(result.errors)}
            for name in (name for name in names if FAULTS[name].model == family):
                results[name] = examine(bench, FAULTS[name])
                print(f"{'located' if results[name]['located'] else 'MISSED ':8} {name}: {results[name]['sentence']}")
                sys.stdout.flush()
    return {"clean": clean, "faults": [results[name] for name in names]}


def show(name: str, picture: Path) -> str:
    """Parity's report on one fault; its picture goes to ``picture``."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder, Bench(make_models(Path(folder), [fault.model])[fault.model]) as bench:
        records = bench.under(fault, [who for who in ("transformers", "learner", "vllm") if who not in fault.who])
        result = compare(bench.checkpoint, records)
        report.draw(result).savefig(picture, dpi=100)
        return report.as_text(bench.setup, result)


def table(made: dict[str, Any]) -> str:
    lines = ["| fault | planted in | named | error over bound |", "| --- | --- | --- | --- |"]
    for row in made["faults"]:
        experts = f", experts {', '.join(map(str, row['experts']))}" if row["experts"] else ""
        mark = "" if row["located"] else " (missed)"
        lines.append(f"| {row['fault']} | `{row['planted']}` | `{row['named']}`{experts}{mark} | {row['ratio']:.0e} |")
    located = sum(row["located"] for row in made["faults"])
    lines += ["", f"{located} of {len(made['faults'])} faults located."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "table", "show"))
    parser.add_argument("file", type=Path, help="JSON file to write or to read; with show: the picture")
    parser.add_argument("--only", default="", help="faults whose name, or whose model, has this in it")
    args = parser.parse_args()
    if args.what == "table":
        print(table(json.loads(args.file.read_text())))
        return
    names = [name for name, fault in FAULTS.items() if args.only in name or args.only == fault.model]
    if args.what == "show":
        print(show(names[0], args.file))
        return
    with tempfile.TemporaryDirectory(prefix="parity-faults-") as folder:
        made = examine_all(Path(folder), names)
    if args.only and args.file.is_file():  # the others stay as they were found
        before = json.loads(args.file.read_text())
        rows = {row["fault"]: row for row in [*before["faults"], *made["faults"]]}
        made = {"clean": before["clean"] | made["clean"], "faults": [rows[name] for name in FAULTS if name in rows]}
    args.file.write_text(json.dumps(made, indent=1) + "\n")
    located = sum(row["located"] for row in made["faults"])
    print(f"{located} of {len(made['faults'])} located; wrote {args.file}")


if __name__ == "__main__":
    main()
