"""Scores pairs of gold answer and response: false positives and false negatives of `math_reward`, by kind.

    python -m tools.score_answers [FILE.jsonl …] [--show] [--no-math-verify]

A line of a file is a pair: ``gold``, ``response``, ``right`` (1 or 0), and optionally ``kind`` and ``style``. Without a
file the pairs of the tests are scored. Beside our rates stand those of math-verify, where it is installed; it reads the
response with its own extraction. ``--show`` prints the pairs that `math_reward` judges wrongly. Exit status 1 where our
false positives exceed 0.3% of the wrong answers or our false negatives 2% of the right ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import EXIT_BAD_INPUT
from megatron_rl.rewards.math_task import DEFAULT_MEMORY_MIB, DEFAULT_TIMEOUT_S, math_verdict
from megatron_rl.rewards.pool import WorkerPool

PAIRS = Path(__file__).resolve().parents[1] / "tests/unit/rewards/answer_pairs.jsonl"
MAX_FALSE_POSITIVES, MAX_FALSE_NEGATIVES = 0.003, 0.02

Pair = dict[str, Any]


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file. ValueError: a line that is no pair."""
    pairs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        pair = json.loads(line)
        if not {"gold", "response", "right"} <= set(pair) or pair["right"] not in (0, 1):
            raise ValueError(f"{path}, line {number}: a pair needs gold, response and right (0 or 1)")
        pairs.append(pair)
    return pairs


def our_verdicts(pairs: list[Pair]) -> list[bool]:
    """Verdicts as a training run finds them; what needs algebra goes to one worker process."""
    verdicts = [math_verdict(pair["response"], pair["gold"]) for pair in pairs]
    places = [place for place, verdict in enumerate(verdicts) if isinstance(verdict, dict)]
    with WorkerPool(1, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB) as pool:
        for place, outcome in zip(places, pool.run([verdicts[place] for place in places])):
            verdicts[place] = outcome.value
    return [bool(verdict) for verdict in verdicts]


def math_verify_verdicts(pairs: list[Pair]) -> list[bool] | None:
    """Verdicts of math-verify with its defaults; None where it is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return None
    logging.disable(logging.CRITICAL)  # it logs each expression that it cannot read
    verdicts = []
    for pair in pairs:
        gold = parse(f"${pair['gold']}$", parsing_timeout=5)
        verdicts.append(bool(verify(gold, parse(pair["response"], parsing_timeout=5), timeout_seconds=5)))
    return verdicts


def rates(pairs: list[Pair], verdicts: list[bool]) -> tuple[int, int, int, int]:
    """False positives, wrong answers, false negatives, right answers."""
    accepted = [bool(verdict) and not pair["right"] for pair, verdict in zip(pairs, verdicts)]
    refused = [not verdict and bool(pair["right"]) for pair, verdict in zip(pairs, verdicts)]
    right = sum(pair["right"] for pair in pairs)
    return sum(accepted), len(pairs) - right, sum(refused), right


def print_table(pairs: list[Pair], columns: dict[str, list[bool]]) -> None:
    print(f"{'':46}" + "".join(f"{name:>34}" for name in columns))
    print(f"{'kind':46}" + f"{'false positives  false negatives':>34}" * len(columns))
    kinds = dict.fromkeys(pair.get("kind", "") for pair in pairs)
    for kind in [*kinds, None]:
        places = [k for k, pair in enumerate(pairs) if kind is None or pair.get("kind", "") == kind]
        line = f"{'all' if kind is None else kind:46}"
        for verdicts in columns.values():
            fp, wrong, fn, right = rates([pairs[k] for k in places], [verdicts[k] for k in places])
            line += f"{_share(fp, wrong):>17}{_share(fn, right):>17}"
        print(line)


def _share(count: int, total: int) -> str:
    return f"{count}/{total} {count / total:6.1%}" if total else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[PAIRS], help="pairs, one JSON object a line")
    parser.add_argument("--show", action="store_true", help="print the pairs that are judged wrongly")
    parser.add_argument("--no-math-verify", action="store_true", help="leave math-verify out")
    options = parser.parse_args()
    try:
        pairs = [pair for path in options.files for pair in read_pairs(path)]
    except (OSError, ValueError) as error:
        print(f"score_answers: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    sources: dict[str, Callable[[list[Pair]], list[bool] | None]] = {"math_reward": our_verdicts}
    if not options.no_math_verify:
        sources["math-verify"] = math_verify_verdicts
    columns = {}
    for name, score in sources.items():
        start = time.perf_counter()
        if (verdicts := score(pairs)) is not None:
            columns[name] = verdicts
            print(f"{name}: {(time.perf_counter() - start) / len(pairs) * 1e6:.0f} µs a pair, its start included")
    print_table(pairs, columns)
    ours = columns["math_reward"]
    if options.show:
        for pair, verdict in zip(pairs, ours):
            if verdict != bool(pair["right"]):
                print(f"{'accepted' if verdict else 'refused'}: gold {pair['gold']}  response {pair['response']}")
    fp, wrong, fn, right = rates(pairs, ours)
    return int(fp > MAX_FALSE_POSITIVES * wrong or fn > MAX_FALSE_NEGATIVES * right)


if __name__ == "__main__":
    sys.exit(main())
