"""Speed and agreement of `math_reward` on files of problems.

    python -m tools.bench.reward FILE.jsonl [FILE.parquet ...] [--workers N] [--wrong N]

For every file: gold answers scored against themselves, boxed and bare; and wrong answers (answers of other rows, and
the gold answer with its first number changed) scored against gold. Wrong answers that were accepted are printed, for a
person to judge: `270` for `270^\\circ` is no mistake. Exit status 1 where gold against gold is below 99%.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time

from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data import read_problems
from megatron_rl.errors import EXIT_BAD_INPUT, InputError
from megatron_rl.rewards.compare import spelling
from megatron_rl.rewards.math_task import DEFAULT_MEMORY_MIB, DEFAULT_TIMEOUT_S, math_verdict
from megatron_rl.rewards.pool import WorkerPool

REQUIRED_AGREEMENT = 0.99


def score(pairs: list[tuple[str, str]], pool: WorkerPool) -> tuple[list[float], float, int]:
    """Rewards of (response, gold) pairs as the Rewarder finds them, seconds, and how many needed a worker."""
    start = time.perf_counter()
    rewards = [math_verdict(response, gold) for response, gold in pairs]
    open_places = [place for place, reward in enumerate(rewards) if isinstance(reward, dict)]
    for place, outcome in zip(open_places, pool.run([rewards[place] for place in open_places])):
        rewards[place] = outcome.value
    return rewards, time.perf_counter() - start, len(open_places)


def changed(gold: str) -> str | None:
    """``gold`` with its first number one larger; None where it has none."""
    number = re.search(r"\d+", gold)
    return gold[: number.start()] + str(int(number[0]) + 1) + gold[number.end() :] if number else None


def wrong_answers(golds: list[str], count: int, rng: random.Random) -> list[tuple[str, str]]:
    pairs = [(rng.choice(golds), gold) for gold in golds for _ in range(count)]
    pairs += [(other, gold) for gold in golds if (other := changed(gold)) is not None]
    return [(f"\\boxed{{{other}}}", gold) for other, gold in pairs if spelling(other) != spelling(gold)]


def bench(path: str, pool: WorkerPool, num_wrong: int) -> bool:
    """Print the figures of one file; whether gold agrees with gold."""
    golds = [problem.answer for problem in read_problems(DataSourceConfig(path=path))]
    print(f"\n{path}: {len(golds)} problems")

    def line(what: str, figure: str, seconds: float, count: int, note: str) -> None:
        print(f"  {what:26} {figure:>13}  {seconds / count * 1e3:7.3f} ms each  ({note})")

    agreed = True
    for name, form in (("boxed", "The answer is \\boxed{%s}"), ("bare", "%s")):
        rewards, seconds, asked = score([(form.replace("%s", gold), gold) for gold in golds], pool)
        agreement = sum(rewards) / len(rewards)
        agreed &= agreement >= REQUIRED_AGREEMENT
        line(f"gold against gold, {name}", f"{agreement:.2%}", seconds, len(golds), f"{asked} needed a worker")
        for gold in [gold for gold, reward in zip(golds, rewards) if reward != 1.0][:20]:
            print(f"    missed: {gold}")
    pairs = wrong_answers(golds, num_wrong, random.Random(0))
    rewards, seconds, asked = score(pairs, pool)
    accepted = [pair for pair, reward in zip(pairs, rewards) if reward]
    line("wrong answers accepted", f"{len(accepted)} of {len(pairs)}", seconds, len(pairs), f"{asked} needed a worker")
    for response, gold in accepted[:20]:
        print(f"    {response}  for  {gold}")
    return agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".jsonl or .parquet files of problems with answers")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--wrong", type=int, default=4, help="wrong answers drawn for each problem (default 4)")
    arguments = parser.parse_args()
    start = time.perf_counter()
    with WorkerPool(arguments.workers, timeout_s=DEFAULT_TIMEOUT_S, memory_limit_mib=DEFAULT_MEMORY_MIB) as pool:
        pool.run([{"kind": "math", "candidate": r"\sqrt{8}", "gold": r"2\sqrt{2}"}] * arguments.workers)
        print(f"{arguments.workers} worker(s) ready and warm after {time.perf_counter() - start:.2f} s")
        try:
            agreed = [bench(path, pool, arguments.wrong) for path in arguments.files]
        except InputError as error:
            print(f"bench.reward: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
