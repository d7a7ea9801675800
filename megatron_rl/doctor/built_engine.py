"""One engine as a run starts it: the stream that is current beside it, its kernels, what is left when it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.doctor.engine import _NO_TRIAL, SMALL, generate, start_engine
from megatron_rl.doctor.learner import overrides
from megatron_rl.doctor.outcome import Outcome, failed, passed
from megatron_rl.doctor.setting import Setting, planned, tiny

if TYPE_CHECKING:
    from megatron_rl.config import Recipe

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
    """Of every rank's facts: the first thing that a run cannot rely on."""
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
    for name, (found, relied_on) in wanted.items():
        if found not in relied_on:
            return (
                f"vLLM took {found} for {name} in {facts.dtype}; a run relies on {' or '.join(sorted(relied_on))}",
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
