"""How the cost of a step grows: with tokens, sequences, layers, experts, ranks; with a power law fitted to each.

    python -m tools.bench.growth [--rounds 5] [--only tokens sequences layers experts batch ranks]

One quantity doubles, the others stay; processor time of one thread, least of the rounds. The exponent is the slope of
log time over log size by least squares, with its 95% interval. Above 1 something is super-linear: attention is, in
tokens per sequence, and nothing of ours may be. Models have random weights; the update is that of `Learner.update`;
packing, statistics of the monitor and export are timed apart, and what does not run the model once more at batches as
large as a cluster's (`batch`, and `ranks` that 8192 sequences are dealt to).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from megatron_rl.batch import build_batch
from megatron_rl.config import load_recipe
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.packing import deal, minibatch_denominators
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.monitor.samples import rollout_metrics
from megatron_rl.types import Group, Prompt, Rollout
from tools.bench.lib.timing import alternate

ROOT = Path(__file__).resolve().parents[2]

GROUP = 8
# Student's t at 97.5% for n − 2 degrees of freedom.
T_975 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return the slope of log seconds over log size, and half the width of its 95% interval."""
    x, y = np.log(sizes), np.log(seconds)
    x = x - x.mean()
    slope = float((x @ y) / (x @ x))
    residual = y - y.mean() - slope * x
    error = math.sqrt(float(residual @ residual) / (len(x) - 2) / float(x @ x))
    return slope, T_975[len(x) - 2] * error


def make_groups(num_sequences: int, length: int, vocab: int) -> list[Group]:
    random = np.random.default_rng(0)

    def rollout(prompt: str, sample: int) -> Rollout:
        tokens = random.integers(3, vocab, length).tolist()
        logprobs = np.full(length, -1.0, dtype=np.float32)
        versions = np.zeros(length, dtype=np.int32)
        return Rollout(prompt, sample, tokens, logprobs, "stop", versions, reward=float(sample % 2))

    prompts = [Prompt(f"bench:{i}", [1, 5, 6, 7], "0") for i in range(num_sequences // GROUP)]
    return [Group(prompt, [rollout(prompt.id, sample) for sample in range(GROUP)]) for prompt in prompts]


def model_folder(folder: Path, layers: int, experts: int) -> Path:
    """The tiny model with other numbers of layers and experts, random weights."""
    path = folder / f"{layers}-{experts}"
    if not path.exists():
        config = AutoConfig.from_pretrained(ROOT / "recipes" / "tiny" / "model")
        config.num_hidden_layers = layers
        config.num_experts = config.num_local_experts = experts
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        text = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(text))
    return path


class Case:
    """One size: a learner and a batch, and the parts of a step that are timed."""

    def __init__(self, model: Path, num_sequences: int, length: int):
        recipe = load_recipe(
            ROOT / "recipes" / "tiny" / "grpo.yaml",
            [f"model.path={model}", "learner.optimizer.lr=1e-9", f"rollout.max_response_length={length}"],
        )
        self.learner = Learner(recipe)
        self.groups = make_groups(num_sequences, length, self.learner.architecture.vocab_size)
        self.recipe, self.indices = recipe, list(range(num_sequences))
        self.batch = build_batch(0, self.groups, recipe.batch, recipe.objective)

    def parts(self) -> dict[str, Callable[[], object]]:
        return {
            "update": lambda: self.learner.update(self.batch),
            "packing": self.pack,
            "monitor": lambda: rollout_metrics(self.groups),
            "export": lambda: sum(1 for _ in self.learner.export_weights()),
        }

    def pack(self) -> None:
        batch = build_batch(0, self.groups, self.recipe.batch, self.recipe.objective)
        self.learner.passes.microbatches(batch, self.indices, "native")
        minibatch_denominators(batch.sequences, self.recipe.objective)


class HostCase(Case):
    """A batch that is too large for an update here: times the work per sequence apart from the model."""

    def parts(self) -> dict[str, Callable[[], object]]:
        return {name: part for name, part in super().parts().items() if name in ("packing", "monitor")}


class DealCase:
    """Long-tailed sequences dealt over ``ranks``."""

    def __init__(self, ranks: int):
        lengths = np.random.default_rng(0).lognormal(7.0, 1.0, 8192).clip(1, 16384).astype(int).tolist()
        self._parts = {"deal": lambda: deal(lengths, ranks, 16384)}

    def parts(self) -> dict[str, Callable[[], object]]:
        return self._parts


def sweeps(folder: Path) -> Iterator[tuple[str, list[int], Callable[[int], Case | DealCase]]]:
    base = model_folder(folder, 4, 8)
    yield "tokens", [32, 64, 128, 256], lambda n: Case(base, 32, n)
    yield "sequences", [16, 32, 64, 128], lambda n: Case(base, n, 64)
    yield "layers", [2, 4, 8, 16], lambda n: Case(model_folder(folder, n, 8), 32, 64)
    yield "experts", [4, 8, 16, 32], lambda n: Case(model_folder(folder, 4, n), 32, 64)
    yield "batch", [512, 1024, 2048, 4096], lambda n: HostCase(base, n, 64)
    yield "ranks", [8, 32, 128, 512], DealCase


def measure(sizes: list[int], make: Callable[[int], Case | DealCase], rounds: int) -> dict[str, list[float]]:
    """Return the least processor time of every part at every size."""
    best: dict[str, list[float]] = {}
    for size in sizes:
        case = make(size)
        for name, times in alternate(rounds, case.parts()).items():
            best.setdefault(name, []).append(min(times))
        if isinstance(case, Case):
            shutdown()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    names = ["tokens", "sequences", "layers", "experts", "batch", "ranks"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes, make in sweeps(Path(folder)):
            if name not in options.only:
                continue
            print(f"\n{name}: " + "  ".join(f"{size:>9}" for size in sizes) + "   exponent (95%)")
            for part, seconds in measure(sizes, make, options.rounds).items():
                slope, half = fit(sizes, seconds)
                times = "  ".join(f"{1e3 * s:7.1f}ms" for s in seconds)
                print(f"{part:>14} {times}   {slope:.2f} ± {half:.2f}", flush=True)


if __name__ == "__main__":
    main()
