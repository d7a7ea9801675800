"""Both engines on the tiny model: one as a run starts it, mismatch by type, weight updates, a GPU's memory by phase."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.checks import Outcome, Setting, failed, passed, planned, tiny
from megatron_rl.doctor.learner import layout, made_up_batch, overrides

if TYPE_CHECKING:
    import numpy as np

    from megatron_rl.config import Recipe
    from megatron_rl.instruments.parity.compare import Comparison
    from megatron_rl.instruments.parity.witnesses import Setup
    from megatron_rl.learner.learner import Learner
    from megatron_rl.rollout import Generator
    from megatron_rl.types import Batch


PROMPTS, SAMPLES = 16, 4
# How much further than the learner the engine may be from fp32: both round the same function in one type, in other
# orders and at other places. Wrong weights, positions or masks are off by whole log-probs.
FACTOR = 8.0
REFIT_FACTOR = 10.0  # nearer to the new weights than to the old ones, in fp32
FEW_GRAPHS = "rollout.max_num_seqs=16"  # of seven sizes, where vLLM takes 51 by itself
SMALL = ("rollout.gpu_memory_utilization=0.3", "rollout.kv_cache_gib=0.25", FEW_GRAPHS)
# In bf16 the check `engine` compares. Each is an engine of its own.
PAIRS = {"bf16/bf16, fp32 head": "bf16", "fp16/fp16": "fp16", "fp32/fp32": "fp32"}


@dataclass(frozen=True)
class Distances:
    """Medians over tokens of the absolute difference of log-probs; ``mu``, ``po``: of rollout engine and learner."""

    mu_po: float
    mu_fp32: float  # to the learner in fp32
    po_fp32: float
    rho_std: float


def mismatch(setting: Setting) -> Outcome:
    """Learner and engine in the same type, in bf16 both with the head in fp32."""
    from megatron_rl.learner.learner import Learner

    eager = "rollout.enforce_eager=true"  # CUDA graphs are the check `engine`
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
_REPLAYED = "routing.replay=r3"


def judge_mismatch(by_pair: dict[str, Distances]) -> Outcome:
    """Each engine is as near to fp32 as rounding in its type allows: the learner in that type is the measure.

    In fp32 there is nothing nearer to measure with; an engine whose products are those of TF32 rounds as fp16 does.
    """
    figures = {"log-probs": {name: asdict(distance) for name, distance in by_pair.items()}}
    for name, distance in by_pair.items():
        allowed = by_pair["fp16/fp16"].po_fp32 if name == "fp32/fp32" else FACTOR * distance.po_fp32
        if not distance.mu_fp32 <= allowed:
            return failed(f"{name}: {_too_far(distance.mu_fp32, allowed)}", WRONG_LOGPROBS, **figures)
    medians = ", ".join(f"{name} {distance.mu_po:.1e}" for name, distance in by_pair.items())
    return passed(f"median |log mu - log po|: {medians}", **figures)


WRONG_LOGPROBS = (
    "Look at `packages` and `refit` first, then at `megatron-rl paper mismatch` with more prompts. vLLM has other "
    "attention backends (`vllm serve --attention-backend NAME`), and two model runners (VLLM_USE_V2_MODEL_RUNNER=0, 1)."
)


def _too_far(distance: float, allowed: float) -> str:
    return f"the engine's log-probs are {distance:.2e} from the learner's in fp32, rounding explains {allowed:.2e}"


def parity(setting: Setting) -> Outcome:
    """Every operator of both engines, of exact mode and of transformers, in bf16, against the checkpoint.

    With a recipe, in its types those of its model's first layers at full width, too.
    """
    from megatron_rl.instruments.parity.witnesses import of_recipe

    recipe = tiny(setting, *overrides({}, "bf16"), *SMALL, "rollout.dtype=bf16")
    outcome = judge_parity("the tiny model", compared(of_recipe(recipe)))
    if outcome.status == "fail" or (recipe := planned(setting)) is None:
        return outcome
    which, setup = first_layers(recipe, setting)
    if setup is None:
        return passed(f"{outcome.reason}; {which}", **outcome.figures)
    more = judge_parity(which, compared(setup))
    return more if more.status == "fail" else passed(f"{outcome.reason}; {more.reason}", **more.figures)


def compared(setup: Setup) -> Comparison:
    """Compare the witnesses of ``setup``."""
    from megatron_rl.instruments.parity.compare import compare
    from megatron_rl.instruments.parity.definition import Checkpoint
    from megatron_rl.instruments.parity.witnesses import collect

    return compare(Checkpoint(setup.model), collect(setup))


def first_layers(recipe: Recipe, setting: Setting) -> tuple[str, Setup | None]:
    """Which layers of the recipe's model to compare, and their setup; or why there are none, and None."""
    from megatron_rl.instruments.parity import witnesses
    from megatron_rl.instruments.parity.families import FAMILIES
    from megatron_rl.model.architecture import read_architecture
    from megatron_rl.process.host import available_gib

    path = recipe.model.path
    if not path.exists():
        return f"{path} is not here, so its layers were not looked at", None
    setup, a = witnesses.of_types(recipe, setting.device), read_architecture(path)
    if a.model_type not in FAMILIES:
        return f"{path} was not looked at: parity has no definition of {a.model_type}", None
    least, free = witnesses.fewest_layers(a), available_gib()
    if not (number := witnesses.layers_that_fit(setup, a, free, max(2, least))):
        needed = witnesses.host_gib(setup, witnesses.first_layers_of(a, least))
        what = f"the first layers of {path} take {needed:.0f} GiB of host memory and {free:.0f} are free"
        return f"{what}, so they were not looked at", None
    return f"the first {number} layers of {path}", witnesses.of_first_layers(setup, number, Path(setting.scratch))


def judge_parity(which: str, comparison: Comparison) -> Outcome:
    """Fails where an operator is beyond its bound, and names the first."""
    worst = {name: max(e.ratio for e in comparison.errors if e.witness == name) for name in comparison.witnesses}
    figures = {"error over bound": {name: min(ratio, 1e30) for name, ratio in worst.items()}}
    if not comparison.passes:
        return failed(
            ": ".join([which, comparison.verdict(), *(error.sentence() for error in comparison.first[:1])]),
            "Use the pinned versions (`packages`, `patches`). `megatron-rl parity MODEL --layers N --out DIR` writes "
            "all operators and a picture; docs/parity.md explains them.",
            **figures,
        )
    number = len(comparison.errors)
    return passed(f"{which}: {number} operators of {len(worst)} witnesses are within their bounds", **figures)


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
    runner: str  # which of vLLM's model runners the engine has
    attention: str
    experts: str
    sums: str  # over the ranks of one engine; "": it has one rank
    apart: Distances | None = None  # None: in fp32, which is the check `mismatch`

    def kernels(self) -> str:
        parts = (self.runner, self.attention, self.experts, self.sums)
        return ", ".join(filter(None, parts))


def built(setting: Setting) -> Outcome:
    """Start one engine beside a learner, with CUDA graphs where there is a GPU, replay its routes. Collective."""
    from megatron_rl.learner.learner import Learner
    from megatron_rl.process.ranks import gather_objects
    from megatron_rl.rollout.process_state import sums_of_ranks

    recipe, apart = built_recipe(setting), None
    learner = Learner(recipe)
    streams = current_stream(setting.device)
    with closing(start_engine(recipe, learner)) as generator:
        batch = generate(recipe, learner, generator)
        streams += current_stream(setting.device)
        kernels = generator.describe_precision()
        sums = sums_of_ranks() if recipe.rollout.tensor_parallel > 1 else ""
        runner = f"runner {2 if generator._llm.llm_engine.vllm_config.use_v2_model_runner else 1}"
    if recipe.learner.dtype == recipe.rollout.dtype and recipe.learner.dtype in ("bf16", "fp16"):
        apart = distances(batch, learner, Learner(tiny(setting, *overrides({}, "fp32"), _REPLAYED)))
    attention, experts = (kernels[name].removeprefix("vLLM ") for name in ("attention", "activation"))
    facts = (recipe.rollout.dtype, streams, runner, attention, experts, sums, apart)
    return judge_built(gather_objects(Facts(setting.device, *facts)))


def built_recipe(setting: Setting) -> Recipe:
    """The tiny recipe in the types of the recipe that the command named, else in bf16."""
    recipe = planned(setting)
    learner, rollout = (recipe.learner.dtype, recipe.rollout.dtype) if recipe else ("bf16", "bf16")
    size = TENSOR_PARALLEL if setting.ranks % TENSOR_PARALLEL == 0 else 1
    engine = (f"rollout.dtype={rollout}", f"rollout.tensor_parallel={size}", *_NO_TRIAL, _REPLAYED)
    return tiny(setting, *overrides({}, learner), *SMALL, *engine)


def current_stream(device: str) -> tuple[str, ...]:
    """Its name, "default" for the one on which no graph can be captured; nothing on a CPU."""
    if device == "cpu":
        return ()
    import torch

    from megatron_rl.process.devices import is_default

    return ("default" if is_default(torch.cuda) else str(torch.cuda.current_stream()),)


def judge_built(ranks: list[Facts]) -> Outcome:
    """Fail at the first of the ranks' facts that a run cannot rely on."""
    first = ranks[0]
    figures = {"rank": {str(i): asdict(facts) for i, facts in enumerate(ranks)}}
    for rank, facts in enumerate(ranks):
        if problem := _problem(facts) or _other(facts, first):
            return failed(f"rank {rank}: {problem[0]}", problem[1], **figures)
    apart = f"; median |log mu - log po| {first.apart.mu_po:.1e}" if first.apart else ""
    return passed(f"{first.dtype}: {first.kernels()}{apart}", **figures)


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
    if (apart := facts.apart) and not apart.mu_fp32 <= FACTOR * apart.po_fp32:
        return f"{facts.runner}: {_too_far(apart.mu_fp32, FACTOR * apart.po_fp32)}", WRONG_LOGPROBS
    return None


def _other(facts: Facts, first: Facts) -> tuple[str, str] | None:
    if facts.kernels() == first.kernels():
        return None
    return (
        f"kernels are {facts.kernels()}, on rank 0 {first.kernels()}",
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
        setting,
        *overrides({}, "bf16"),
        "rollout.dtype=bf16",
        f"rollout.gpu_memory_utilization={UTILIZATION}",
        FEW_GRAPHS,
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
    items = {phase.name: phase.items for phase in plan.phases}
    return {
        name: sum(size for what, size in items[phase] if what not in absent) for name, (phase, absent) in PHASES.items()
    }


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
