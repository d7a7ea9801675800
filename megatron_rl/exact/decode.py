"""Generation with the learner's own model: the forward passes of `rollout.engine: exact`.

Prompts are passes of the module that the update runs, over packed rows. Steps are `exact.step`, or the same module
where a rank has a part of the weights. All are made under the same batch-invariant computation.

`exact.schedule` says who runs when. Between two looks at what was sampled nothing waits for a value on the device: a
turn is a fixed number of steps of a fixed number of rows, tokens are chosen on the device, and a sequence that has
ended runs on in its row without effect until the turn ends.

Shapes: n rows, a multiple of `Decoder.bucket`; V/tp this rank's share of the vocabulary; m sequences of this replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from megatron_rl.exact.doses import Dose
from megatron_rl.exact.pages import Pages
from megatron_rl.exact.room import CacheShape, num_cache_pages, rows_and_steps
from megatron_rl.exact.schedule import Schedule, Whole, num_pages
from megatron_rl.exact.stages import forward
from megatron_rl.exact.step import StepForward, Watch
from megatron_rl.learner.exchange import speaks
from megatron_rl.learner.layers.exact_attention import CachedPrompts, CachedStep, PackedSequences, PagedCache
from megatron_rl.learner.layers.invariant import KEY_BLOCK, batch_invariant
from megatron_rl.learner.layers.logprobs import token_logprobs
from megatron_rl.learner.learner import Learner
from megatron_rl.process.ranks import gather_objects
from megatron_rl.rollout.requests import in_order, share_of

T = TypeVar("T")


class Chooser(Protocol):
    """What decides the next token of each row."""

    most_steps: int | None
    """Steps that it can be asked for at a time; None: any number."""

    def ahead(self, sequences: list[int], made: np.ndarray, count: int) -> np.ndarray:
        """[len(sequences), count]: what it needs for each of the next ``count`` tokens, from the host. ``made`` says
        how many tokens each response has. Each number is asked for once, in order."""
        ...

    def choose(self, logits: torch.Tensor, needed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``logits`` [n, V/tp], ``needed`` [n], a column of `ahead` → token [n] int64, its log po and its log mu."""
        ...


@dataclass
class Responses:
    """Of the sequences of one replica: [m, longest] each, of which the first ``lengths`` [m] count."""

    tokens: np.ndarray  # int32
    clean: np.ndarray  # float32, log po as the learner computes it
    log_mu: np.ndarray  # float32, of what was sampled from
    lengths: np.ndarray  # int64

    @classmethod
    def empty(cls, number: int, longest: int) -> Responses:
        floats = np.zeros((2, number, longest), np.float32)
        return cls(np.zeros((number, longest), np.int32), *floats, np.zeros(number, np.int64))

    def add(self, sequences: np.ndarray, places: np.ndarray, *columns: np.ndarray) -> None:
        for kept, column in zip((self.tokens, self.clean, self.log_mu), columns, strict=True):
            kept[sequences, places] = column


@dataclass
class First:
    """The first token in its turn of each sequence that begins."""

    rows: np.ndarray
    sequences: np.ndarray
    places: np.ndarray  # of the token in the response
    columns: tuple[torch.Tensor, ...]  # token, log po, log mu


@dataclass
class Rows:
    """The rows of a turn on the device, [n] each."""

    tokens: torch.Tensor  # last of each sequence, whose keys come next
    positions: torch.Tensor  # its place in the sequence
    left: torch.Tensor  # tokens that may follow
    alive: torch.Tensor  # bool
    tables: torch.Tensor  # [n, P]


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
    ):
        self.module, self.vocab_size, self.device = module, vocab_size, device
        self.max_tokens, self.max_sequences, self.kv_cache = max_tokens, max_sequences, kv_cache
        self._cache_gib, self._utilization = cache_gib, utilization
        self.bucket, self.steps = rows_and_steps(device)
        self._replica = parallel_state.get_data_parallel_rank()
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._step = StepForward(module) if StepForward.takes(module) else None
        self._dose: Dose | None = None
        self._mine = range(0)
        self._owners: Callable[[], list[tuple[int, int]]] = list
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
        mine = self._mine = share_of(range(len(prompts)), self._replica, self._num_replicas)
        self._sequences = [prompts[i] for i in mine]
        self._given = [len(prompt) for prompt in prompts]
        self._chooser = chooser
        self._stop = torch.tensor(sorted(stop), dtype=torch.int64, device=self.device)
        found = self._found = Responses.empty(len(mine), max(limits, default=0))
        schedule = self._plan(prompts, limits)
        was_training = self.module.training
        self.module.eval()
        try:
            while self._turn(schedule):
                pass
        finally:
            self.module.train(was_training)
            self._cache = None
        found.lengths = schedule.made
        self.stats = {"perf/rollout_preempted": float(schedule.num_preempted)}
        return mine, found

    def _plan(self, prompts: list[list[int]], limits: list[int]) -> Schedule:
        """The schedule of this replica's sequences, and the cache that it shares out."""
        longest = max((len(p) + n for p, n in zip(prompts, limits, strict=True)), default=1)
        most = -(-len(prompts) // self._num_replicas)  # as many on every replica, so that caches are alike
        rows = max(1, min(most, self.max_sequences))
        self._longest = longest
        pages, self._cache = rows * (num_pages(longest) + 2) + 1, None
        if self.kv_cache:
            shape = CacheShape.of(self.module)
            pages = num_cache_pages(shape, pages, longest, self.device, self._cache_gib, self._utilization)
            like = next(self.module.parameters())
            first = self.module.decoder.layers[0].layer_number - 1
            self._cache = PagedCache(pages, shape.num_layers, shape.kv_heads, shape.width, like, first)
            if self._step is not None:
                self._step.begin(longest)
        numbers: dict[tuple[int, ...], int] = {}
        steps = min(self.steps, self._chooser.most_steps or self.steps) if self.kv_cache else 1
        return Schedule(
            np.array([len(prompts[i]) for i in self._mine], np.int64),
            np.array([limits[i] for i in self._mine], np.int64),
            [numbers.setdefault(tuple(prompts[i]), len(numbers)) for i in self._mine],
            Pages(pages),
            rows,
            steps,
        )

    @property
    def row_owners(self) -> list[tuple[int, int]]:
        """(sequence, position) of each row of the pass at hand, padding left out. A sequence that has ended in this
        turn is there with positions beyond its end."""
        return self._owners()

    # -- a turn

    def _turn(self, schedule: Schedule) -> bool:
        """Whether there was anything to do, on any replica: those that share experts take part in all passes."""
        begun = schedule.turn()
        parts = self._parts([whole for whole in begun if whole.logits is None], lambda whole: whole.length)
        num_passes, num_steps, any_rows = self._agree(len(parts), schedule.steps, len(schedule.rows))
        if not any_rows:
            return False
        with batch_invariant(self.device):
            for part in parts + [[]] * (num_passes - len(parts)):
                self._compute(part)
        first = self._first(schedule, begun)
        rows = self._rows(schedule, first)
        sampled = self._steps(schedule, rows, num_steps if self.kv_cache else 0)
        self._look(schedule, rows, first, sampled)
        return True

    def _agree(self, *numbers: int) -> tuple[int, ...]:
        """The largest of each over all ranks."""
        return tuple(map(max, zip(*gather_objects(numbers), strict=True)))

    def _parts(self, items: list[T], length: Callable[[T], int]) -> list[list[T]]:
        """In passes of at most ``max_tokens``."""
        parts: list[list[T]] = []
        tokens = 0
        for item in items:
            if not parts or tokens + length(item) > self.max_tokens:
                parts.append([])
                tokens = 0
            parts[-1].append(item)
            tokens += length(item)
        return parts

    def _tokens(self, sequence: int, length: int) -> list[int]:
        """The first ``length`` of prompt and response."""
        prompt = self._sequences[sequence]
        return (prompt + self._found.tokens[sequence, : length - len(prompt)].tolist())[:length]

    def _compute(self, part: list[Whole]) -> None:
        """One pass over whole sequences: their logits, and their keys and values in the cache."""
        self._owners = lambda: [(self._mine[w.sequences[0]], place) for w in part for place in range(w.length)]
        tokens = [self._tokens(whole.sequences[0], whole.length) for whole in part]
        logits = self._whole_rows(tokens, [whole.pages for whole in part] if self._cache is not None else None)
        ends = torch.tensor([whole.length for whole in part], dtype=torch.int64).cumsum(0) - 1
        for whole, row in zip(part, logits[ends.to(self.device)], strict=True):
            whole.logits = row

    def _whole_rows(self, sequences: list[list[int]], pages: list[list[int]] | None) -> torch.Tensor:
        """Logits after every token of ``sequences``, back to back, and after padding. ``pages``: of the cache, for the
        keys and values of each."""
        lengths = [len(sequence) for sequence in sequences]
        tail = self._padding(sum(lengths))
        rows = [*lengths, tail] if tail else lengths
        tokens = [token for sequence in sequences for token in sequence] + [0] * tail
        positions = torch.cat([torch.arange(n) for n in rows])
        packed = PackedSequences.from_lengths(rows, self.device)
        if pages is not None:
            held = [*pages, *([[PagedCache.SCRATCH] * num_pages(tail)] if tail else [])]
            of_rows = torch.cat(
                [torch.tensor(p).repeat_interleave(KEY_BLOCK)[:n] for p, n in zip(held, rows, strict=True)]
            )
            packed = CachedPrompts(
                **vars(packed),
                cache=self._cache,
                pages=of_rows.to(self.device),
                offsets=(positions % KEY_BLOCK).to(self.device),
            )
        return self._forward(torch.tensor(tokens, device=self.device), positions.to(self.device), packed)

    def _first(self, schedule: Schedule, begun: list[Whole]) -> First | None:
        """The next token of sequences that begin, which comes with their prompts."""
        if not begun:
            return None
        copies = [copy for whole in begun for copy in whole.copies]
        if copies and self._cache is not None:
            self._cache.copy(*map(list, zip(*copies, strict=True)))
        sequences = np.array([i for whole in begun for i in whole.sequences])
        logits = torch.stack([whole.logits for whole in begun for _ in whole.sequences])
        places = schedule.made[sequences]
        needed = self._chooser.ahead([self._mine[i] for i in sequences], places, 1)
        chosen = self._chooser.choose(logits, torch.from_numpy(needed[:, 0]).to(self.device))
        schedule.made[sequences] += 1
        row_of = {sequence: row for row, sequence in enumerate(schedule.rows)}
        return First(np.array([row_of[i] for i in sequences.tolist()]), sequences, places, chosen)

    def _rows(self, schedule: Schedule, first: First | None) -> Rows:
        number = len(schedule.rows)
        size = max(1, -(-number // self.bucket)) * self.bucket
        made = schedule.made[schedule.rows]
        columns = np.zeros((3, size), np.int64)
        columns[0, :number] = self._found.tokens[schedule.rows, made - 1]
        columns[1:, :number] = schedule.num_tokens - 1, schedule.limits[schedule.rows] - made
        tokens, positions, left = torch.from_numpy(columns).to(self.device)
        tables = torch.from_numpy(schedule.tables[:number, : schedule.width])
        padding = tables.new_full((size - number, tables.size(1)), PagedCache.SCRATCH)
        if first is not None:
            tokens[torch.from_numpy(first.rows).to(self.device)] = first.columns[0]
        alive = (left > 0) & ~torch.isin(tokens, self._stop)
        return Rows(tokens, positions, left, alive, torch.cat([tables, padding]).to(self.device))

    def _steps(self, schedule: Schedule, rows: Rows, num_steps: int) -> list[tuple[torch.Tensor, ...]]:
        """Steps of all rows without a look at any value; of each, tokens, both log-probs, and which rows count."""
        numbers, starts = [self._mine[i] for i in schedule.rows], schedule.num_tokens
        needed = torch.zeros(len(rows.tokens), num_steps, dtype=torch.float64)
        if numbers and num_steps:
            found = torch.from_numpy(self._chooser.ahead(numbers, schedule.made[schedule.rows], num_steps))
            needed = torch.cat([found, found.new_zeros(len(needed) - len(found), num_steps)])
        needed, sampled = needed.to(self.device), []
        for turn in range(num_steps):
            self._owners = lambda turn=turn: [(i, int(n) - 1 + turn) for i, n in zip(numbers, starts, strict=True)]
            step = CachedStep.of(self._cache, rows.tables, rows.positions)
            chosen, clean, log_mu = self._chooser.choose(self._one_step(rows, step), needed[:, turn])
            sampled.append((chosen, clean, log_mu, rows.alive))
            going_on = rows.alive.long()
            rows.tokens = torch.where(rows.alive, chosen, rows.tokens)
            rows.positions, rows.left = rows.positions + going_on, rows.left - going_on
            rows.alive = rows.alive & (rows.left > 0) & ~torch.isin(rows.tokens, self._stop)
        return sampled

    def _look(
        self, schedule: Schedule, rows: Rows, first: First | None, sampled: list[tuple[torch.Tensor, ...]]
    ) -> None:
        """Read what was sampled, and end the sequences whose last token is among it."""
        numbers, found = np.array(schedule.rows, np.int64), self._found
        if first is not None:
            found.add(first.sequences, first.places, *(column.numpy(force=True) for column in first.columns))
        if sampled:
            *columns, counts = (torch.stack(c, 1).numpy(force=True)[: len(numbers)] for c in zip(*sampled, strict=True))
            row, turn = counts.nonzero()  # the steps of a row that count are its first ones
            sequences = numbers[row]
            found.add(sequences, schedule.made[sequences] + turn, *(column[row, turn] for column in columns))
            schedule.made[numbers] += counts.sum(1)
        alive = rows.alive.numpy(force=True)[: len(numbers)]
        schedule.end(np.flatnonzero(~alive).tolist())
        if not self.kv_cache:
            schedule.begin_anew()

    # -- passes

    def _one_step(self, rows: Rows, step: CachedStep) -> torch.Tensor:
        if self._step is not None and not (self._dose is not None and self._dose.is_inside_layers):
            return self._step(rows.tokens, step)
        with batch_invariant(self.device):
            return self._forward(rows.tokens, rows.positions, step)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, packed: Any) -> torch.Tensor:
        """``tokens`` [N] → logits [N, V/tp]."""
        if self._dose is not None and self._dose.changes_model:
            seeds = [(self._prompt_seeds if place < self._given[i] else self._seeds)[i] for i, place in self._owners()]
            seeds += [0] * (len(tokens) - len(seeds))
            self._dose.before_pass(torch.tensor(seeds, device=self.device), positions)
        return forward(self.module, tokens[None], positions, packed).flatten(0, 1)

    def _padding(self, num_rows: int) -> int:
        """Rows to add for sequence parallelism; a replica without rows takes part with padding alone."""
        multiple = self._tensor_group.size()
        return -num_rows % multiple if num_rows else multiple

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """``watch`` is told the rows [N, …] that come out of every layer, in the order of the forward pass."""
        if self._step is not None:
            self._step.watch = watch
        try:
            with watched(self.module, watch):
                yield
        finally:
            if self._step is not None:
                self._step.watch = None

    # -- doses

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

    @torch.no_grad()
    def score(self, prompts: list[list[int]], responses: list[np.ndarray], temperature: float) -> list[np.ndarray]:
        """log po [R] float32 of given responses, those of this replica, from passes over whole sequences."""
        sequences = [prompt + response.tolist() for prompt, response in zip(prompts, responses, strict=True)]
        parts = self._parts(list(range(len(sequences))), lambda i: len(sequences[i]))
        (num_passes,) = self._agree(len(parts))
        found, was_training = [], self.module.training
        self.module.eval()
        for part in parts + [[]] * (num_passes - len(parts)):
            with batch_invariant(self.device):
                logits = self._whole_rows([sequences[i] for i in part], None)
            start = 0
            for i in part:
                first, end = start + len(prompts[i]) - 1, start + len(sequences[i]) - 1
                tokens = torch.from_numpy(responses[i].astype(np.int64)).to(self.device)
                found.append(self.logprobs(logits[first:end], tokens, temperature).numpy(force=True))
                start += len(sequences[i])
        self.module.train(was_training)
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
                group=self._tensor_group,
            )
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


@contextmanager
def watched(module: torch.nn.Module, watch: Watch) -> Iterator[None]:
    """``watch`` is told the rows [N, …] that come out of every layer of this stage, in the order of the pass."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [("embedding", module.embedding)] if module.pre_process else []
    parts += [(f"layer {layer.layer_number - 1}", layer) for layer in module.decoder.layers]
    if module.post_process:
        parts += [("final norm", module.decoder.final_layernorm), ("output layer", module.output_layer)]

    def hook(name: str) -> Callable:
        def on_output(_module: torch.nn.Module, _args: tuple, output: torch.Tensor | tuple) -> None:
            hidden = (output[0] if isinstance(output, tuple) else output).detach()
            if group.size() > 1 and name != "output layer":  # rows are shared out over tensor-parallel ranks
                parts = [torch.empty_like(hidden) for _ in range(group.size())]
                torch.distributed.all_gather(parts, hidden.contiguous(), group=group)
                hidden = torch.cat(parts)
            watch(name, hidden.flatten(0, 1))

        return on_output

    handles = [part.register_forward_hook(hook(name)) for name, part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
