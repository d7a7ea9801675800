"""The learner: a Megatron model, its optimizer, and one method per thing the loop asks of them.

Sums, not means: every microbatch's loss arrives divided by denominators taken over the whole mini-batch, Megatron adds
gradients over microbatches and data-parallel ranks, and nothing is divided again. So loss and gradient do not depend on
microbatch size, packing or layout.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from megatron_rl.checkpoint import save as checkpoint
from megatron_rl.checkpoint.hf_folder import Sampling, write_hf_checkpoint
from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.config import Recipe
from megatron_rl.config.base import FP32_STORED
from megatron_rl.config.learner import only_product
from megatron_rl.config.second_model import TeacherConfig
from megatron_rl.errors import InputError
from megatron_rl.exact.decode import Decoder
from megatron_rl.exact.turns import capture_for
from megatron_rl.layers.context import gather_tokens
from megatron_rl.learner.gradient_noise import GradientNoise, Scorer, set_advantages, update_size
from megatron_rl.learner.logprobs import FusedHead, most_probable, token_logprobs
from megatron_rl.learner.model import DTYPES, Adapters, build_model, use_transformer_engine
from megatron_rl.learner.offload import Offload
from megatron_rl.learner.optimizer import (
    OverflowGuard,
    build_scheduler,
    describe_model,
    master_reader,
    unhook,
    with_optimizer,
)
from megatron_rl.learner.packing import Microbatch, minibatch_denominators
from megatron_rl.learner.passes import (
    Passes,
    PhaseFn,
    Replicas,
    distribute,
    hand_over_logprobs,
    hand_over_routes,
    hand_over_scores,
    hand_over_sets,
    keep_scores,
    router_shift,
    speaks,
)
from megatron_rl.learner.process_groups import initialize
from megatron_rl.learner.router_biases import RouterBiases
from megatron_rl.learner.router_replay import RouterReplayer, RoutingMode
from megatron_rl.learner.second_model import SecondModel, load_scoring, load_second_model, refuse_nan, take_off_rewards
from megatron_rl.model.architecture import Architecture, read_architecture
from megatron_rl.objective import (
    Denominators,
    Head,
    MetricStats,
    NoiseKey,
    ObjectiveInputs,
    Teacher,
    TeacherSet,
    compute_objective,
    finalize_metrics,
)
from megatron_rl.objective.metrics import EFFECTIVE_SAMPLE
from megatron_rl.process import fp32_products as products
from megatron_rl.process.ranks import gather_objects, together, world_rank
from megatron_rl.process.run_files import settled
from megatron_rl.rollout.weights import rounded_weights
from megatron_rl.schedule import bounded_factor, rate_factor
from megatron_rl.types import Batch

BIT_CHECK_METRIC = "exact/max_abs_prob_diff"
"""max |exp(log mu) - exp(log po)| over the step's sampled tokens, the dose of `exact.noise` left out."""

BitCheck = Callable[["Learner", Batch, dict[int, np.ndarray], str, Sequence[int]], float]
"""Called with the learner, a batch, log-probs [R] by sequence index, the name of the pass that computed them, and the
indices of that pass on all replicas. Returns `BIT_CHECK_METRIC` over what it compares, or raises `RunEnded`."""


class Learner:
    """Holds the policy pi. Every rank of the job builds one and calls the same methods in the same order."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        device: torch.device | None = None,
        phase: PhaseFn = lambda name: nullcontext(),
        keep_current_logprobs: bool = False,
        bit_check: BitCheck | None = None,
    ) -> None:
        """Build model and optimizer, and load the model's weights. Collective.

        Args:
            device: what `initialize` returned to this process; None: join the job here.
            phase: a context around each named part of an update, which times it.
            keep_current_logprobs: leave log pi of the update in the batch, for the flight recorder.
            bit_check: `learner.bit_check.check` beside the engine `exact`.
        """
        self.recipe = recipe
        self.phase = phase
        self.config = recipe.learner
        if device is None:
            parallel = self.config.parallel
            device = initialize(parallel, recipe.runtime.device, recipe.seed, recipe.rollout.hang_limit_s)
        self.device = device
        self.architecture: Architecture = read_architecture(recipe.model.path)
        self.exact = recipe.rollout.engine == "exact"
        self._products = self._settle_products()
        self.bit_check = None if bit_check is None else partial(bit_check, self)
        self.keep_current_logprobs = keep_current_logprobs
        model = build_model(self.architecture, self.config, self.device, recipe.precision, self.exact)
        self.weights = WeightMap(model, self.architecture)
        self.weights.load(recipe.model.path)
        self.adapters = Adapters(model, self.config.lora, recipe.seed) if self.config.lora else None
        self.head = FusedHead(model) if self.config.fused_head else None  # then `logits` below are hidden states
        self.module = model  # the bare GPTModel; self.model wraps it for data parallelism
        self.replay: RouterReplayer | None = None
        if recipe.routing.is_on or recipe.objective.router_shift is not None:
            self.replay = RouterReplayer(model, self.architecture, recipe.routing, self.device)
        self.router_biases = RouterBiases(model, recipe.routing.bias_update_rate)
        self.model, self.optimizer = with_optimizer(model, self.config, self.device, self.router_biases)
        self.offload = Offload(self.config.offload, self.model, model, self.optimizer, self.device)
        weights = nullcontext
        if self.config.quantization is not None:
            weights = partial(rounded_weights, model, recipe.rollout.quantization, self.architecture)
        self.passes = Passes(self.model, model, self.config, self.device, self.replay, self.exact, phase, weights)
        loss_scale = self.config.loss_scale if self.config.dtype == "fp16" else None
        self.overflow = OverflowGuard(
            self.optimizer, loss_scale, self.config.max_consecutive_overflows, self._trained_parameters
        )
        self.noise = GradientNoise(self.model, self.optimizer) if recipe.monitor.gradient_noise else None
        self.scheduler = build_scheduler(recipe.schedule, self.config.optimizer, self.optimizer, recipe.num_updates)
        self.step = 0  # rollout steps done
        self.num_updates = 0  # optimizer steps applied: the policy version
        self._version_of_batch = 0  # before the batch at hand

    def close(self) -> None:
        """Give up model, optimizer and their memory; nothing else of this learner works afterwards. Safe to call twice.

        A process that builds several learners closes each before the next, or holds the memory of all.
        """
        if "model" in vars(self):
            unhook(self.model)
        vars(self).clear()
        gc.collect()

    @cached_property
    def second_models(self) -> dict[str, SecondModel]:
        """Those on these ranks, by the field of `Rollout` that they fill; loaded at the first update. Collective."""
        about = (self.recipe, self.device, self.exact, self.phase)
        models = {
            name: SecondModel(self.passes, self.head, self.adapters.off)
            if path is None
            else load_second_model(path, *about)
            for name, path in self.recipe.scored_by_learner.items()
        }
        if self.recipe.scoring is not None:
            policy = (self.module, self._current, self.passes.weights)
            models["scoring_logprobs"] = load_scoring(*about, *policy)
        return models

    @cached_property
    def replicas(self) -> Replicas:
        """Found at the first update. Collective."""
        return Replicas.of_job()

    # -- the update

    def update(self, batch: Batch, complete: Callable[[], None] | None = None) -> dict[str, float]:
        """One optimizer step per mini-batch of ``batch``; metrics over all of it, the same on every rank.

        ``complete``: called on every rank after the pass for old log-probs, before anything uses advantages or masks.
        """
        self._version_of_batch = self.num_updates
        records_routes = self.recipe.routing.replay == "r2"
        keeps_scores = self.recipe.objective.router_shift is not None
        keeps_heads = self.recipe.objective.centres_on_po
        makes_pass = self.recipe.needs_old_logprobs(len(batch.minibatches))
        with self.phase("exchange"):
            homes = self._distribute(batch, makes_pass)
        skipped = {"perf/time/old_logprobs": 0.0}  # stands unless the pass is made and timed
        gaps: list[float] = []
        if makes_pass:
            skipped = {}
            for sequence in batch.sequences:
                sequence.old_experts = sequence.old_scores = sequence.head_old_logprobs = None  # of an update before
            with self.phase("old_logprobs"):
                logprobs = self._logprobs(batch, "record" if records_routes else None, keeps_scores, keeps_heads)
            if self.bit_check is not None:
                with self.phase("gate"):
                    everything = range(len(batch.sequences))
                    gaps.append(self.bit_check(batch, logprobs, "pass for old log-probs", everything))
            with self.phase("old_logprobs"):
                logprobs = hand_over_logprobs(batch, logprobs, *homes, self.replicas)
                for i, sequence in enumerate(batch.sequences):
                    sequence.old_logprobs = logprobs.get(i)
                if records_routes:
                    hand_over_routes(batch, *homes, self.replicas)
                if keeps_scores:
                    hand_over_scores(batch, *homes, self.replicas)
                if keeps_heads:
                    hand_over_sets(batch, ["head_old_logprobs"], *homes, self.replicas)
        divergence = self._score(batch, makes_pass, *homes) if self.second_models else {}
        if complete is not None:
            complete()
        if self.recipe.objective.advantage == "min_variance":
            if self.noise is not None:
                self.noise.begin([], 0)  # no update
            self.offload.before_passes()
            self.offload.before_gradients()
            with self.phase("baseline"):
                set_advantages(self.scorer, batch, homes[1], self.recipe.objective.advantage)
        updates = [self._update_minibatch(batch, i) for i in range(len(batch.minibatches))]
        metrics = finalize_metrics(MetricStats.merge([stats for stats, _ in updates]))
        for name in ("actor/pg_loss", "actor/regularizer_loss"):
            if name in metrics:
                metrics[name] /= len(updates)  # statistics add up over mini-batches; a loss is per mini-batch
        for name in dict.fromkeys(name for _, step in updates for name in step):
            metrics[name] = float(np.mean([step[name] for _, step in updates if name in step]))
        if self.bit_check is not None:
            metrics[BIT_CHECK_METRIC] = max([*gaps, metrics[BIT_CHECK_METRIC]])
        routing = self.replay.metrics() if self.recipe.routing.is_on else {}
        return skipped | divergence | metrics | self.overflow.metrics() | routing

    def _score(self, batch: Batch, made_pass: bool, source: list[int], target: list[int]) -> dict[str, float]:
        """Give the sequences their log-probs under the second models, and what the divergence takes off rewards.

        ``made_pass``: one for log po; rows are packed as it packs them, else as the updates do: equal weights give
        equal bits. ``source``, ``target``: as `_distribute` returned them. Collective.
        """
        parts = [range(len(batch.sequences))] if made_pass else batch.minibatches
        self.offload.before_passes()
        for name, model in self.second_models.items():
            is_measured = name == "scoring_logprobs"
            if is_measured and batch.step % self.recipe.scoring.every:
                continue
            with self.phase(name.removesuffix("_logprobs")), model.here():
                packed = [m for indices in parts for m in model.passes.microbatches(batch, indices, model.mode)]
                teacher = self.recipe.teacher if name == "teacher_logprobs" and self.recipe.teacher.top_k else None
                if teacher is not None:
                    for sequence in batch.sequences:
                        sequence.teacher_tokens = sequence.teacher_set_logprobs = None  # of a recorded batch
                heads = None if teacher is None else batch
                logprobs = self._forward(model.passes, model.head, packed, model.mode, heads, teacher)
                logprobs = hand_over_logprobs(batch, logprobs, source, target, self.replicas)
                if not is_measured:
                    together(name, partial(refuse_nan, name, logprobs, self.config.dtype))
                for i, sequence in enumerate(batch.sequences):
                    setattr(sequence, name, logprobs.get(i))
                if teacher is not None:
                    names = ["teacher_tokens"] * (teacher.tokens == "teacher") + ["teacher_set_logprobs"]
                    hand_over_sets(batch, names, source, target, self.replicas)
        in_reward = self.recipe.objective.kl_in_reward
        return {} if in_reward is None else {"reference/kl_in_reward": take_off_rewards(batch, in_reward)}

    def _distribute(self, batch: Batch, makes_pass: bool) -> tuple[list[int], list[int]]:
        """Bring every sequence to the replicas that learn from it: their numbers in the pass and in the update."""
        in_update = self.passes.homes(batch, batch.minibatches)
        in_pass = self.passes.homes(batch, [range(len(batch.sequences))]) if makes_pass else in_update
        distribute(batch, [list({*pair}) for pair in zip(in_pass, in_update, strict=True)], self.replicas)
        for sequence, home in zip(batch.sequences, in_update, strict=True):
            sequence.holder = self.replicas.speakers[home]
        return in_pass, in_update

    def _update_minibatch(self, batch: Batch, number: int) -> tuple[MetricStats, dict[str, float]]:
        indices = batch.minibatches[number]
        check_is_due = self.bit_check is not None and number == 0  # later ones have other weights
        microbatches, results = self.accumulate(batch, indices, indices)
        bit_metric = {}
        if self.keep_current_logprobs or check_is_due:
            kept = dict(item for _, pieces in filter(None, results) for item in pieces)
            for i in indices:
                batch.sequences[i].current_logprobs = kept.get(i)
        if check_is_due:
            with self.phase("gate"):
                bit_metric = {BIT_CHECK_METRIC: self.bit_check(batch, kept, "forward pass of the update", indices)}
        stats = None
        if self.recipe.schedule.effective_sample is not None:
            stats = self._minibatch_stats(results)
        noise: dict[str, float] = {}
        factor, staleness = self._rate_factor(stats, batch, indices)
        with self.scheduler.scaled(factor):
            with self.phase("optimizer"):
                self.offload.before_update()
                lr = self.optimizer.param_groups[0]["lr"]
                updated, grad_norm = self.overflow.step()
            if updated and self.noise is not None:
                with self.phase("noise"):
                    noise = self.noise.collect() | update_size(self.optimizer)
        if updated:
            self.router_biases.move()
            self.scheduler.step(1)
            self.num_updates += 1
        stats = stats or self._minibatch_stats(results)
        with self.phase("reduce_metrics"):
            real, padded = np.sum(gather_objects([(m.num_real_tokens, m.tokens.numel()) for m in microbatches]), (0, 1))
        norm = {} if grad_norm is None else {"actor/grad_norm": float(grad_norm)}  # a skipped update has none
        return stats, norm | noise | bit_metric | staleness | {
            "actor/lr": float(lr),
            "actor/update_skipped": float(not updated),
            "perf/padding_frac": 1.0 - real / padded,
        }

    def _minibatch_stats(self, results: list[Any]) -> MetricStats:
        """Statistics of a mini-batch from what `_loss` returned last for this rank's microbatches. Collective."""
        with self.phase("reduce_metrics"):
            return self._reduce_stats([stats for stats, _ in filter(None, results)])

    def _rate_factor(
        self, stats: MetricStats | None, batch: Batch, indices: list[int]
    ) -> tuple[float, dict[str, float]]:
        """What `schedule.effective_sample` and `staleness_bound` make of this update's rate, and what the latter saw.

        A mini-batch without trained tokens leaves the rate as it is. Collective with `staleness_bound`.
        """
        schedule, factor = self.recipe.schedule, 1.0
        if stats is not None:
            factor = rate_factor(finalize_metrics(stats).get(EFFECTIVE_SAMPLE, 1.0), schedule.effective_sample)
        if schedule.staleness_bound is None:
            return factor, {}
        own = [s for s in (batch.sequences[i] for i in indices) if s.holder == world_rank()]
        trained = [s.policy_versions[s.loss_mask] for s in own]
        oldest = min(gather_objects(int(np.concatenate([*trained, [self.num_updates]]).min())))
        staleness = self.num_updates - oldest
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        bounded = bounded_factor(factor, lr, staleness, schedule.staleness_bound)
        return bounded, {"lr_sched/staleness": float(staleness)}

    def accumulate(self, batch: Batch, indices: list[int], minibatch: list[int]) -> tuple[list[Microbatch], list[Any]]:
        """Gradients of the sequences ``indices``, summed and reduced into this rank's share of Megatron's buffer.

        ``minibatch``: the sequences whose counts divide the losses. Returns this rank's microbatches and what `_loss`
        returned last for each. Collective.
        """
        with self.phase("pack"):
            mode = self._routing_mode(updating=True)
            microbatches = self.passes.microbatches(batch, indices, mode)
            denominators = minibatch_denominators([batch.sequences[i] for i in minibatch], self.recipe.objective)
        self.offload.before_passes()
        self.offload.before_gradients()
        if self.noise is not None:
            self.noise.begin([len(m.indices) for m in microbatches], len(indices))
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.router_biases.begin()
        with self.phase("forward_backward"):
            return microbatches, self.passes.run(microbatches, partial(self._loss, denominators=denominators), mode)

    def _loss(
        self, logits: torch.Tensor, microbatch: Microbatch, *, denominators: Denominators
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[MetricStats, list[tuple[int, np.ndarray]]] | None]:
        # Megatron's token count, which `optimizer._add_up_grads` leaves unused.
        unit = torch.ones((), dtype=torch.int, device=logits.device)
        if not microbatch.indices:
            return logits.sum() * 0.0, unit, None
        config = self.recipe.teacher
        centred = microbatch.head if self.recipe.objective.score_centering else None
        sets = microbatch.teacher_tokens if config is not None and config.top_k else None
        wanted = [tokens for tokens in (centred, sets) if tokens is not None]
        logprobs, entropy, *chosen = self._token_logprobs(
            logits, microbatch, self.head, torch.cat(wanted, dim=1) if wanted else None
        )
        parts = iter(chosen[0].split([tokens.size(1) for tokens in wanted], dim=1) if chosen else ())
        of_head, of_sets = (None if tokens is None else next(parts) for tokens in (centred, sets))
        head = None
        if centred is not None:
            is_whole = microbatch.kept is not None
            mu, has_sampled = microbatch.head_inference, microbatch.head_has_sampled
            head = Head(of_head, mu, has_sampled, is_whole, microbatch.head_old)
        inputs = ObjectiveInputs(
            current_logprobs=logprobs,
            old_logprobs=microbatch.old_logprobs,
            inference_logprobs=microbatch.inference_logprobs,
            advantages=microbatch.advantages,
            loss_mask=microbatch.loss_mask,
            cu_seqlens=microbatch.cu_seqlens,
            sequence_ids=torch.tensor(microbatch.indices, device=logits.device),
            entropy=entropy,
            distances=self._distances(microbatch),
            head=head,
            reference_logprobs=microbatch.reference_logprobs,
            scoring_logprobs=microbatch.scoring_logprobs,
            router_shift=router_shift(microbatch),
            teacher=self._teacher(microbatch, of_sets),
        )
        noise = NoiseKey(self.recipe.seed, self.num_updates)
        result = compute_objective(inputs, self.recipe.objective, denominators=denominators, noise_key=noise)
        return (
            result.loss,
            unit,
            (result.stats, self._pieces(logprobs, microbatch) if self.keep_current_logprobs or self.exact else []),
        )

    def _teacher(self, microbatch: Microbatch, of_sets: torch.Tensor | None) -> Teacher | None:
        """``of_sets``: log pi [n, k] of the sets that come with the batch."""
        config, logprobs = self.recipe.teacher, microbatch.teacher_logprobs
        if config is None:
            return None
        if logprobs is None:
            raise InputError("teacher: set, but the batch has no teacher_logprobs; use null, or a batch of such a run")
        sets = None
        if config.top_k:
            of_teacher = microbatch.teacher_set_logprobs
            if of_sets is None or of_teacher is None or of_sets.size(1) != config.top_k:
                raise InputError(
                    f"teacher.top_k: {config.top_k}, but the batch has no sets of so many tokens; use 0, or a batch of "
                    "such a run"
                )
            sets = TeacherSet(of_sets, of_teacher, config.forward, config.normalized)
        return Teacher(logprobs, config.weight, config.student, config.discount, sets)

    def _distances(self, microbatch: Microbatch) -> torch.Tensor | None:
        """[n] int64: optimizer steps between the weights that sampled a token and those before this batch."""
        return self._version_of_batch - microbatch.policy_versions if self.recipe.rollout.max_staleness else None

    def _reduce_stats(self, local: list[MetricStats]) -> MetricStats:
        """Statistics of the whole mini-batch on every rank. Only the last pipeline stage has any."""
        local_stats = MetricStats.merge(local).cpu() if local and speaks() else None
        return MetricStats.merge([stats for stats in gather_objects(local_stats) if stats is not None])

    # -- log-probabilities

    def compute_logprobs(self, batch: Batch, routing: RoutingMode | None = None) -> list[np.ndarray]:
        """log pi of every response token, one [R] float32 array per sequence, on every rank. No gradient.

        ``batch``: one that every rank holds. ``routing``: how tokens are routed; None: as the recipe's
        `routing.replay` says. With "record" every sequence gets the routes that the routers chose.
        """
        logprobs = self.passes.share(self._logprobs(batch, routing))
        if routing == "record":
            home = self.passes.homes(batch, [range(len(batch.sequences))])
            routed = [(i, s) for i, s in enumerate(batch.sequences) if home[i] == self.replicas.own]
            for name in ("routed_experts", "route_checksums"):
                shared = self.passes.share({i: getattr(s, name) for i, s in routed})
                for i, sequence in enumerate(batch.sequences):
                    setattr(sequence, name, shared[i])
        return [logprobs[i] for i in range(len(batch.sequences))]

    def _logprobs(
        self, batch: Batch, routing: RoutingMode | None, keeps_scores: bool = False, keeps_heads: bool = False
    ) -> dict[int, np.ndarray]:
        """`compute_logprobs` of this replica's sequences, by number, on the last stage. With "record" they get routes,
        on all its ranks; with ``keeps_scores`` the routers' scores; with ``keeps_heads`` log po of their heads."""
        self.offload.before_passes()
        mode = routing or self._routing_mode(updating=False)
        recorded: list[Any] = []
        microbatches = self.passes.microbatches(batch, range(len(batch.sequences)), mode)
        heads = batch if keeps_heads else None
        logprobs = self._forward(
            self.passes, self.head, microbatches, mode, heads, recorded=recorded, keeps_scores=keeps_scores
        )
        for microbatch in microbatches if keeps_scores else ():
            keep_scores(batch, microbatch)
        if mode == "record":
            self.replay.assemble(batch, recorded)
        return logprobs

    def _forward(
        self,
        passes: Passes,
        fused: FusedHead | None,
        microbatches: list[Microbatch],
        mode: RoutingMode,
        heads: Batch | None = None,
        teacher: TeacherConfig | None = None,
        **options: Any,
    ) -> dict[int, np.ndarray]:
        """Log-probs [R] by sequence of passes without a gradient, on the last stage. ``fused``: of their model.
        ``heads``: the batch whose sequences get log-probs of their heads, too, or with ``teacher`` of its sets."""

        def collect(logits: torch.Tensor, microbatch: Microbatch):
            pieces = []
            if microbatch.indices:
                head = None if heads is None else microbatch.head
                if teacher is not None and teacher.tokens == "teacher":
                    head = self._most_probable(logits, microbatch, fused, teacher.top_k)
                elif heads is not None and head is None:
                    raise InputError(
                        f"rollout.sampled_head: {self.recipe.rollout.sampled_head}, but the batch has no heads; use 0, "
                        "without what reads them, or a batch of such a run"
                    )
                logprobs, _, *of_head = self._token_logprobs(logits, microbatch, fused, head)
                pieces = self._pieces(logprobs, microbatch)
                if teacher is not None:
                    self._keep_sets(heads, microbatch, teacher, head, *of_head)
                elif of_head:
                    for i, piece in self._pieces(of_head[0], microbatch):
                        heads.sequences[i].head_old_logprobs = piece
            return logits.new_zeros(()), torch.ones((), dtype=torch.int, device=logits.device), pieces

        with torch.no_grad():
            results = passes.run(microbatches, collect, mode, forward_only=True, **options)
        return dict(item for items in results for item in items)

    def _keep_sets(
        self, batch: Batch, microbatch: Microbatch, teacher: TeacherConfig, tokens: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        """Give sequences the sets ``tokens`` [m, k], if they are the teacher's, and its ``logprobs`` [n, k] of them."""
        if microbatch.places is not None:
            tokens = gather_tokens(tokens.t(), microbatch.places, len(microbatch.loss_mask)).t()
        kept = {"teacher_set_logprobs": logprobs.masked_fill(tokens < 0, -torch.inf)}
        if teacher.tokens == "teacher":
            kept["teacher_tokens"] = tokens.to(torch.int32)
        for name, values in kept.items():
            for i, piece in self._pieces(values, microbatch):
                setattr(batch.sequences[i], name, piece)

    def _most_probable(
        self, logits: torch.Tensor, microbatch: Microbatch, fused: FusedHead | None, k: int
    ) -> torch.Tensor:
        """[m, k] int64; ``fused`` as in `_token_logprobs`."""
        find, rows = (most_probable, logits.flatten(0, 1)) if fused is None else (fused.most_probable, logits)
        group, vocab_size = parallel_state.get_tensor_model_parallel_group(), self.architecture.vocab_size
        return find(rows, microbatch.positions, k, vocab_size=vocab_size, group=group, kept=microbatch.kept)

    def _pieces(self, logprobs: torch.Tensor, microbatch: Microbatch) -> list[tuple[int, np.ndarray]]:
        """Log-probs [n] of a microbatch as one array per sequence, with the sequence's index."""
        pieces = logprobs.detach().cpu().split(microbatch.response_lengths)
        return [(i, p.numpy()) for i, p in zip(microbatch.indices, pieces, strict=True)]

    def _token_logprobs(
        self,
        logits: torch.Tensor,
        microbatch: Microbatch,
        fused: FusedHead | None = None,
        head: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-probs [n] and entropy [n], and log-probs [n, k] of ``head`` [m, k] where there is one. ``fused``: the
        output layer of the model whose hidden states ``logits`` are then."""
        options = {
            "vocab_size": self.architecture.vocab_size,
            "temperature": self.recipe.rollout.temperature,
            "group": parallel_state.get_tensor_model_parallel_group(),
            "entropy_gradient": self.recipe.objective.entropy_bonus > 0,
            "kept": microbatch.kept,
            "head": head,
        }
        if fused is not None:
            outputs = fused.token_logprobs(logits, microbatch.positions, microbatch.labels, **options)
        else:
            rows = logits.flatten(0, 1)
            outputs = token_logprobs(rows, microbatch.positions, microbatch.labels, exact=self.exact, **options)
        if microbatch.places is None:
            return outputs
        # The objective takes whole sequences, whichever ranks have computed them.
        own = torch.stack([*outputs[:2], *(x for output in outputs[2:] for x in output.unbind(dim=1))])
        logprobs, entropy, *of_head = gather_tokens(own, microbatch.places, len(microbatch.loss_mask))
        of_head = [torch.stack(of_head, dim=1)] if of_head else []
        return logprobs, entropy if options["entropy_gradient"] else entropy.detach(), *of_head

    def _routing_mode(self, updating: bool) -> RoutingMode:
        """How tokens are routed in an update, or in a pass for log-probs: R2 has routes only after its own pass."""
        replay = self.recipe.routing.replay
        if replay == "r3" or (replay == "r2" and updating):
            return "replay"
        return "watch" if self.recipe.routing.is_on and updating and replay == "off" else "native"

    def decoder(self) -> Decoder:
        """The exact engine's passes of generation on these weights, within the limits of the recipe."""
        rollout = self.recipe.rollout
        return Decoder(
            self.module,
            self.architecture.vocab_size,
            self.device,
            token_logprobs,
            max_tokens=self.config.max_tokens_per_microbatch,
            max_sequences=rollout.max_num_seqs,
            cache_gib=rollout.kv_cache_gib,
            utilization=rollout.gpu_memory_utilization,
            capture=capture_for(self.device, rollout.enforce_eager),
        )

    # -- weights and state

    def _trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        names = self.weights.named_parameters()
        return names if self.adapters is None else self.adapters.named_parameters(names)

    def describe_precision(self) -> dict[str, str]:
        """Aspect → what this engine does: the learner's column of the precision contract."""
        described = describe_model(self.module)
        if self.config.quantization is not None:
            described["weights"] = self.recipe.rollout.quantization.words
        return products.as_measured(described, self._products)

    def _settle_products(self) -> dict[str, str]:
        """Make products of fp32 matrices what the recipe says before the first one; library → what it was then found to
        do, empty where the learner has no such products. Raises `InputError` where one does something else."""
        own, engine = self.recipe.fp32_products
        beside = set() if self.recipe.rollout.engine == "vllm_server" else engine
        products.settle(own | beside, self.device.type)
        if not own:
            return {}
        te = use_transformer_engine(self.device, self.exact)
        measured = products.measured_products(self.device, transformer_engine=te, triton=False)
        products.hold(only_product(own), measured, "learner")
        return measured

    def step_aside(self, weights: bool = True) -> None:
        """Make room for the engine, as `learner.offload` says. Whatever needs a part that left brings it back.

        ``weights``: they may leave, too; False: the engine is about to be sent them.
        """
        self.offload.step_aside(weights)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in Hugging Face names, one at a time, for the rollout engine; collective (see
        `WeightMap.export`). Learner dtype, or with ``precision.export_from: master`` rounded once from fp32. Weights
        that are in host memory stay there."""
        dtype, wanted = self.config.dtype, self.recipe.rollout.dtype
        learners = self.adapters is not None or self.recipe.precision.export_from == "learner"
        if learners or dtype in (*FP32_STORED, wanted):
            return self.weights.export(None if self.adapters is None and self.offload.is_all_here else self._current)
        return self.weights.export(master_reader(self.optimizer, self.offload.device_values), DTYPES[wanted])

    def _current(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Its values on the device, with its adapter."""
        read = self.offload.device_values
        if self.adapters is None:
            return read(parameter.detach())
        with torch.no_grad():
            return self.adapters.merged(parameter, read)

    @property
    def scorer(self) -> Scorer:
        """What computes ∇ log pi, for the baseline of least variance."""
        mode = self._routing_mode(updating=True)
        logprobs = partial(self._token_logprobs, fused=self.head)
        return Scorer(self.model, self.passes, self.replicas.own, mode, logprobs, self.device)

    def export_hf(self, folder: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, with config and tokenizer of the starting one, that makes
        prompts and ends responses as the run does. Collective."""
        recipe = self.recipe
        sampling = Sampling.of(recipe.data.prompt.chat_template, recipe.rollout.stop_token_ids)
        write_hf_checkpoint(folder, self.weights.export(self._current), recipe.model.path, sampling=sampling)

    def save(self, folder: Path, state: dict[str, Any], keep_last: int = 0, protected: Collection[int] = ()) -> Path:
        """Checkpoint of this step. ``state``: what the loop wants back from `load`; JSON-able. See
        `save.begin_save` for what is kept of the older ones, and for `SaveError`."""
        return self.begin_save(folder, state, keep_last, protected, in_background=False).finish()

    def begin_save(
        self,
        folder: Path,
        state: dict[str, Any],
        keep_last: int = 0,
        protected: Collection[int] = (),
        in_background: bool = True,
    ) -> checkpoint.PendingSave:
        """As `save`, written while training goes on; see `save.begin_save`."""
        state, kept = {"learner": self._counts(), **state}, {"keep_last": keep_last, "protected": protected}
        with self.offload.readable_optimizer():
            return checkpoint.begin_save(
                folder,
                self.step,
                self.model,
                self.optimizer,
                state,
                self.offload.host_values,
                in_background=in_background,
                **kept,
            )

    def load(self, path: Path, verify: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint; returns the loop's ``state``. ``verify``: compare its files with their hashes."""
        self.offload.come_back()
        state = checkpoint.load_checkpoint(path, self.model, self.optimizer, verify)
        settled(path / checkpoint.TRAINER_FILE, state, "learner", self._go_on, self._counts())
        del state["learner"]
        return state

    def _counts(self) -> dict[str, Any]:
        """What goes on beside tensors; JSON-able."""
        own = {"step": self.step, "num_updates": self.num_updates}
        return own | {"scheduler": self.scheduler.state_dict(), "overflow": self.overflow.state_dict()}

    def _go_on(self, own: dict[str, Any]) -> None:
        self.step, self.num_updates = own["step"], own["num_updates"]
        self.scheduler.load_state_dict(own["scheduler"])
        self.overflow.load_state_dict(own["overflow"])
