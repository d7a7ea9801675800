"""Generation with the learner's own model: what `rollout.engine: exact` asks of the learner.

`exact.schedule` decides who runs when, `exact.decode` how large the cache is, `exact.turns` runs the turns, and
`exact.step` has the forward passes.

Shapes: n rows, V/tp this rank's share of the vocabulary, m sequences of this replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_rl.errors import InputError
from megatron_rl.exact.doses import Dose
from megatron_rl.exact.invariant import KEY_BLOCK, TILE, batch_invariant
from megatron_rl.exact.layers import PagedCache
from megatron_rl.exact.schedule import Pages, Schedule, num_pages
from megatron_rl.exact.step import GenerationPasses, Watch, in_passes, largest
from megatron_rl.exact.turns import Capture, Chooser, Responses, Turns
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout.engine_arguments import CPU_KV_CACHE_GIB, GIB
from megatron_rl.rollout.requests import engines_of, owners_of, share_of

# What a device has room for: pages of keys and values, rows of a step, steps between two looks at the results.


LEAST_BESIDE = 2
"""Pages beside those of the longest sequence: the scratch page, and the copy of a prompt's last page."""

CUDA_ROWS = 64  # with fewer, kernels of other shapes sum in another order
CUDA_STEPS = 16


def rows_and_steps(device: torch.device) -> tuple[int, int]:
    """What the number of rows is a multiple of, and steps between two looks at what was sampled, which wait for a GPU
    and cost nothing on a CPU. Neither changes a response."""
    return (CUDA_ROWS, CUDA_STEPS) if device.type == "cuda" else (TILE, 1)


@dataclass(frozen=True)
class CacheShape:
    """Shape of the key/value cache for this rank's part of the model. ``element``: bytes of a number."""

    num_layers: int
    kv_heads: int
    width: int
    element: int

    @classmethod
    def of(cls, module: GPTModel) -> CacheShape:
        part = module.decoder.layers[0].self_attention
        heads, width = part.num_query_groups_per_partition, part.hidden_size_per_attention_head
        return cls(len(module.decoder.layers), heads, width, next(module.parameters()).element_size())

    @property
    def page_bytes(self) -> int:
        """Keys and values of one page in all layers."""
        return 2 * self.num_layers * self.kv_heads * KEY_BLOCK * self.width * self.element


def make_cache(
    module: GPTModel, wanted: int, longest: int, device: torch.device, cache_gib: float | None, utilization: float
) -> PagedCache:
    """A cache for this rank's part of ``module``; see `num_cache_pages`."""
    shape = CacheShape.of(module)
    pages = num_cache_pages(shape, wanted, longest, device, cache_gib, utilization)
    first_layer = module.decoder.layers[0].layer_number - 1
    like = next(module.parameters())
    return PagedCache(pages, shape.num_layers, shape.kv_heads, shape.width, like, first_layer)


def num_cache_pages(
    shape: CacheShape, wanted: int, longest: int, device: torch.device, cache_gib: float | None, utilization: float
) -> int:
    """At most ``wanted`` pages, and what fits; the same on all ranks.

    ``longest``: tokens of the longest sequence that may come. ``cache_gib``: `rollout.kv_cache_gib`. ``utilization``:
    `rollout.gpu_memory_utilization`, where that is null on a GPU.

    Raises:
        InputError: the longest sequence does not fit; on all ranks.
    """
    budget = (cache_gib or CPU_KV_CACHE_GIB) * GIB
    if cache_gib is None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = utilization * total - (total - free) + kept
    pages = min(gather_objects(min(wanted, int(budget // shape.page_bytes))))
    least = num_pages(longest) + LEAST_BESIDE
    if pages < least:
        gib = math.ceil(1000 * least * shape.page_bytes / GIB) / 1000
        raise InputError(
            f"rollout.kv_cache_gib: {'null' if cache_gib is None else f'{cache_gib:g}'}, room for {max(pages, 0)} "
            f"pages of {KEY_BLOCK} tokens; the longest prompt with its response has {longest} tokens, which takes "
            f"{least}. Set rollout.kv_cache_gib to {gib:g} or more"
            + (", raise rollout.gpu_memory_utilization" if device.type == "cuda" and cache_gib is None else "")
            + ", or lower rollout.max_response_length"
        )
    return pages


TokenLogprobs = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`learner.logprobs.token_logprobs`."""


class Decoder:
    """Token by token through the policy, on every rank of the layout; all methods are collective.

    ``token_logprobs``: the learner's own, so that mu is computed as po. ``max_tokens``: longest row of prompts that one
    pass may take. ``max_sequences``: most that run at a time. ``cache_gib``: of all pages; None: what the platform
    leaves.
    """

    def __init__(
        self,
        module: GPTModel,
        vocab_size: int,
        device: torch.device,
        token_logprobs: TokenLogprobs,
        *,
        max_tokens: int,
        max_sequences: int,
        cache_gib: float | None = None,
        utilization: float = 0.9,
        capture: Capture | None = None,
    ):
        self._token_logprobs = token_logprobs
        self.vocab_size, self.device, self.passes = vocab_size, device, GenerationPasses(module, device)
        self.max_tokens, self.max_sequences = max_tokens, max_sequences
        self.cache_gib, self._utilization, self.capture = cache_gib, utilization, capture
        self.bucket, self.steps = rows_and_steps(device)
        self._replica = parallel_state.get_data_parallel_rank()
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        replica_of = gather_objects(self._replica)
        self._ranks = [[rank for rank, at in enumerate(replica_of) if at == i] for i in range(self._num_replicas)]
        self.stats: dict[str, float] = {}

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], limits: list[int], chooser: Chooser, stop: frozenset[int] = frozenset()
    ) -> tuple[range, Responses]:
        """Continue every prompt until a token of ``stop``, or for ``limits`` tokens: this replica's share of them.

        Returns the numbers of that share and its responses; ``chooser`` is asked for no others, by these numbers.

        Raises:
            InputError: the cache cannot hold the longest sequence; on all ranks.
        """
        numbers_here = share_of(range(len(prompts)), self._replica, self._num_replicas)
        self.passes.prompt_lengths = [len(prompt) for prompt in prompts]
        responses = Responses.empty(len(numbers_here), max(limits, default=0), chooser.head)
        schedule, cache = self._plan(prompts, limits, numbers_here, chooser.most_steps)
        turns = Turns(
            self.passes,
            schedule,
            chooser,
            responses,
            numbers=numbers_here,
            prompts=[prompts[i] for i in numbers_here],
            cache=cache,
            stop=stop,
            bucket=self.bucket,
            max_tokens=self.max_tokens,
            capture=self.capture,
        )
        with self.passes.evaluating():
            turns.run()
        pages = cache.num_pages - 1  # one is for rows of padding
        self.stats = turns.counts.metrics(schedule.num_preempted, pages, self._num_replicas)
        return numbers_here, responses

    def _plan(
        self, prompts: list[list[int]], limits: list[int], numbers_here: range, most_steps: int | None
    ) -> tuple[Schedule, PagedCache]:
        """The schedule of this replica's sequences, and the cache that it shares out."""
        longest = max((len(p) + n for p, n in zip(prompts, limits, strict=True)), default=1)
        most = -(-len(prompts) // self._num_replicas)  # as many on every replica, so that caches are alike
        rows = max(1, min(most, self.max_sequences))
        wanted = rows * (num_pages(longest) + 2) + 1
        cache = make_cache(self.passes.module, wanted, longest, self.device, self.cache_gib, self._utilization)
        if self.passes.step_forward is not None:
            self.passes.step_forward.begin(longest)
        numbers: dict[tuple[int, ...], int] = {}
        schedule = Schedule(
            np.array([len(prompts[i]) for i in numbers_here], np.int64),
            np.array([limits[i] for i in numbers_here], np.int64),
            [numbers.setdefault(tuple(prompts[i]), len(numbers)) for i in numbers_here],
            Pages(cache.num_pages),
            rows,
            min(self.steps, most_steps or self.steps),
        )
        return schedule, cache

    @property
    def row_owners(self) -> list[tuple[int, int]]:
        return self.passes.row_owners

    def watched(self, watch: Watch) -> AbstractContextManager:
        return self.passes.watched(watch)

    # -- doses

    def dosed(self, dose: Dose, seeds: list[int], prompt_seeds: list[int]) -> AbstractContextManager:
        return self.passes.dosed(dose, seeds, prompt_seeds)

    def new_weights(self, dose: Dose, version: int) -> None:
        dose.new_weights(self.passes.module, version)

    @torch.no_grad()
    def score(self, prompts: list[list[int]], responses: list[np.ndarray], temperature: float) -> list[np.ndarray]:
        """log po [R] float32 of given responses, those of this replica, from passes over whole sequences."""
        sequences = [prompt + response.tolist() for prompt, response in zip(prompts, responses, strict=True)]
        parts = in_passes(list(range(len(sequences))), lambda i: len(sequences[i]), self.max_tokens)
        (num_passes,) = largest(len(parts))
        scores = []
        with self.passes.evaluating():
            for part in parts + [[]] * (num_passes - len(parts)):
                logits = self.passes.whole_rows([sequences[i] for i in part])
                start = 0
                for i in part:
                    first, end = start + len(prompts[i]) - 1, start + len(sequences[i]) - 1
                    tokens = torch.from_numpy(responses[i].astype(np.int64)).to(self.device)
                    scores.append(self.logprobs(logits[first:end], tokens, temperature)[0].numpy(force=True))
                    start += len(sequences[i])
        return scores

    # -- for whoever chooses

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float, head: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """log-probs [n] float32 of ``tokens`` [n], and [n, k] of ``head`` [n, k] if given, by the function that the
        update uses."""
        positions = torch.arange(len(tokens), device=logits.device)
        with torch.no_grad(), batch_invariant(self.device):
            logprobs, _, *of_head = self._token_logprobs(
                logits,
                positions,
                tokens,
                vocab_size=self.vocab_size,
                temperature=temperature,
                group=self.passes.tensor_group,
                exact=True,
                head=head,
            )
        return logprobs, *of_head

    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V/tp] → [n, vocabulary] float32, the same on every rank of the replica."""
        whole = gather_from_tensor_model_parallel_region(logits, group=self.passes.tensor_group)
        return whole[:, : self.vocab_size].float()

    # -- for whoever keeps the responses

    def replica_of(self, number: int) -> list[int]:
        """The replica that generates each of ``number`` responses."""
        return engines_of(number, self._num_replicas)

    def owners(self, number: int) -> list[int]:
        """The rank that keeps each of ``number`` responses, the same list on every rank: those of its replica, which
        all have it, take turns."""
        return owners_of(number, self._ranks)
