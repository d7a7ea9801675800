"""Measurement and output files of `megatron-rl paper mismatch`, per pair of dtypes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from megatron_rl.batch import build_batch
from megatron_rl.config import Recipe
from megatron_rl.config.learner import fp32_products
from megatron_rl.errors import InputError
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import resolve_device
from megatron_rl.objective.metrics import mismatch_metrics
from megatron_rl.process.fp32_products import settle
from megatron_rl.rollout.requests import everywhere
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.types import Prompt

_IQR_OF_NORMAL = 1.349  # interquartile range of the standard normal distribution
_MOST_POINTS = 5_000  # points of a scatter plot; figures are over all tokens


@dataclass
class PairResult:
    """Results of one pair of dtypes: N response tokens of B sequences."""

    learner: str
    rollout: str  # dtype with the rounding of its weights, such as bf16+fp8
    mu: np.ndarray  # [N] float64, log mu
    po: np.ndarray  # [N] float64, log po
    lengths: np.ndarray  # [B]
    routes_differ: np.ndarray | None  # [tokens, L] bool: engine and learner chose other experts

    @property
    def name(self) -> str:
        return f"{self.learner}/{self.rollout}"

    @property
    def sequence_log_ratio(self) -> np.ndarray:
        """Return Σ_t (log po − log mu) of each sequence, [B]."""
        return np.add.reduceat(self.po - self.mu, np.cumsum(self.lengths) - self.lengths)

    def figures(self) -> dict[str, float]:
        """Return the numbers of the table, under the name in metrics.jsonl if it is the same metric."""
        ratio, difference = self.sequence_log_ratio, self.po - self.mu
        as_tensors = (torch.from_numpy(x).float() for x in (self.po, self.mu))
        mask, offsets = torch.ones(len(self.mu), dtype=torch.bool), torch.tensor([0, *np.cumsum(self.lengths)])
        metrics = mismatch_metrics(*as_tensors, mask, offsets)
        figures = {
            "sequence_log_ratio_std": float(ratio.std()),
            # A robust measure: a few tokens with another expert can cause most of the variance.
            "sequence_log_ratio_iqr_std": float(np.subtract(*np.quantile(ratio, [0.75, 0.25])) / _IQR_OF_NORMAL),
            "sequence_log_ratio_max_abs": float(np.abs(ratio).max()),
            "token_log_ratio_std": float(difference.std()),
            "rollout_corr/kl": metrics["rollout_corr/kl"],
            "rollout_corr/k3_kl": metrics["rollout_corr/k3_kl"],
            "mismatch/rho_std": metrics["mismatch/rho_std"],
            "mismatch/rho_max": metrics["mismatch/rho_max"],
            "pearson": float(np.corrcoef(np.exp(self.mu), np.exp(self.po))[0, 1]),
        }
        if self.routes_differ is not None:
            figures["routes_differ_frac"] = float(self.routes_differ.mean())
            figures["tokens_with_other_route_frac"] = float(self.routes_differ.any(axis=1).mean())
        return figures | {"mean_length": float(self.lengths.mean()), "num_sequences": len(self.lengths)}


def measure(
    recipe: Recipe, prompts: list[Prompt], pairs: Sequence[tuple[str, str]], checkpoint: Path | None
) -> Iterator[PairResult]:
    """Yield the results of all pairs, grouped by the engine's dtype, as engines take longer to start than learners."""
    version = 0
    every = [fp32_products(*pair, recipe.precision) for pair in pairs]
    device = resolve_device(recipe.runtime.device).type
    refuse_several_engines(pairs, device)
    settle(set().union(*itertools.chain(*every)), device)
    for rollout_dtype, members in itertools.groupby(sorted(pairs, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
        variants = [with_dtypes(recipe, learner_dtype, rollout_dtype) for learner_dtype, _ in members]
        learner = Learner(variants[0])  # joins the job; the engine starts inside it
        learner.step_aside()
        with closing(start_engine(variants[0], learner)) as generator:
            for variant in variants:
                generator.sleep()
                if variant is not variants[0]:
                    learner.close()
                    learner = Learner(variant)
                if checkpoint is not None:
                    learner.load(checkpoint)
                version += 1
                learner.step_aside(weights=False)
                generator.wake()
                generator.refit(learner.export_weights(), version)
                learner.step_aside()
                yield measure_pair(variant, learner, generator, prompts, version)
        learner.close()


def refuse_several_engines(pairs: Sequence[tuple[str, str]], device: str) -> None:
    """Raise `InputError` where ``pairs`` (types of learner and engine) want more engines than a process can have."""
    engines = sorted({rollout for _, rollout in pairs})
    if device == "cuda" and len(engines) > 1:
        raise InputError(
            f"--pairs has {len(engines)} types of the engine ({', '.join(engines)}), but on a GPU vLLM has one engine "
            "that sleeps in a process; run the command once for each of them"
        )


def with_dtypes(recipe: Recipe, learner: str, rollout: str) -> Recipe:
    values = recipe.model_dump()
    dtype, _, rounding = rollout.partition("+")
    values["learner"]["dtype"], values["rollout"]["dtype"] = learner, dtype
    if rounding:
        values["rollout"]["quantization"]["weights"] = rounding
    values["routing"] = {"telemetry": bool(recipe.routing.telemetry)}
    return Recipe.model_validate(values)


def start_engine(recipe: Recipe, learner: Learner) -> VllmGenerator:
    return VllmGenerator(
        recipe.rollout,
        recipe.model.path,
        max_prompt_length=recipe.data.prompt.max_length,
        record_routes=recipe.routing.telemetry,
        device=learner.device.type,
        precision=recipe.precision,
    )


def measure_pair(
    recipe: Recipe, learner: Learner, generator: VllmGenerator, prompts: list[Prompt], version: int
) -> PairResult:
    """Generate with the engine's current weights, put it to sleep, score with the learner, and return the results."""
    groups = generator.rollout(prompts, recipe.rollout.num_samples, policy_version=version, step=0)
    generator.sleep()
    batch = build_batch(0, everywhere(groups), recipe.batch, recipe.objective)
    engine_routes = [s.routed_experts for s in batch.sequences]
    watched = recipe.routing.telemetry
    scored = learner.compute_logprobs(batch, routing="record" if watched else "native")
    differ = None
    if watched:  # "record" has replaced them by the learner's own routes
        both = ((np.sort(a, -1), np.sort(s.routed_experts, -1)) for a, s in zip(engine_routes, batch.sequences))
        differ = np.concatenate([(a != b).any(axis=-1) for a, b in both])
    return PairResult(
        recipe.learner.dtype,
        "+".join(filter(None, (recipe.rollout.dtype, recipe.rollout.quantization.weights))),
        mu=np.concatenate([s.inference_logprobs for s in batch.sequences]).astype(np.float64),
        po=np.concatenate(scored).astype(np.float64),
        lengths=np.array([s.length for s in batch.sequences]),
        routes_differ=differ,
    )


# -- output


def draw(results: list[PairResult]) -> Figure:
    """Return a figure with a row per pair: probabilities of both engines, and log-ratio over length."""
    figure = Figure(figsize=(10, 3.4 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), 2, squeeze=False)
    widest = max(float(np.abs(r.sequence_log_ratio).max()) for r in results) * 1.1 or 1e-6
    for (left, right), result in zip(axes, results, strict=True):
        every = slice(None, None, -(-len(result.mu) // _MOST_POINTS))
        left.plot(np.exp(result.mu[every]), np.exp(result.po[every]), ".", markersize=2)
        left.plot([0, 1], [0, 1], color="tab:red", linewidth=0.8)
        left.set(xlabel="mu, rollout engine", ylabel="po, learner", title=f"learner {result.name} rollout: tokens")
        right.plot(result.lengths, result.sequence_log_ratio, ".", markersize=3)
        right.axhline(0, color="tab:red", linewidth=0.8)
        right.set(xlabel="response length", ylabel="Σ log po − log mu", ylim=(-widest, widest))
        right.set_title(f"sequences: std {result.sequence_log_ratio.std():.2e}")
    return figure


def write(folder: Path, title: str, results: list[PairResult]) -> None:
    """Write mismatch.json and mismatch.png."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"learner": r.learner, "rollout": r.rollout, **r.figures()} for r in results]
    for row, result in zip(rows, results, strict=True):
        sequences = {"length": result.lengths.tolist(), "log_ratio": result.sequence_log_ratio.tolist()}
        row["sequences"] = sequences
    (folder / "mismatch.json").write_text(json.dumps({"title": title, "pairs": rows}, indent=1) + "\n")
    draw(results).savefig(folder / "mismatch.png", dpi=90)
