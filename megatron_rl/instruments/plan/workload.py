"""The input of a plan: a recipe, its model's shape, a GPU and a number of ranks, with derived sizes.

Lengths of responses are a distribution, a file, or a run's recorded batches.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.config.model_rules import layout_problems, rollout_problems
from megatron_rl.config.rollout import QuantizationConfig
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan.hardware import (
    EXPERT_WAIT,
    LINK,
    PROMPT_SHARE,
    REFILL_ROUNDS,
    RESPONSE_SHARE,
    SPREAD,
    Gpu,
)
from megatron_rl.model.architecture import Architecture, shape_of

NUMBER = r"(\d+(?:\.\d+)?)"
LOGNORMAL = re.compile(rf"lognormal:{NUMBER},{NUMBER}(?:,{NUMBER})?")
QUANTILES = 1024  # of a distribution, by which its mean is found
HOW = "write lognormal:MEDIAN,SIGMA[,MAX], a file with one length a line, or a run directory with recorded batches"


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of responses in tokens, found in a file or a run, or log-normal and cut at ``longest``."""

    source: str
    longest: float
    found: np.ndarray | None = None  # sorted
    median: float = 0.0
    sigma: float = 0.0

    def quantiles(self, number: int) -> np.ndarray:
        """Return ``number`` lengths, shortest first, that share the distribution evenly."""
        places = (np.arange(number) + 0.5) / number
        if self.found is not None:
            drawn = np.quantile(self.found, places)
        else:
            drawn = self.median * np.exp(self.sigma * np.vectorize(NormalDist().inv_cdf)(places))
        return np.clip(drawn, 1.0, self.longest)

    @cached_property
    def mean(self) -> float:
        return float(self.quantiles(QUANTILES).mean() if self.found is None else self.found.mean())


@lru_cache(maxsize=256)
def assumed_lengths(mean: float, longest: float) -> Lengths:
    """Return lengths of this mean with the spread that is assumed where none is given."""
    low, high = 1e-3 * mean, 1e3 * longest
    for _ in range(80):
        median = math.sqrt(low * high)
        lengths = Lengths(f"assumed, sigma {SPREAD:g}", longest, None, median, SPREAD)
        low, high = (median, high) if lengths.mean < mean else (low, median)
    return lengths


def read_lengths(text: str, longest: int) -> Lengths:
    """Return the lengths for `--lengths`, cut at ``longest`` (`rollout.max_response_length`). Raises `InputError`."""
    if text.startswith("lognormal"):
        match = LOGNORMAL.fullmatch(text)
        if match is None or float(match[1]) <= 0:
            raise InputError(f"--lengths {text}: {HOW}")
        most = min(float(match[3] or longest), longest)
        return Lengths(text, most, None, float(match[1]), float(match[2]))
    path = Path(text)
    if path.is_dir():
        lengths = _recorded(path)
    elif path.is_file():
        lengths = _listed(path)
    else:
        raise InputError(f"--lengths {text}: no such file or directory; {HOW}")
    return Lengths(text, longest, np.sort(np.clip(lengths, 1, longest)))


def _listed(path: Path) -> np.ndarray:
    lengths = []
    for number, line in enumerate(path.read_text().split(), 1):
        if not line.isdigit() or int(line) < 1:
            raise InputError(f"--lengths {path}: entry {number} is {line!r}; expected a whole number of tokens")
        lengths.append(int(line))
    if not lengths:
        raise InputError(f"--lengths {path}: the file is empty; {HOW}")
    return np.asarray(lengths)


def _recorded(run: Path) -> np.ndarray:
    """Return the lengths of all responses in the batches that a run recorded."""
    from safetensors import safe_open

    folder, parts = run / "batches", []
    for path in sorted(folder.glob("step_*.safetensors")):
        with safe_open(path, "np") as file:
            parts.append(np.diff(file.get_tensor("cu_response")))
    lengths = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not (lengths > 0).any():
        raise InputError(
            f"--lengths {run}: no recorded batches in {folder}; run with recorder.record_batches: all or last_n, or "
            "give a file with one length a line"
        )
    return lengths[lengths > 0]


_SIZE = re.compile(r"(?:^|-)(\d+)n(\d+)g(?:-|$)")


@dataclass(frozen=True)
class Workload:
    """The input that determines memory and time."""

    recipe: Recipe
    architecture: Architecture
    gpu: Gpu
    nodes: int
    gpus_per_node: int
    mean_response: float  # tokens
    mean_prompt: float  # tokens
    host_gib: float  # memory of one node's host
    given_lengths: Lengths | None = None  # of responses, with the mean above; None: see `assumed_lengths`
    imbalance: float = EXPERT_WAIT  # time of the busiest expert-parallel rank over the mean
    served: bool = False  # responses come over HTTP, although the engine is beside the learner

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def nvlink_gpus(self) -> int:
        """Number of GPUs that exchange over NVLink."""
        return max(self.gpus_per_node, self.gpu.nvlink_gpus)

    def link(self, group: int) -> float:
        """Return the bytes per second of a collective among ``group`` ranks, neighbours first."""
        return LINK * (self.gpu.nvlink if group <= self.nvlink_gpus else self.gpu.network)

    @property
    def parallel(self) -> ParallelConfig:
        return self.recipe.learner.parallel

    def with_keys(self, section: str, **changes: object) -> Workload:
        """Return the workload with other keys of a section of the recipe."""
        keys = getattr(self.recipe, section).model_copy(update=changes)
        return replace(self, recipe=self.recipe.model_copy(update={section: keys}))

    @property
    def data_parallel(self) -> int:
        return max(1, self.ranks // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt plus the longest response."""
        return self.recipe.data.prompt.max_length + self.recipe.rollout.max_response_length

    @property
    def mean_sequence(self) -> float:
        return self.mean_prompt + self.mean_response

    @property
    def trained_tokens(self) -> float:
        """Tokens of prompts and responses of a step."""
        return self.recipe.num_sequences * self.mean_sequence

    @property
    def sampling_rounds(self) -> float:
        """Rounds of sampling in a step; a fraction if the last round only samples what is missing."""
        batch = self.recipe.batch
        if batch.generation_prompts is None:
            return min(REFILL_ROUNDS, batch.max_generations)
        needed = math.ceil(REFILL_ROUNDS * batch.prompts / batch.generation_prompts)
        return float(min(needed, batch.max_generations))

    @property
    def sampled_sequences(self) -> float:
        """Sequences sampled for a step, including those of groups that are left out."""
        return self.sampling_rounds * self.recipe.batch.prompts_of_a_round * self.recipe.rollout.num_samples

    @property
    def head_width(self) -> int:
        """Tokens of the head that comes with each sampled token; 0 without `rollout.sampled_head`."""
        rollout = self.recipe.rollout
        return rollout.sampled_head and (rollout.candidates or rollout.sampled_head)

    @property
    def set_width(self) -> int:
        """Tokens of the set on which a teacher is compared at each place (`teacher.top_k`); 0 without."""
        return 0 if self.recipe.teacher is None else self.recipe.teacher.top_k

    @cached_property
    def second_models(self) -> tuple[Architecture | None, ...]:
        """Shapes of the models that score tokens on the learner's ranks; None: the policy itself, with its weights."""
        paths = self.recipe.scored_by_learner.items()
        return tuple(path and self._shape(name.removesuffix("_logprobs"), path) for name, path in paths)

    def _shape(self, section: str, path: Path) -> Architecture:
        if path == self.recipe.model.path:
            return self.architecture
        try:
            return shape_of(path)[0]
        except InputError as error:
            raise InputError(f"{section}.path: {str(error).removeprefix('model.path: ')}") from error

    @cached_property
    def scoring(self) -> Workload | None:
        """The learner's work in the precision of `scoring`; None without."""
        if (scoring := self.recipe.scoring) is None:
            return None
        recipe = self.recipe.model_copy(update={"precision": scoring.of(self.recipe.precision)})
        return replace(self, recipe=recipe).with_keys("learner", dtype=scoring.dtype)

    @cached_property
    def teachers(self) -> tuple[Workload, ...]:
        """The work of each teacher that has an engine in every rank."""
        own = {"engine": "vllm", "tensor_parallel": 1, "quantization": QuantizationConfig()}
        models = {} if self.recipe.teacher is None else self.recipe.teacher.models
        return tuple(
            replace(self, architecture=self._shape(key, one.path or self.recipe.model.path)).with_keys("rollout", **own)
            for key, one in models.items()
            if one.engine == "vllm"
        )

    @property
    def samples_other_weights(self) -> bool:
        """Whether the learner generates with other weights, which are kept on its GPU too."""
        return self._dose in ("weights", "stale")

    @property
    def earlier_weights(self) -> int:
        """Number of old policies whose weights a rank keeps in host memory, for a dose that samples from them."""
        if self._dose != "stale":
            return 0
        return math.ceil(self.recipe.exact.dose.updates / self.recipe.batch.minibatches) + 1

    @property
    def _dose(self) -> str | None:
        dose = self.recipe.exact.dose if self.recipe.rollout.engine == "exact" else None
        return dose and dose.kind

    @property
    def microbatch_tokens(self) -> int:
        """Largest number of tokens of a forward pass over all context-parallel ranks.

        A sequence longer than `max_tokens_per_microbatch` has its own pass.
        """
        return max(self.recipe.learner.max_tokens_per_microbatch, self.longest)

    @property
    def lengths(self) -> Lengths:
        longest = self.recipe.rollout.max_response_length
        return self.given_lengths or assumed_lengths(min(self.mean_response, longest), longest)

    @cached_property
    def mean_square(self) -> float:
        """Mean square of the length of a sequence; attention goes by it."""
        sequences = self.mean_prompt + self.lengths.quantiles(QUANTILES)
        return float(np.square(sequences).mean())

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of one update on each data-parallel rank. A sequence is not cut: a microbatch that has no room
        for one more stays partly empty, by half a sequence on average."""
        held = self.recipe.learner.max_tokens_per_microbatch / self.mean_sequence
        sequences = self.recipe.num_sequences / self.recipe.batch.minibatches / self.data_parallel
        return max(1, math.ceil(sequences / max(1.0, held - 0.5)))


def nodes_of(recipe: Recipe, gpus: int, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """Return (nodes, GPUs in a node) of ``gpus`` in all. Raises `InputError` if they do not divide."""
    if nodes is not None and gpus_per_node is not None:
        raise InputError("--gpus, --nodes and --gpus-per-node: two of the three say it all; leave one out")
    stated = _SIZE.search(recipe.name)
    node = gpus // nodes if nodes else gpus_per_node or min(gpus, int(stated[2]) if stated else 8)
    if node < 1 or gpus % node or (nodes and gpus % nodes):
        raise InputError(
            f"--gpus: {gpus} are not whole nodes of {node or nodes}; give --gpus-per-node, or another number"
        )
    return gpus // node, node


def make_workload(
    recipe: Recipe,
    architecture: Architecture,
    gpu: Gpu,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    mean_response: float | None = None,
    mean_prompt: float | None = None,
    host_gib: float | None = None,
    lengths: Lengths | None = None,
    checks: bool = True,
) -> Workload:
    """Return the workload of a recipe for the size in its name (``…-4n8g-…``) or for the given size.

    ``checks`` False: its layout need not fit the ranks, for a search of others.

    Raises `InputError` if neither gives a size, the layout does not divide it, or a mean is above what the recipe
    allows.
    """
    stated = _SIZE.search(recipe.name)
    if nodes is None and gpus_per_node is None and stated is None:
        raise InputError(
            f"plan: number of GPUs unknown: the recipe's name ({recipe.name}) has no <nodes>n<GPUs>g; give --gpus, or "
            "--nodes and --gpus-per-node"
        )
    nodes = nodes or (int(stated[1]) if stated else 1)
    gpus_per_node = gpus_per_node or (int(stated[2]) if stated else 8)
    rollout, prompt = recipe.rollout, recipe.data.prompt
    for option, mean, key, longest in (
        ("--mean-response", mean_response, "rollout.max_response_length", rollout.max_response_length),
        ("--mean-prompt", mean_prompt, "data.prompt.max_length", prompt.max_length),
    ):
        if mean is not None and mean > longest:
            raise InputError(f"{option}: {mean:g} tokens, but {key} is {longest}; give at most that, or raise the key")
    work = Workload(
        recipe,
        architecture,
        gpu,
        nodes,
        gpus_per_node,
        lengths.mean if lengths else mean_response or RESPONSE_SHARE * rollout.max_response_length,
        mean_prompt or PROMPT_SHARE * prompt.max_length,
        host_gib or gpu.host_gib,
        lengths,
    )
    problems = layout_problems(recipe.learner.parallel, architecture, work.ranks) if checks else []
    problems += rollout_problems(rollout, architecture, prompt.max_length, work.ranks if checks else None, "cuda")
    if problems:
        raise InputError(f"recipe {recipe.name} on {work.ranks} ranks:\n" + "\n".join(f"  {p}" for p in problems))
    return work
