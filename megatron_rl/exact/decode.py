"""Generation with the learner's own model: what `rollout.engine: exact` asks of the learner.

`exact.schedule` decides who runs when, `exact.room` how large the cache is, `exact.turns` runs the turns, and
`exact.passes` has the forward passes.

Shapes: n rows, V/tp this rank's share of the vocabulary, m sequences of this replica.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_rl.exact.doses import Dose
from megatron_rl.exact.graphs import Capture, capture_for
from megatron_rl.exact.pages import Pages
from megatron_rl.exact.passes import GenerationPasses, in_passes, largest
from megatron_rl.exact.room import make_cache, rows_and_steps
from megatron_rl.exact.schedule import Schedule, num_pages
from megatron_rl.exact.step import Watch
from megatron_rl.exact.turns import Chooser, Responses, Turns
from megatron_rl.learner.layers.exact_attention import PagedCache
from megatron_rl.learner.layers.invariant import batch_invariant
from megatron_rl.learner.layers.logprobs import token_logprobs
from megatron_rl.learner.learner import Learner
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout.requests import engines_of, owners_of, share_of


class Decoder:
    """Token by token through the policy, on every rank of the layout; all methods are collective.

    ``max_tokens``: longest row of prompts that one pass may take. ``max_sequences``: most that run at a time.
    ``kv_cache``: keep keys and values; without, a step is a pass over all tokens. ``cache_gib``: of all pages; None:
    what the platform leaves, see `exact.room`.
    """

    def __init__(
        self,
        module: GPTModel,
        vocab_size: int,
        device: torch.device,
        *,
        max_tokens: int,
        max_sequences: int,
        kv_cache: bool,
        cache_gib: float | None = None,
        utilization: float = 0.9,
        capture: Capture | None = None,
    ):
        self.vocab_size, self.device, self.passes = vocab_size, device, GenerationPasses(module, device)
        self.max_tokens, self.max_sequences, self.kv_cache = max_tokens, max_sequences, kv_cache
        self.cache_gib, self._utilization, self.capture = cache_gib, utilization, capture
        self.bucket, self.steps = rows_and_steps(device)
        self._replica = parallel_state.get_data_parallel_rank()
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        replica_of = gather_objects(self._replica)
        self._ranks = [[rank for rank, at in enumerate(replica_of) if at == i] for i in range(self._num_replicas)]
        self.stats: dict[str, float] = {}

    @classmethod
    def of(cls, learner: Learner) -> Decoder:
        """The learner's policy, within the limits of its recipe."""
        rollout = learner.recipe.rollout
        return cls(
            learner.module,
            learner.architecture.vocab_size,
            learner.device,
            max_tokens=learner.config.max_tokens_per_microbatch,
            max_sequences=rollout.max_num_seqs,
            kv_cache=learner.recipe.exact.kv_cache,
            cache_gib=rollout.kv_cache_gib,
            utilization=rollout.gpu_memory_utilization,
            capture=capture_for(learner.device, rollout.enforce_eager),
        )

    @torch.no_grad()
    def run(
        self, prompts: list[list[int]], limits: list[int], chooser: Chooser, stop: frozenset[int] = frozenset()
    ) -> tuple[range, Responses]:
        """Continue every prompt until a token of ``stop``, or for ``limits`` tokens: this replica's share of them.

        Returns the numbers of that share and its responses; ``chooser`` is asked for no others, by these numbers.

        Raises:
            InputError: the cache cannot hold the longest sequence; on all ranks.
        """
        mine = share_of(range(len(prompts)), self._replica, self._num_replicas)
        self.passes.prompt_lengths = [len(prompt) for prompt in prompts]
        found = Responses.empty(len(mine), max(limits, default=0))
        schedule, cache = self._plan(prompts, limits, mine, chooser.most_steps)
        turns = Turns(
            self.passes,
            schedule,
            chooser,
            found,
            numbers=mine,
            prompts=[prompts[i] for i in mine],
            cache=cache,
            stop=stop,
            bucket=self.bucket,
            max_tokens=self.max_tokens,
            capture=self.capture,
        )
        with self.passes.evaluating():
            turns.run()
        pages = None if cache is None else cache.num_pages - 1  # one is for rows of padding
        self.stats = turns.counts.metrics(schedule.num_preempted, pages, self._num_replicas)
        return mine, found

    def _plan(
        self, prompts: list[list[int]], limits: list[int], mine: range, most_steps: int | None
    ) -> tuple[Schedule, PagedCache | None]:
        """The schedule of this replica's sequences, and the cache that it shares out."""
        longest = max((len(p) + n for p, n in zip(prompts, limits, strict=True)), default=1)
        most = -(-len(prompts) // self._num_replicas)  # as many on every replica, so that caches are alike
        rows = max(1, min(most, self.max_sequences))
        pages, cache = rows * (num_pages(longest) + 2) + 1, None
        if self.kv_cache:
            cache = make_cache(self.passes.module, pages, longest, self.device, self.cache_gib, self._utilization)
            pages = cache.num_pages
            if self.passes.step_forward is not None:
                self.passes.step_forward.begin(longest)
        numbers: dict[tuple[int, ...], int] = {}
        schedule = Schedule(
            np.array([len(prompts[i]) for i in mine], np.int64),
            np.array([limits[i] for i in mine], np.int64),
            [numbers.setdefault(tuple(prompts[i]), len(numbers)) for i in mine],
            Pages(pages),
            rows,
            min(self.steps, most_steps or self.steps) if self.kv_cache else 1,
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
        found = []
        with self.passes.evaluating():
            for part in parts + [[]] * (num_passes - len(parts)):
                logits = self.passes.whole_rows([sequences[i] for i in part])
                start = 0
                for i in part:
                    first, end = start + len(prompts[i]) - 1, start + len(sequences[i]) - 1
                    tokens = torch.from_numpy(responses[i].astype(np.int64)).to(self.device)
                    found.append(self.logprobs(logits[first:end], tokens, temperature).numpy(force=True))
                    start += len(sequences[i])
        return found

    # -- for whoever chooses

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
        """log-probs [n] float32 of ``tokens`` [n], by the function that the update uses."""
        positions = torch.arange(len(tokens), device=logits.device)
        with torch.no_grad(), batch_invariant(self.device):
            found, _ = token_logprobs(
                logits,
                positions,
                tokens,
                vocab_size=self.vocab_size,
                temperature=temperature,
                group=self.passes.tensor_group,
                exact=True,
            )
        return found

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
