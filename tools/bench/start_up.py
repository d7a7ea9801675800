"""Starting with a large data file: tokenized once (cold), then mapped (warm).

    python -m tools.bench.start_up [--rows 1800000] [--tokenizer DIR]

Writes a JSONL file like DAPO's raw one (each problem about a hundred times, 1 kB a row) into a temporary folder, and
loads it three times as `train` does: prompts, what `check` says of them, and the sampler. The cache takes 1.3 kB a row,
too. Wall time; memory is what other processes that map the file cannot share.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from megatron_rl.config.data import DataSourceConfig, PromptConfig
from megatron_rl.data import PromptSampler, load_prompts, load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
COPIES = 103  # of each problem in DAPO-Math-17k's raw file
TEXT = (
    "let the real number triangle with sides of length find sum all positive integers such that polynomial function "
    "equals where circle radius area point lies on line segment probability remainder when divided by prime"
)


def write_rows(path: Path, count: int) -> None:
    draw, words = random.Random(0), TEXT.split()
    problems = [" ".join(draw.choices(words, k=draw.randint(20, 80))) for _ in range(max(1, count // COPIES))]
    with path.open("w") as file:
        for i in range(count):
            text = (
                f"Solve the following math problem step by step.\n\n{problems[i % len(problems)]}\n\nRemember: Answer:"
            )
            answer = {"ground_truth": str(i % len(problems) % 1000), "style": "rule-lighteval/MATH_v2"}
            row = {"data_source": "math_dapo", "prompt": text, "ability": "MATH", "reward_model": answer}
            file.write(json.dumps(row | {"extra_info": {"index": f"{i:08x}-{'0' * 300}"}}) + "\n")


def private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--tokenizer", default=str(REPOSITORY / "recipes" / "tiny" / "model"), metavar="DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows)
        source, config = DataSourceConfig(path=str(folder / "rows.jsonl")), PromptConfig(max_length=4096)
        tokenizer = load_tokenizer(options.tokenizer)
        for what in ("cold", "warm", "warm"):
            before, start = private_mib(), time.perf_counter()
            prompts = load_prompts(source, tokenizer, config, folder / "cache")
            different, longest = prompts.num_different, prompts.lengths.max()
            PromptSampler(prompts).take(512)
            seconds, grown = time.perf_counter() - start, private_mib() - before
            about = f"{len(prompts)} rows, {different} different, the longest has {longest} tokens"
            print(f"{what}: {about}: {seconds:.2f} s, {grown:.0f} MiB")
            del prompts


if __name__ == "__main__":
    main()
