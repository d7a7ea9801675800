"""Whether `run why` and `run branch` find a cause that was planted in a run: the figures in docs/lab/causes.md.

    python -m tools.dev.branch_table make OUT [CASE …]   # four minutes of one core a case; finished ones are kept
    python -m tools.dev.branch_table pack OUT docs/lab/branch.json
    python -m tools.dev.branch_table table docs/lab/branch.json

A case is a run of a tiny recipe that is healthy until step `Case.at`, where one thing is changed. `run branch` starts
at that step. Its arms are the one that undoes the change, and others that undo something else. The cases are in
tools/dev/branch_cases.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.dev.branch_cases import CASES, RESERVES, WRITTEN_BEFORE, Case, arguments_of_branch, data_folder, settings

ALL = CASES | RESERVES
STEPS = 30
SEEDS = (3, 5, 8)  # the next number where the command is undecided: then it asks for more
LEVEL = 0.05


def wrong_answers(row: Mapping[str, str]) -> dict[str, str]:
    """Name of a set of training data → the wrong answer that it gives to the prompt of ``row``."""
    last_digit = row["problem"].rstrip("=")[-1]
    return {"plus_three": str((int(row["answer"]) + 3) % 10), "all_seven": "7", "last_digit": last_digit}


def make(out: Path, names: list[str], num_jobs: int) -> None:
    """Run the cases of ``names`` (all where it is empty); what is finished stays as it is."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (data_folder() / "train.jsonl").read_text().splitlines()]
    for file in wrong_answers(rows[0]):
        lines = [json.dumps(row | {"answer": wrong_answers(row)[file]}) + "\n" for row in rows]
        (out / f"{file}.jsonl").write_text("".join(lines))
    for name in names or CASES:
        noted = out / f"{name}.json"
        if not noted.exists():
            result = _run(out, name, ALL[name], num_jobs)
            noted.write_text(json.dumps(result, indent=1) + "\n")
            print(_row(name, _short(result)), flush=True)


def _run(out: Path, name: str, case: Case, num_jobs: int) -> dict[str, Any]:
    run = out / name
    base = [f"recipes/tiny/{case.recipe}.yaml", "--set", f"run_root={out}", "--set", f"name={name}"]
    phases = [(case.at, False)] if case.at and not (run / f"checkpoints/step_{case.at:08}").is_dir() else []
    for steps, planted in (*phases, (max(STEPS, case.at + case.steps), True)):
        sets = [part for change in settings(case, out, planted=planted) for part in ("--set", change)]
        allowed = ["--allow-changes"] if planted else []
        _command(out / f"{name}.log", "train", *base, "--set", f"num_steps={steps}", *sets, *allowed)
    why = json.loads(_command(out / f"{name}.log", "run", "why", str(run), "--json"))
    if why["healthy"]:
        return {"why": why, "branch": None}
    branch = None
    for seeds in SEEDS:
        arguments = arguments_of_branch(case, run, seeds, num_jobs)
        said = _command(out / f"{name}.log", "run", "branch", *arguments, "--json", allowed=(2,))
        if not said:  # nothing is worse, the log says
            break
        branch = json.loads(said)
        if all(arm["verdict"] != "undecided" for arm in branch["arms"]):
            break
    return {"why": why, "branch": branch}


def _command(log: Path, *arguments: str, allowed: tuple[int, ...] = ()) -> str:
    with log.open("a") as errors:
        command = [sys.executable, "-m", "megatron_rl", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode not in (0, 3, *allowed):  # done, or ended by a limit
        raise SystemExit(f"status {done.returncode}, see {log}: {' '.join(arguments)}")
    return done.stdout


def pack(out: Path, file: Path) -> int:
    """Write what the table needs of all finished cases to ``file``, beside those that it has; the number of all."""
    results = json.loads(file.read_text()) if file.exists() else {}
    noted = {name: out / f"{name}.json" for name in ALL}
    results |= {name: _short(json.loads(path.read_text())) for name, path in noted.items() if path.exists()}
    lines = [f"{json.dumps(name)}: {json.dumps(results[name])}" for name in ALL if name in results]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return len(lines)


def _short(result: Mapping[str, Any]) -> dict[str, Any]:
    """The first two suspects; what was lost; arm → verdict and the share of the loss that it restores; the seeds.

    And where several arms bring it back, those that surely restore less than the best one → p.
    """
    if result["why"]["healthy"]:
        return {"healthy": True}
    branch = result["branch"] or {"outcome": None, "arms": [], "seeds": 0}  # None: nothing was lost
    outcome = branch["outcome"] and {key: _rounded(branch["outcome"][key]) for key in ("metric", "before", "after")}
    arms = {arm["name"]: [arm["verdict"], _rounded(arm["restored"])] for arm in branch["arms"]}
    suspects = [suspect["name"] for suspect in result["why"]["suspects"][:2]]
    short = {"healthy": False, "suspects": suspects, "outcome": outcome, "arms": arms, "seeds": branch["seeds"]}
    pairs = branch.get("contrasts", ())
    less = {pair["other"]: _rounded(pair["p"]) for pair in pairs if pair["p"] < LEVEL and pair["effect"] > 0}
    return short | ({"less": [pairs[0]["arm"], less]} if less else {})


def _rounded(value: Any) -> Any:
    return float(f"{value:.2g}") if isinstance(value, float) else value


def table(file: Path) -> list[str]:
    """A Markdown table of the cases in ``file``, and in the last line how many are right."""
    results = json.loads(file.read_text())
    harmed = {name: result for name, result in results.items() if not result["healthy"]}
    right = [sum(is_right(ALL[name], result)[which] for name, result in harmed.items()) for which in (0, 1, 2)]
    lines = ["| case | planted | lost | first two suspects | `why` | arms and what they restore | `branch` |"]
    lines += ["|---|---|---|---|---|---|---|", *(_row(name, result) for name, result in results.items())]
    said = f"`why` is right in {right[0]}, `branch` in {right[1]}, and in {right[2]} if it may restore most"
    return [*lines, "", f"{len(harmed)} became unstable: {said}"]


def summary(file: Path) -> list[str]:
    """Return a Markdown table with a line for each planted cause."""
    results = json.loads(file.read_text())
    lines = ["| planted | cases | unstable | `why` right | `branch` right |", "|---|---|---|---|---|"]
    for suspect in dict.fromkeys(ALL[name].suspect for name in results):
        cases = {name: result for name, result in results.items() if ALL[name].suspect == suspect}
        right = [is_right(ALL[name], result) for name, result in cases.items() if not result["healthy"]]
        why, branch = (sum(verdicts[which] for verdicts in right) for which in (0, 1))
        lines.append(f"| {suspect} | {len(cases)} | {len(right)} | {why} | {branch} |")
    return lines


def written_before(file: Path) -> str:
    """How many of the twelve cases that were written down before are right; reserves in place of those without harm."""
    results = json.loads(file.read_text())
    names = [name for name in WRITTEN_BEFORE if not results.get(name, {}).get("healthy")]
    reserves = [name for name in RESERVES if not results.get(name, {}).get("healthy")]
    names += reserves[: len(WRITTEN_BEFORE) - len(names)]
    finished = [is_right(ALL[name], results[name]) for name in names if name in results]
    right = [sum(verdicts[which] for verdicts in finished) for which in (0, 1)]
    told = f"`why` right in {right[0]}, `branch` in {right[1]}"
    return f"written down before: {len(finished)} of {len(names)} finished, {told}"


def is_right(case: Case, result: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Whether `run why` has the planted cause among its first two suspects, and whether `run branch` decides for it.

    A decision: the arm that undoes it brings the outcome back, and every other arm does not. "undecided" is none. The
    last value counts one as well where another arm brings back surely less.
    """
    verdicts = {name: verdict for name, (verdict, _) in result["arms"].items()}
    best, less = result.get("less", ("", {}))
    decided = verdicts.get(case.cure) == "brings it back"
    against = [verdicts.get(name) in ("does not", "makes it worse") for name in case.others]
    beaten = [best == case.cure and name in less for name in case.others]
    most = all(either or other for either, other in zip(against, beaten, strict=True))
    return case.suspect in result["suspects"], decided and all(against), decided and most


def _row(name: str, result: Mapping[str, Any]) -> str:
    case = ALL[name]
    at = f" from step {case.at}" if case.at else ""
    planted = f"`{name}` | {case.suspect}: " + ", ".join(f"`{_told(change)}`" for change in case.planted) + at
    if result["healthy"]:
        return f"| {planted} | nothing | none | unharmed | | |"
    suspected, decided, most = is_right(case, result)
    lost, word = result["outcome"], "yes" if decided else "restores most" if most else "no"
    outcome = "nothing" if lost is None else f"`{lost['metric']}` {lost['before']:g} → {lost['after']:g}"
    arms = "; ".join(_arm(arm, verdict, restored) for arm, (verdict, restored) in result["arms"].items())
    best, less = result.get("less", ("", {}))
    arms += "".join(f"; `{best}` more than `{other}`, p {p:g}" for other, p in less.items())
    arms += f"; {result['seeds']} seeds" if result["seeds"] > SEEDS[0] else ""
    suspects = ", ".join(result["suspects"]) or "none"
    return f"| {planted} | {outcome} | {suspects} | {'yes' if suspected else 'no'} | {arms} | {word} |"


def _arm(name: str, verdict: str, restored: float | None) -> str:
    share = "" if restored is None else f" {round(restored, 2) + 0.0:.0%}"
    told = f"`{name}`{share}" + (", undecided" if verdict == "undecided" else "")
    return f"**{told}**" if verdict == "brings it back" else told


def _told(change: str) -> str:
    key, _, value = change.partition("=")
    short = value.rpartition(":")[2] if key == "reward.name" else value.rpartition("/")[2]
    return f"{key}={short}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("names", nargs="*", metavar="CASE", choices=[[], *ALL])
    making.add_argument("--jobs", type=int, default=2, metavar="N", help="arms at a time")
    packing = commands.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("file", type=Path)
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.out.resolve(), options.names, options.jobs)
    elif options.command == "table":
        print("\n".join([*table(options.file), written_before(options.file), "", *summary(options.file)]))
    else:
        print(f"{pack(options.out, options.file)} cases in {options.file}")


if __name__ == "__main__":
    main()
