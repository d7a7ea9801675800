"""Effect of `batch.oversample` on learned lengths and rewards: kept groups against all requested groups.

Real servers sample the tiny model, whose weights stay as they are, so that only the choice of groups differs. Groups
that `abort` would throw away are sampled to their end as well, to know what they would have been.

    python -m tools.bench.oversampling [--steps 40] [--factor 1.5] [--set a.b=c …]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.sections import OversampleConfig
from megatron_rl.data import PromptSampler
from megatron_rl.monitor import RunDirectory
from megatron_rl.rollout import Arrival
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.run.lookahead import Oversampling
from megatron_rl.run.prepare import Prepared, prepare
from megatron_rl.types import Group

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny" / "servers.yaml"


class ToTheEnd:
    """A generator that lets cancelled groups finish and keeps them in ``rest``. ``late_s``: how long they took more."""

    def __init__(self, generator: ServerGenerator) -> None:
        self._generator, self.begin = generator, generator.begin
        self.rest: list[Group] = []
        self.late_s: list[float] = []

    def completed(self, tickets: list[Any]) -> list[Arrival]:
        return self._generator.completed(tickets)

    def cancel(self, ticket: Any) -> int:
        start = time.perf_counter()
        while arrivals := self._generator.completed([ticket]):
            self.rest += [arrival.group for arrival in arrivals]
        self.late_s.append(time.perf_counter() - start)
        return 0


def sample(
    recipe: Recipe, prepared: Prepared, generator: ServerGenerator, config: OversampleConfig, steps: int
) -> tuple[list[list[Group]], list[Group], list[float]]:
    """Groups learned from in each step, those that were not, and the waits that were saved. All of them are scored."""
    watched = ToTheEnd(generator)
    ahead = Oversampling(
        PromptSampler(prepared.train, seed=recipe.data.seed),
        watched,
        config,
        num_prompts=recipe.batch.prompts,
        num_samples=recipe.rollout.num_samples,
        max_staleness=1,
        num_steps=steps,
    )
    batches, rest, saved = [], [], []
    for step in range(steps):
        ahead.open(step, 0)
        while not ahead.is_filled:
            groups = ahead.arrivals()
            prepared.rewarder.score(groups)
            ahead.keep(groups)
            rest += groups
        groups, metrics = ahead.close()
        batches.append(groups)
        saved += [metrics[name] for name in ("rollout/oversample/wait_saved_s",) if name in metrics]
    prepared.rewarder.score(watched.rest)
    learned = {id(group) for groups in batches for group in groups}
    return batches, [group for group in rest + watched.rest if id(group) not in learned], saved or watched.late_s


def mean(groups: list[Group], field: str) -> float:
    return statistics.fmean(getattr(rollout, field) for group in groups for rollout in group.rollouts)


def error(groups: list[Group], field: str) -> float:
    """Standard error of `mean`, over groups: the responses to a prompt have like lengths."""
    means = [mean([group], field) for group in groups]
    return statistics.stdev(means) / len(means) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = ["name=bias", f"run_root={folder}", "rollout.servers.launch=1", "validation.every=0"]
        recipe = load_recipe(RECIPE, settings + options.overrides)
        directory = RunDirectory(recipe.run_dir)
        directory.root.mkdir()
        directory.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        with prepare(recipe, 1) as prepared:
            generator = ServerGenerator(
                recipe.rollout,
                recipe.model.path,
                max_prompt_length=recipe.data.prompt.max_length,
                run_dir=recipe.run_dir,
                recipe_file=directory.recipe,
                decode=lambda ids: prepared.tokenizer.decode(ids, skip_special_tokens=True),
            )
            try:
                for rest in ("abort", "carry_over"):
                    config = OversampleConfig(factor=options.factor, rest=rest)
                    show(rest, *sample(recipe, prepared, generator, config, options.steps))
            finally:
                generator.close()


def show(name: str, batches: list[list[Group]], left: list[Group], saved: list[float]) -> None:
    learned = [group for groups in batches for group in groups]
    print(f"{name}: wait saved {statistics.median(saved):.3f} s a step (median)")
    rows = {"learned from": learned, "not": left, "all": learned + left, "first batch": batches[0]}
    for kind, groups in rows.items():
        length, reward = (f"{mean(groups, f):7.3f} ± {error(groups, f):.3f}" for f in ("length", "raw_reward"))
        print(f"  {kind:<14} {len(groups):5d} groups   length {length}   reward {reward}")


if __name__ == "__main__":
    main()
