"""Both engines on the tiny model: mismatch by type, weight updates, vLLM's two model runners, memory of a GPU by phase.

One engine is also started as a run does it: the stream beside it, its kernels, what is left when it is closed.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, passed, planned, tiny
from megatron_rl.doctor.learner import layout, made_up_batch, overrides

if TYPE_CHECKING:
    import numpy as np

    from megatron_rl.config import Recipe
    from megatron_rl.instruments.parity.compare import Comparison
    from megatron_rl.instruments.parity.witnesses import Setup
    from megatron_rl.instruments.plan.memory import MemoryPlan
    from megatron_rl.learner.learner import Learner
    from megatron_rl.rollout import Generator
    from megatron_rl.types import Batch


PROMPTS, SAMPLES = 16, 4
# How much further than the learner the engine may be from fp32: both round the same function in one type, in other
# orders and at other places. Wrong weights, positions or masks are off by whole log-probs.
FACTOR = 8.0
REFIT_FACTOR = 10.0  # nearer to the new weights than to the old ones, in fp32
SMALL = ("rollout.gpu_memory_utilization=0.3", "rollout.kv_cache_gib=0.25")
PAIRS = {"bf16/bf16": "bf16", "bf16/bf16, fp32 head": "bf16", "fp16/fp16": "fp16", "fp32/fp32": "fp32"}


@dataclass(frozen=True)
class Distances:
    """Medians over tokens of the absolute difference of log-probs; ``mu``, ``po``: of rollout engine and learner."""

    mu_po: float
    mu_fp32: float  # to the learner in fp32
    po_fp32: float
    rho_std: float

    def row(self) -> dict[str, float]:
        names = {"|mu - po|": self.mu_po, "|mu - fp32|": self.mu_fp32, "|po - fp32|": self.po_fp32}
        return names | {"rho_std": self.rho_std}


def mismatch(setting: Setting) -> Outcome:
    """Learner and engine in the same type, and both with the head in fp32."""
    from megatron_rl.learner.learner import Learner

    eager = "rollout.enforce_eager=true"  # CUDA graphs are the runners' checks, and cost half a minute an engine
    reference = Learner(tiny(setting, *overrides({}, "fp32")))
    by_pair: dict[str, Distances] = {}
    for name, dtype in PAIRS.items():
        head = [f"precision.fp32_head={str('head' in name).lower()}"]
        recipe = tiny(setting, *overrides({}, dtype), *head, *SMALL, eager, f"rollout.dtype={dtype}", *_NO_TRIAL)
        learner = Learner(recipe)
        with closing(start_engine(recipe, learner, sleeps=False)) as generator:  # several in a process
            confirm(recipe, learner, generator)
            by_pair[name] = distances(generate(recipe, learner, generator), learner, reference)
        learner.close()
    return judge_mismatch(by_pair)


_NO_TRIAL = ("rollout.verify_refit=false",)  # is the check `refit`


def judge_mismatch(by_pair: dict[str, Distances]) -> Outcome:
    """Each engine is as near to fp32 as rounding in its type allows: the learner in that type is the measure.

    In fp32 there is nothing nearer to measure with; an engine whose products are those of TF32 rounds as fp16 does.
    """
    figures = {"log-probs": {name: distance.row() for name, distance in by_pair.items()}}
    for name, distance in by_pair.items():
        allowed = by_pair["fp16/fp16"].po_fp32 if name == "fp32/fp32" else FACTOR * distance.po_fp32
        if not distance.mu_fp32 <= allowed:
            return failed(
                f"{name}: the engine's log-probs are {distance.mu_fp32:.2e} from the learner's in fp32, rounding "
                f"explains {allowed:.2e}",
                "Look at `packages` and `refit` first, then at `megatron-rl paper mismatch` with more prompts. vLLM "
                "itself compares attention backends: `vllm serve --attention-backend NAME`.",
                **figures,
            )
    medians = ", ".join(f"{name} {distance.mu_po:.1e}" for name, distance in by_pair.items())
    return passed(f"median |log mu - log po|: {medians}", **figures)


def parity(setting: Setting) -> Outcome:
    """Every operator of both engines, of exact mode and of transformers, in bf16, against the checkpoint."""
    from megatron_rl.instruments.parity.witnesses import of_recipe

    recipe = tiny(setting, *overrides({}, "bf16"), *SMALL, "rollout.dtype=bf16")
    outcome = judge_parity(compared(of_recipe(recipe)))
    if outcome.status == "fail" or (recipe := planned(setting)) is None:
        return outcome
    return judge_first_layers(outcome, *first_layers(recipe, setting))


def compared(setup: Setup) -> Comparison:
    """Compare the witnesses of ``setup``."""
    from megatron_rl.instruments.parity.compare import compare
    from megatron_rl.instruments.parity.definition import Checkpoint
    from megatron_rl.instruments.parity.witnesses import collect

    return compare(Checkpoint(setup.model), collect(setup))


def first_layers(recipe: Recipe, setting: Setting) -> tuple[Comparison | None, str]:
    """Compare the first layers of the recipe's model at full width, in its types.

    Returns the comparison and which layers it is of; or None and why the layers could not be compared.
    """
    from megatron_rl.instruments.parity import witnesses
    from megatron_rl.instruments.parity.families import FAMILIES
    from megatron_rl.instruments.parity.witnesses import fewest_layers, first_layers_of
    from megatron_rl.model.architecture import read_architecture
    from megatron_rl.process.host import available_gib

    if not recipe.model.path.exists():
        return None, f"{recipe.model.path} is not here, so its layers were not looked at"
    setup, a = witnesses.of_types(recipe, setting.device), read_architecture(recipe.model.path)
    if a.model_type not in FAMILIES:
        return None, f"{recipe.model.path} was not looked at: parity has no definition of {a.model_type}"
    most, free = max(2, fewest_layers(a)), available_gib()
    number = witnesses.layers_that_fit(setup, a, free, most)
    if not number:
        least = witnesses.host_gib(setup, first_layers_of(a, fewest_layers(a)))
        return None, (
            f"the first layers of {recipe.model.path} take {least:.0f} GiB of host memory and {free:.0f} are free, so "
            "they were not looked at"
        )
    setup = witnesses.of_first_layers(setup, number, Path(setting.scratch))
    return compared(setup), f"the first {number} layers of {recipe.model.path}"


def judge_first_layers(tiny_model: Outcome, comparison: Comparison | None, which: str) -> Outcome:
    """Return the outcome of both comparisons. ``tiny_model``: passed. ``comparison``, ``which``: see `first_layers`."""
    if comparison is None:
        return passed(f"{tiny_model.reason}; {which}", **tiny_model.figures)
    outcome = judge_parity(comparison)
    if outcome.status == "fail":
        fix = outcome.fix.replace("recipes/tiny/model", "MODEL --layers N")
        return failed(f"{which}: {outcome.reason}", fix, **outcome.figures)
    return passed(f"tiny model: {tiny_model.reason}; {which}: {outcome.reason}", **outcome.figures)


def judge_parity(comparison: Comparison) -> Outcome:
    """Fails where an operator is beyond its bound, and names the first."""
    worst = {name: max(e.ratio for e in comparison.errors if e.witness == name) for name in comparison.witnesses}
    figures = {"error over bound": {name: min(ratio, 1e30) for name, ratio in worst.items()}}
    if not comparison.passes:
        return failed(
            ": ".join([comparison.verdict(), *(error.sentence() for error in comparison.first[:1])]),
            "Use the pinned versions (`packages`, `patches`). `megatron-rl parity recipes/tiny/model --out DIR` writes "
            "all operators and a picture; docs/parity.md explains them.",
            **figures,
        )
    return passed(f"{len(comparison.errors)} operators of {len(worst)} witnesses are within their bounds", **figures)


def refit(setting: Setting) -> Outcome:
    """vLLM takes its own checkpoint without a change of a bit, then the weights after an update of the learner."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.run.engines import hand_over

    recipe = tiny(
        setting, *overrides(layout(setting.ranks), "fp32"), *SMALL, "rollout.dtype=fp32", "rollout.enforce_eager=true"
    )
    learner = Learner(recipe)
    with closing(start_engine(recipe, learner)) as generator:  # raises where its own checkpoint changes it
        generator.sleep()
        learner.update(made_up_batch(0))
        hand_over(learner, generator)
        batch = generate(recipe, learner, generator)
        apart = distances(batch, learner, Learner(recipe))
        seconds = generator.stats()["perf/refit_engine_s"]
    return judge_refit(apart, seconds)


def judge_refit(apart: Distances, seconds: float) -> Outcome:
    """Say whether the engine has the new weights. The fp32 learner of ``apart`` holds the old ones."""
    figures = {"|mu - new|": apart.mu_po, "|mu - old|": apart.mu_fp32, "seconds": seconds}
    if not apart.mu_po * REFIT_FACTOR <= apart.mu_fp32:
        return failed(
            f"after a weight update the engine's log-probs are {apart.mu_po:.2e} from the learner's new weights and "
            f"{apart.mu_fp32:.2e} from its old ones",
            "The update did not arrive whole. Use the pinned vLLM, and keep rollout.verify_refit: true.",
            **figures,
        )
    return passed(
        f"its own checkpoint leaves every parameter as it was; after an update mu is {apart.mu_po:.1e} from the new "
        f"weights, {apart.mu_fp32:.1e} from the old",
        **figures,
    )


def runner(setting: Setting) -> Outcome:
    """The engine with CUDA graphs under the model runner that the environment names, with recorded routes replayed."""
    from megatron_rl.learner.learner import Learner

    precision = [*overrides({}, "bf16"), "rollout.dtype=bf16"]
    recipe = tiny(setting, *precision, *SMALL, "routing.replay=r3")
    learner, reference = Learner(recipe), Learner(tiny(setting, *overrides({}, "fp32"), "routing.replay=r3"))
    start = time.monotonic()
    with closing(start_engine(recipe, learner)) as generator:
        started = time.monotonic() - start
        apart = distances(generate(recipe, learner, generator), learner, reference)
        version = model_runner(generator)
    return judge_runner(version, apart, started)


def model_runner(generator: Any) -> int:
    """Which of vLLM's model runners the engine has."""
    return 2 if generator._llm.llm_engine.vllm_config.use_v2_model_runner else 1


def judge_runner(version: int, apart: Distances, started: float) -> Outcome:
    import os

    wanted = 2 if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else 1
    figures = apart.row() | {"start_s": started}
    other = f"Run with VLLM_USE_V2_MODEL_RUNNER={2 - wanted} meanwhile, and report it."
    if version != wanted:
        return failed(f"vLLM took model runner {version}, {wanted} was asked for", other, **figures)
    allowed = FACTOR * apart.po_fp32
    if not apart.mu_fp32 <= allowed:
        gap = f"log-probs are {apart.mu_fp32:.2e} from the learner's in fp32, rounding explains {allowed:.2e}"
        return failed(f"model runner {version}: {gap}", other, **figures)
    return passed(
        f"model runner {version} starts in {started:.0f} s; with its routes replayed, median |log mu - log po| is "
        f"{apart.mu_po:.1e}",
        **figures,
    )


# -- parts


def start_engine(recipe: Recipe, learner: Learner, *, sleeps: bool = True) -> Any:
    from megatron_rl.data import load_tokenizer
    from megatron_rl.run.engines import start_generator

    return start_generator(recipe, load_tokenizer(str(recipe.model.path)), learner, sleeps=sleeps)


def confirm(recipe: Recipe, learner: Learner, generator: Generator) -> None:
    """Raises `InputError` where an engine computes in another type than the recipe says."""
    from megatron_rl.config.model_rules import confirm_contract, contract

    stated = contract(recipe, learner.architecture)
    confirm_contract(stated, learner.describe_precision(), generator.describe_precision())


def generate(recipe: Recipe, learner: Learner, generator: Generator) -> Batch:
    """Sampled responses of the tiny task as one batch. Collective."""
    from megatron_rl.batch import build_batch
    from megatron_rl.data import load_tokenizer, load_train
    from megatron_rl.rollout.requests import everywhere

    prompts = list(load_train(recipe.data, load_tokenizer(str(recipe.model.path))))[:PROMPTS]
    groups = generator.rollout(prompts, SAMPLES, policy_version=learner.num_updates, step=0)
    return build_batch(
        0, everywhere(groups), recipe.batch, recipe.objective
    )  # few and short: every rank compares them all


def distances(batch: Batch, learner: Learner, reference: Learner) -> Distances:
    """Compare log-probs of a batch's tokens: the engine's, the learner's and those of ``reference``. Collective."""
    import numpy as np

    mu = np.concatenate([sequence.inference_logprobs for sequence in batch.sequences]).astype(np.float64)
    po = np.concatenate(learner.compute_logprobs(batch)).astype(np.float64)
    fp32 = np.concatenate(reference.compute_logprobs(batch)).astype(np.float64)
    return Distances(_median(mu, po), _median(mu, fp32), _median(po, fp32), float(np.exp(po - mu).std()))


def _median(a: np.ndarray, b: np.ndarray) -> float:
    import numpy as np

    return float(np.median(np.abs(a - b)))


# What a run relies on, by device and by whether the engine stores fp32. On a GPU, in fp32: kernels that follow
# TRITON_F32_DEFAULT. In 16 bits: those with which recorded routes, weight updates in place and sleep were read.
ATTENTION = {
    ("cpu", True): {"CPU_ATTN"},
    ("cpu", False): {"CPU_ATTN"},
    ("cuda", True): {"TRITON_ATTN"},
    ("cuda", False): {"FLASH_ATTN", "TRITON_ATTN"},
}
EXPERTS = {
    "cpu": {f"{kind}CPUUnquantizedExperts" for kind in ("", "X86", "Arm", "Power")},
    "cuda": {"TritonExperts"},
}
TENSOR_PARALLEL = 2  # the tiny model's heads


@dataclass(frozen=True)
class Facts:
    """What one rank saw. ``streams``: the current one before the engine started and beside it; empty on a CPU."""

    device: str
    dtype: str
    streams: tuple[str, ...]
    attention: str
    experts: str
    sums: str  # over the ranks of one engine; "": it has one rank
    left: int  # tensors of the engine that live on when it is closed
    tensors: int


def built(setting: Setting) -> Outcome:
    """Start one engine beside a learner, with CUDA graphs where there is a GPU, and close it. Collective."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.process.ranks import gather_objects
    from megatron_rl.rollout.process_state import sums_of_ranks

    recipe = built_recipe(setting)
    learner = Learner(recipe)
    streams = current_stream(setting.device)
    with closing(start_engine(recipe, learner)) as generator:
        generate(recipe, learner, generator)
        streams += current_stream(setting.device)
        kernels = generator.describe_precision()
        sums = sums_of_ranks() if recipe.rollout.tensor_parallel > 1 else ""
        (tensors,) = generator._llm.apply_model(stored)
    left = alive(tensors)
    attention, experts = (kernels[name].removeprefix("vLLM ") for name in ("attention", "activation"))
    own = Facts(setting.device, recipe.rollout.dtype, streams, attention, experts, sums, left, len(tensors))
    return judge_built(gather_objects(own))


def built_recipe(setting: Setting) -> Recipe:
    """The tiny recipe in the types of the recipe that the command named, else in bf16."""
    recipe = planned(setting)
    learner, rollout = (recipe.learner.dtype, recipe.rollout.dtype) if recipe else ("bf16", "bf16")
    size = TENSOR_PARALLEL if setting.ranks % TENSOR_PARALLEL == 0 else 1
    engine = (f"rollout.dtype={rollout}", f"rollout.tensor_parallel={size}", *_NO_TRIAL)
    return tiny(setting, *overrides({}, learner), *SMALL, *engine)


def current_stream(device: str) -> tuple[str, ...]:
    """Its name, "default" for the one on which no graph can be captured; nothing on a CPU."""
    if device == "cpu":
        return ()
    import torch

    from megatron_rl.process.devices import is_default

    return ("default" if is_default(torch.cuda) else str(torch.cuda.current_stream()),)


def stored(model: Any) -> list[weakref.ref]:
    """Parameters, buffers and caches of an engine's model."""
    caches = [cache for module in model.modules() for cache in _tensors(getattr(module, "kv_cache", None))]
    return [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers(), *caches)]


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def alive(tensors: Sequence[weakref.ref]) -> int:
    gc.collect()
    return sum(tensor() is not None for tensor in tensors)


def judge_built(ranks: list[Facts]) -> Outcome:
    """Fail at the first of the ranks' facts that a run cannot rely on."""
    first = ranks[0]
    figures = {"rank": {str(i): _row(facts) for i, facts in enumerate(ranks)}}
    for rank, facts in enumerate(ranks):
        if problem := _problem(facts) or _other(facts, first):
            return failed(f"rank {rank}: {problem[0]}", problem[1], **figures)
    skipped = "" if first.streams else "; streams are not looked at: a CPU has none"
    sums = (
        f"sums of an engine's ranks by {first.sums}" if first.sums else "one rank an engine, so no sums between ranks"
    )
    return passed(
        f"{first.dtype}: attention {first.attention}, experts {first.experts}, {sums}; all {first.tensors} tensors of "
        f"the closed engine are gone{skipped}",
        **figures,
    )


def _row(facts: Facts) -> dict[str, Any]:
    beside = " → ".join(facts.streams) or "none"
    return {"attention": facts.attention, "experts": facts.experts, "sums": facts.sums, "streams": beside} | {
        "tensors": facts.tensors,
        "left": facts.left,
    }


def _problem(facts: Facts) -> tuple[str, str] | None:
    """What is wrong on a rank, and its fix."""
    if "default" in facts.streams or len(set(facts.streams)) > 1:
        return (
            f"the current stream is {facts.streams[0]} before the engine and {facts.streams[-1]} beside it",
            "Both should have one stream, which is not CUDA's default one: gradients would wait for each other at "
            "every parameter. Look at `packages`; `process.devices.leave_default_stream` sets it.",
        )
    wanted = {
        "attention": (facts.attention, ATTENTION[facts.device, facts.dtype in ("fp32", "tf32")]),
        "experts": (facts.experts, EXPERTS[facts.device]),
    }
    for name, (chosen, relied_on) in wanted.items():
        if chosen not in relied_on:
            return (
                f"vLLM took {chosen} for {name} in {facts.dtype}; a run relies on {' or '.join(sorted(relied_on))}",
                "On this kind of GPU, or with this vLLM, nobody has read whether routes, updates of weights and fp32 "
                "hold: see `packages`, unset variables of VLLM_ and FLASHINFER_, and report it.",
            )
    if facts.left:
        return (
            f"{facts.left} of {facts.tensors} tensors live on after the engine was closed",
            "A second engine does not start in this process then, and the learner lacks the memory. See `packages`, "
            "and report it with the log.",
        )
    return None


def _other(facts: Facts, first: Facts) -> tuple[str, str] | None:
    own, others = ((f.attention, f.experts, f.sums) for f in (facts, first))
    if own == others:
        return None
    return (
        f"kernels are {', '.join(own)}, on rank 0 {', '.join(others)}",
        "Ranks that add with different kernels wait for each other for ever. Ranks differ in their environment, or in "
        "the GPUs that they see: see `binding`.",
    )


GIB = 1 << 30
UTILIZATION = 0.5
# Phase measured → phase of the plan, and the items of the plan that are not there.
PHASES = {
    "engine awake": ("generating", ()),
    "engine asleep": ("learning", ("activations and temporaries", "allocator's overhead")),
    "forward and backward, optimizer": ("learning", ()),
    "refit": ("handing over the weights", ()),
    "save": ("generating", ()),  # it has the room that the cache takes with the next request
}


class GpuMeter:
    """Bytes in use on this rank's GPU: of all that the process and its engine hold, and the peak of a phase."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.capacity = torch.cuda.mem_get_info()[1]

    def now(self) -> float:
        free, total = self._cuda.mem_get_info()
        return total - free

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats()
        self._reserved = self._cuda.memory_reserved()
        self._used = self.now()

    def peak(self) -> float:
        """Since `begin`: what PyTorch took at most on top of what was in use. An engine's memory is in what is used."""
        return max(self.now(), self._used + self._cuda.max_memory_reserved() - self._reserved)


def memory(setting: Setting) -> Outcome:
    """One step as `train` makes it, and a save beside the engine that has its weights and no cache yet."""
    from megatron_rl.learner.process_groups import resolve_device

    resolve_device(setting.device)
    recipe = tiny(
        setting, *overrides({}, "bf16"), "rollout.dtype=bf16", f"rollout.gpu_memory_utilization={UTILIZATION}"
    )
    meter = GpuMeter()
    return judge_memory(measure(recipe, meter, Path(setting.scratch)), predict(recipe, meter.capacity))


def measure(recipe: Recipe, meter: Any, folder: Path) -> dict[str, float]:
    """Bytes in use by phase: peaks, but for the two states of the engine."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.run.engines import hand_over

    bytes_used = {}
    learner = Learner(recipe)
    with closing(start_engine(recipe, learner)) as generator:
        generate(recipe, learner, generator)
        bytes_used["engine awake"] = meter.now()
        generator.sleep()
        bytes_used["engine asleep"] = meter.now()
        meter.begin()
        learner.update(made_up_batch(0))
        bytes_used["forward and backward, optimizer"] = meter.peak()
        meter.begin()
        hand_over(learner, generator)
        bytes_used["refit"] = meter.peak()
        meter.begin()
        learner.save(folder, {})
        bytes_used["save"] = meter.peak()
    return bytes_used


def predict(recipe: Recipe, capacity: float) -> dict[str, float]:
    """Bytes by phase that `plan` expects on one GPU of this size."""
    from megatron_rl.instruments.plan import GPUS, make_workload
    from megatron_rl.instruments.plan.memory import memory_plan
    from megatron_rl.model.architecture import read_architecture

    gpu = replace(GPUS["h100-80"], memory_gib=capacity / GIB)  # of its figures, memory alone is used here
    plan = memory_plan(make_workload(recipe, read_architecture(recipe.model.path), gpu, 1, 1))
    return {name: _planned(plan, phase, absent) for name, (phase, absent) in PHASES.items()}


def _planned(plan: MemoryPlan, phase: str, absent: tuple[str, ...]) -> float:
    (items,) = [one.items for one in plan.phases if one.name == phase]
    return sum(size for what, size in items if what not in absent)


def judge_memory(measured: dict[str, float], planned: dict[str, float]) -> Outcome:
    """No phase takes more than the plan says: a run that fits by the plan then fits."""
    table = {
        name: {"measured GiB": round(size / GIB, 2), "plan GiB": round(planned[name] / GIB, 2)}
        for name, size in measured.items()
    }
    if over := [name for name in measured if measured[name] > planned[name]]:
        excess = "; ".join(f"{name} {measured[name] / GIB:.2f} of {planned[name] / GIB:.2f} GiB" for name in over)
        return failed(
            f"more than `plan` expects: {excess}",
            "See whether gpu-memory passed: others' memory counts, too. If it did, leave so much more free than the "
            "plan says (rollout.gpu_memory_utilization), and report it: a constant of instruments/plan/hardware.py is "
            "too small.",
            memory=table,
        )
    worst = max(measured, key=lambda name: measured[name] / planned[name])
    return passed(
        f"every phase takes at most what `plan` expects; nearest: {worst}, {measured[worst] / planned[worst]:.0%}",
        memory=table,
    )
