"""One rank of `tools.bench.scale`: a step's own code on responses made up here, stage by stage. No engine runs."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.batch import build_batch, group_metrics
from megatron_rl.config import Recipe
from megatron_rl.config.learner import ParallelConfig
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.packing import minibatch_denominators
from megatron_rl.learner.passes import Passes, Replicas, hand_over_logprobs, speaks
from megatron_rl.learner.process_groups import initialize, shutdown
from megatron_rl.learner.router_replay import RouterReplayer
from megatron_rl.model.architecture import shape_of
from megatron_rl.monitor.samples import rollout_metrics, share_repetition
from megatron_rl.process import ranks as ranks_module
from megatron_rl.process.ranks import any_rank
from megatron_rl.rewards import Rewarder
from megatron_rl.rewards.rewarder import score_shared
from megatron_rl.rollout.requests import (
    consecutive_ranks,
    make_groups,
    make_requests,
    make_rollout,
    owners_of,
    share_of,
)
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.run.recorded_batches import record_batch
from megatron_rl.types import Prompt
from tools.bench.unit_costs import Cost, Setting

TENSOR = 4  # ranks of a replica and of an engine, as in the sizes that costs are extrapolated to
PROMPT = 256  # tokens


class Meter:
    """Adds up costs of stages; a stage within another is taken out of it."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._inner = Cost()
        gc.collect()
        _forget_peak()
        self.start = _memory("VmRSS")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer, self._inner = self._inner, Cost()
        _forget_peak()
        received, seconds = COUNTED.received, time.process_time()
        yield
        total = Cost(time.process_time() - seconds, COUNTED.received - received, _memory("VmHWM") - self.start)
        cost = self.costs.setdefault(name, Cost())
        cost.seconds += total.seconds - self._inner.seconds
        cost.received += total.received - self._inner.received
        cost.peak = max(cost.peak, total.peak)
        self._inner = Cost(outer.seconds + total.seconds, outer.received + total.received)


class _Counting:
    """`torch.distributed` as `process.arrays` sees it, with the bytes counted that arrive at this rank."""

    received = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, arriving: torch.Tensor, leaving: torch.Tensor, *sizes: Any) -> Any:
        self.received += arriving.numel() * arriving.element_size()
        return dist.all_to_all_single(arriving, leaving, *sizes)

    def broadcast(self, tensor: torch.Tensor, source: int, **where: Any) -> Any:
        self.received += tensor.numel() * tensor.element_size() * (dist.get_rank() != source)
        return dist.broadcast(tensor, source, **where)

    def all_gather_into_tensor(self, gathered: torch.Tensor, mine: torch.Tensor) -> Any:
        self.received += gathered.numel() * gathered.element_size()
        return dist.all_gather_into_tensor(gathered, mine)


COUNTED = _Counting()
ranks_module.dist = COUNTED


def _memory(kind: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def _forget_peak() -> None:
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free is not resident
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM becomes what is resident now


def run_rank(rank: int, port: int, recipe: Recipe, settings: list[Setting], results: Any) -> None:
    """Measure ``settings``, all of the same number of ranks; rank 0 puts the worst rank's costs into ``results``."""
    ranks = settings[0].ranks
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    initialize(ParallelConfig(tensor=TENSOR), "cpu", 0)
    step = _Step(recipe)
    step.measure(Setting(ranks, 4 * ranks, 64, True))  # the first of everything is slower
    for setting in settings:
        measured = [step.measure(setting) for _ in range(2)]
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, measured)
        if rank == 0:
            results.put((setting, _worst([_best(of_rank) for of_rank in everyone]), _sockets()))
    shutdown()


def _sockets() -> int:
    """Open sockets of this process."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def _best(repeats: list[dict[str, Cost]]) -> dict[str, Cost]:
    """Stage by stage the seconds of the repeat that disturbances hit less, and the larger peak.

    A later repeat starts with memory that an earlier one has left to the process, and its peaks count from there.
    """
    best = {}
    for name in repeats[0]:
        costs = [repeat[name] for repeat in repeats]
        least = min(costs, key=lambda cost: cost.seconds)
        best[name] = Cost(least.seconds, least.received, max(cost.peak for cost in costs))
    return best


def _worst(ranks: list[dict[str, Cost]]) -> dict[str, Cost]:
    names = ranks[0]
    return {
        name: Cost(*(max(getattr(costs[name], what) for costs in ranks) for what in ("seconds", "received", "peak")))
        for name in names
    }


class _Step:
    """The parts of a run that handle responses, without model and engine."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.architecture, _ = shape_of(recipe.model.path)
        device = torch.device("cpu")
        replay = RouterReplayer(_routers(self.architecture), self.architecture, recipe.routing, device)
        self.meter = Meter()
        self.passes = Passes(None, None, self._learner_config(), device, replay, False, self._phase)
        self.replicas = Replicas.of_job()
        self.rewarder = Rewarder(
            recipe.reward.model_copy(update={"name": "modsum"}), recipe.rollout.max_response_length
        )

    def _learner_config(self) -> Any:
        parallel = self.recipe.learner.parallel.model_copy(update={"tensor": TENSOR})
        return self.recipe.learner.model_copy(update={"parallel": parallel})

    def _phase(self, name: str) -> Any:
        return self.meter.stage(name)

    def measure(self, setting: Setting) -> dict[str, Cost]:
        recipe, rank, ranks = self.recipe, dist.get_rank(), setting.ranks
        num_samples = min(16, setting.sequences)
        prompt = min(PROMPT, setting.length // 2)
        prompts = [Prompt(f"bench:{i}", [7] * prompt, "3") for i in range(setting.sequences // num_samples)]
        requests = make_requests(prompts, num_samples, seed=0, step=0)
        engine, engines = rank // TENSOR, ranks // TENSOR
        owners = owners_of(len(requests), consecutive_ranks(engines, TENSOR))
        own_requests = share_of(requests, engine, engines)[rank % TENSOR :: TENSOR]
        meter = self.meter = Meter()
        answers = [self._answer(request, setting.length - prompt, setting.routes) for request in own_requests]
        recorded, mode = (self.architecture, "replay") if setting.routes else (None, "native")
        fake_engine = SimpleNamespace(_rank=rank, _broken="")
        with meter.stage("responses"):
            held = [
                make_rollout(request, *answer[:2], "stop", 0, answer[2], recorded, "#3")
                for request, answer in zip(own_requests, answers)
            ]
        del answers
        with meter.stage("metadata"):
            rollouts = VllmGenerator._tell(fake_engine, requests, owners, held)
            groups = make_groups(prompts, num_samples, rollouts)
        del held, rollouts
        with meter.stage("rewards"):
            score_shared(self.rewarder, groups)
        with meter.stage("batch"):
            group_metrics(groups)
            batch = build_batch(0, groups, recipe.batch, recipe.objective)
        makes_pass = recipe.objective.needs_old_logprobs(len(batch.minibatches))
        with meter.stage("exchange"):
            learner = SimpleNamespace(passes=self.passes, replicas=self.replicas)
            homes = Learner._distribute(learner, batch, makes_pass)
        with meter.stage("pack"):
            if makes_pass:
                self.passes.microbatches(batch, range(len(batch.sequences)), mode)
        with meter.stage("log-probs"):
            if makes_pass:
                self._hand_over(batch, *homes)
        for minibatch in batch.minibatches:
            with meter.stage("pack"):
                self.passes.microbatches(batch, minibatch, mode)
                minibatch_denominators([batch.sequences[i] for i in minibatch], recipe.objective)
        with meter.stage("metrics"):
            share_repetition(groups)
            rollout_metrics(groups)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, meter.stage("recorder"):
            shared = [folder]
            dist.broadcast_object_list(shared, src=0)
            record_batch(Path(shared[0]), batch, 0, {}, keep=False)
            any_rank(False)  # waits for all
        return meter.costs

    def _answer(self, request: Any, length: int, routed: bool) -> tuple[list[int], list[float], np.ndarray | None]:
        """What an engine returns, with routes [P + R - 1, L, K] uint8 where ``routed``."""
        a, random = self.architecture, np.random.default_rng(request.seed)
        rows = len(request.prompt.tokens) + length - 1
        first = random.integers(0, a.num_experts, (rows, a.num_layers, 1))
        routes = ((first + 5 * np.arange(a.experts_per_token)) % a.num_experts).astype(np.uint8)
        tokens, logprobs = random.integers(3, 90, length).tolist(), (-random.random(length)).tolist()
        return tokens, logprobs, routes if routed else None

    def _hand_over(self, batch: Any, in_pass: list[int], in_update: list[int]) -> None:
        local_rows = [i for i, home in enumerate(in_pass) if home == self.replicas.own and speaks()]
        logprobs = {i: np.zeros(batch.sequences[i].length, dtype=np.float32) for i in local_rows}
        handed_over = hand_over_logprobs(batch, logprobs, in_pass, in_update, self.replicas)
        for i, sequence in enumerate(batch.sequences):
            sequence.old_logprobs = handed_over.get(i)


def _routers(architecture: Any) -> torch.nn.Module:
    """Megatron's routers of every MoE layer, narrow: replay asks them who they are, nothing here calls them."""
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=architecture.num_experts,
        moe_router_topk=architecture.experts_per_token,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = torch.nn.ModuleList()
    for number, is_moe in enumerate(architecture.moe_layers, start=1):
        if is_moe:
            model.append(TopKRouter(config, pg_collection=groups))
            model[-1].layer_number = number
    model.config = config
    return model
