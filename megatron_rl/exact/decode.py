"""Generation with the learner's own model: the forward passes of `rollout.engine: exact`.

Every pass runs the module that the update runs, on packed rows, under the same batch-invariant computation. With a
cache a step is one row per running sequence. Without a cache a step computes every token of every running sequence.

Sequences are numbered over all replicas, and `Decoder.run` alone says which replica continues which, in which waves:
generation and the second computation of `bit_check` are batched alike.

Shapes: n running sequences, V/tp this rank's share of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_rl.exact.doses import Dose
from megatron_rl.learner.exchange import speaks
from megatron_rl.learner.layers.exact_attention import CachedPrompts, CachedStep, KeyValueCache, PackedSequences
from megatron_rl.learner.layers.invariant import batch_invariant
from megatron_rl.learner.layers.logprobs import token_logprobs
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.model import use_transformer_engine
from megatron_rl.process.ranks import any_rank, gather_objects
from megatron_rl.rollout.requests import in_order, share_of

Pick = Callable[[list[int], torch.Tensor], list[tuple[int, bool]]]
"""(running sequences, their logits [n, V/tp]) → the next token of each, and whether it is the sequence's last."""


class Decoder:
    """Token by token through the policy, on every rank of the layout; all methods are collective.

    ``max_tokens``: longest row of prompts that one pass may take. ``max_sequences``: most that run at a time.
    ``kv_cache``: keep keys and values; without effect under TransformerEngine, whose attention has no cache here.
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
    ):
        self.module, self.vocab_size, self.device = module, vocab_size, device
        self._thd = use_transformer_engine(device)
        self.max_tokens, self.max_sequences, self.kv_cache = max_tokens, max_sequences, kv_cache and not self._thd
        self._replica = parallel_state.get_data_parallel_rank()
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._wave = range(0)  # numbers of the wave's sequences
        self.row_owners: list[tuple[int, int]] = []  # (sequence, position) of each row of the pass at hand
        self._dose: Dose | None = None

    @classmethod
    def of(cls, learner: Learner) -> Decoder:
        """The learner's policy, within the limits of its recipe."""
        return cls(
            learner.module,
            learner.architecture.vocab_size,
            learner.device,
            max_tokens=learner.config.max_tokens_per_microbatch,
            max_sequences=learner.recipe.rollout.max_num_seqs,
            kv_cache=learner.recipe.exact.kv_cache,
        )

    def run(self, prompts: list[list[int]], max_new_tokens: int, pick: Pick) -> range:
        """Continue every prompt until ``pick`` ends it, at most by ``max_new_tokens``: this replica's share of them,
        ``max_sequences`` at a time. Returns the numbers of that share; ``pick`` is asked for no others.
        """
        self._given = [len(prompt) for prompt in prompts]
        mine = share_of(range(len(prompts)), self._replica, self._num_replicas)
        most = -(-len(prompts) // self._num_replicas)  # as many waves on every replica: each pass is collective
        for start in range(0, most, self.max_sequences):
            wave = mine[start : start + self.max_sequences]
            self._wave = wave
            self._run_wave([prompts[i] for i in wave], max_new_tokens, pick)
        return mine

    @torch.no_grad()
    def _run_wave(self, prompts: list[list[int]], max_new_tokens: int, pick: Pick) -> None:
        """Replicas may have different numbers of prompts. They share experts, so all take part until the last is done.

        From here on sequences are numbered within the wave.
        """
        sequences, running = [list(prompt) for prompt in prompts], list(range(len(prompts)))
        longest = max(map(len, prompts), default=0) + max_new_tokens
        self._cache = KeyValueCache(len(prompts) + 1, longest) if self.kv_cache else None
        was_training = self.module.training
        self.module.eval()
        more = any_rank(bool(running))
        with batch_invariant(self.device):
            logits = self._whole_rows(running, sequences)
            while more:
                picked = pick([self._wave[i] for i in running], logits) if running else []
                for i, (token, _) in zip(running, picked, strict=True):
                    sequences[i].append(token)
                running = [i for i, (_, last) in zip(running, picked, strict=True) if not last]
                more = any_rank(bool(running))
                if more:
                    logits = self._next_rows(running, sequences)
        self.module.train(was_training)
        self._cache = None

    def logprobs(self, logits: torch.Tensor, tokens: list[int], temperature: float) -> torch.Tensor:
        """log-probs [n] float32 of ``tokens``, by the function that the update uses."""
        labels = torch.tensor(tokens, device=logits.device)
        positions = torch.arange(len(tokens), device=logits.device)
        with torch.no_grad(), batch_invariant(self.device):
            found, _ = token_logprobs(
                logits,
                positions,
                labels,
                vocab_size=self.vocab_size,
                temperature=temperature,
                group=self._tensor_group,
            )
        return found

    @contextmanager
    def dosed(self, dose: Dose, seeds: list[int], prompt_seeds: list[int]) -> Iterator[None]:
        """Passes within are the sampler's under ``dose``. ``seeds``: of each sequence's response; ``prompt_seeds``: of
        its prompt's tokens."""
        self._dose, self._seeds, self._prompt_seeds = dose, seeds, prompt_seeds
        try:
            with dose.on(self.module):
                yield
        finally:
            self._dose = None

    def new_weights(self, dose: Dose, version: int) -> None:
        dose.new_weights(self.module, version)

    def score(self, prompts: list[list[int]], responses: list[list[int]], temperature: float) -> list[np.ndarray]:
        """log po [R] float32 of given responses, those of this replica, from passes over whole sequences."""
        sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        self._wave, found = range(len(sequences)), []
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad(), batch_invariant(self.device):
            for part in self._parts(list(range(len(sequences))), sequences):
                logits = self._rows_over(part, sequences)
                start = 0
                for i in part:
                    first, end = start + len(prompts[i]) - 1, start + len(sequences[i]) - 1
                    found.append(self.logprobs(logits[first:end], responses[i], temperature).numpy(force=True))
                    start += len(sequences[i])
        self.module.train(was_training)
        return found

    def whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V/tp] → [n, vocabulary] float32, the same on every rank of the replica."""
        whole = gather_from_tensor_model_parallel_region(logits, group=self._tensor_group)
        return whole[:, : self.vocab_size].float()

    @property
    def speaks(self) -> bool:
        """Whether this rank tells the others what its replica has found."""
        return speaks()

    def share(self, mine: list[Any]) -> list[Any]:
        """The replicas' results in the order of the prompts, on every rank."""
        found = gather_objects((self._replica, mine) if self.speaks else None)
        by_replica = dict(item for item in found if item is not None)
        return in_order([by_replica[replica] for replica in sorted(by_replica)])

    # -- passes

    def _whole_rows(self, running: list[int], sequences: list[list[int]]) -> torch.Tensor:
        """Logits after the last token of each running sequence, from passes over all of their tokens."""
        found = []
        for part in self._parts(running, sequences):
            ends = torch.tensor([len(sequences[i]) for i in part], dtype=torch.int64).cumsum(0) - 1
            found.append(self._rows_over(part, sequences)[ends.to(self.device)])
        return torch.cat(found)

    def _parts(self, chosen: list[int], sequences: list[list[int]]) -> list[list[int]]:
        """``chosen`` in passes of at most ``max_tokens``, as many passes on every replica."""
        parts: list[list[int]] = [[]]
        for i in chosen:
            if parts[-1] and sum(len(sequences[k]) for k in parts[-1]) + len(sequences[i]) > self.max_tokens:
                parts.append([])
            parts[-1].append(i)
        return parts + [[]] * (max(gather_objects(len(parts))) - len(parts))

    def _rows_over(self, chosen: list[int], sequences: list[list[int]]) -> torch.Tensor:
        """Logits after every token of the chosen sequences, back to back."""
        lengths = [len(sequences[i]) for i in chosen]
        tail = self._padding(sum(lengths))
        rows = [*lengths, tail] if tail else lengths
        tokens = [token for i in chosen for token in sequences[i]] + [0] * tail
        positions = torch.cat([torch.arange(n) for n in rows]).to(self.device)
        packed = PackedSequences.from_lengths(rows, self.device, thd=self._thd)
        if self._cache is not None:
            scratch = self._cache.num_slots - 1
            slots = [*chosen, scratch] if tail else chosen
            packed = CachedPrompts(
                **vars(packed),
                cache=self._cache,
                slots=torch.tensor(slots).repeat_interleave(torch.tensor(rows)).to(self.device),
                positions=positions,
            )
        self.row_owners = [(self._wave[i], position) for i, n in zip(chosen, lengths) for position in range(n)]
        return self._forward(tokens, positions, packed)

    def _next_rows(self, running: list[int], sequences: list[list[int]]) -> torch.Tensor:
        if self._cache is None:
            return self._whole_rows(running, sequences)
        tail = self._padding(len(running))
        tokens = [sequences[i][-1] for i in running] + [0] * tail
        positions = torch.tensor([len(sequences[i]) - 1 for i in running] + [0] * tail, device=self.device)
        slots = torch.tensor(running + [self._cache.num_slots - 1] * tail, device=self.device)
        longest = max((len(sequences[i]) for i in running), default=1)
        self.row_owners = [(self._wave[i], len(sequences[i]) - 1) for i in running]
        step = CachedStep(
            "sbhd", max_seqlen_q=longest, max_seqlen_kv=longest, cache=self._cache, slots=slots, positions=positions
        )
        return self._forward(tokens, positions, step)[: len(running)]

    def _forward(self, tokens: list[int], positions: torch.Tensor, packed: Any) -> torch.Tensor:
        """[1, N] tokens → logits [N, V/tp]."""
        if self._dose is not None and self._dose.changes_model:
            seeds = [
                self._prompt_seeds[i] if self._given[i] > position else self._seeds[i]
                for i, position in self.row_owners
            ]
            seeds += [0] * (len(tokens) - len(seeds))
            self._dose.before_pass(torch.tensor(seeds, device=self.device), positions)
        if not self._thd:
            self.module.rotary_pos_emb.position_ids = positions
        logits = self.module(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=positions[None],
            attention_mask=None,
            packed_seq_params=packed,
        )
        return logits.flatten(0, 1)

    def _padding(self, num_rows: int) -> int:
        """Rows to add for sequence parallelism; a replica without rows takes part with padding alone."""
        multiple = self._tensor_group.size()
        return -num_rows % multiple if num_rows else multiple
