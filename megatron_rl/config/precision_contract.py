"""The precision contract: what learner and rollout engine compute in which type, and which differences are legal.

pi and mu are one policy computed twice. A difference in rounding (dtype, kernel) is mismatch, which is measured and
corrected for. A difference in the function (head or router in fp32 on one side, temperature, truncation of the
vocabulary) makes mu another policy, and is refused unless `precision.allow_asymmetric` says that it is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.checkpoint.architecture import Architecture
from megatron_rl.config import Recipe
from megatron_rl.errors import InputError

_BY_DEVICE = "by device"  # `confirm_contract` fills it in when the engines run


@dataclass(frozen=True)
class ContractRow:
    """One aspect, on both sides. ``verdict``: same | rounding | policy (another function)."""

    aspect: str
    learner: str
    rollout: str
    verdict: str

    def __str__(self) -> str:
        return f"learner {self.learner} · rollout {self.rollout} · {self.verdict}"


def contract(recipe: Recipe, architecture: Architecture) -> list[ContractRow]:
    """The contract as the recipe states it; no engine needed."""
    precision, rollout = recipe.precision, recipe.rollout
    learner_dtype, rollout_dtype = recipe.learner.dtype, rollout.dtype

    def fp32_where(asked_learner: bool, asked_rollout: bool, aspect: str) -> ContractRow:
        left, right = "fp32" if asked_learner else learner_dtype, "fp32" if asked_rollout else rollout_dtype
        if asked_learner != asked_rollout and left != right:
            return ContractRow(aspect, left, right, "policy")
        return ContractRow(aspect, left, right, "same" if left == right else "rounding")

    rows = [
        ContractRow("dtype", learner_dtype, rollout_dtype, "same" if learner_dtype == rollout_dtype else "rounding"),
        fp32_where(precision.fp32_head, precision.rollout_head, "head"),
    ]
    if architecture.is_moe:
        rows.append(fp32_where(precision.fp32_router, precision.rollout_router, "router"))
    if rollout.quantization.weights is not None:
        rows.append(ContractRow("weights", learner_dtype, rollout.quantization.words, "rounding"))
    if rollout.quantization.kv_cache is not None:
        rows.append(ContractRow("kv cache", learner_dtype, rollout.quantization.kv_cache, "rounding"))
    rows += [
        ContractRow("attention", _BY_DEVICE, _BY_DEVICE, "rounding"),
        ContractRow("rope", "Megatron, unfused", _BY_DEVICE, "rounding"),
        ContractRow("activation", "Megatron, unfused", _BY_DEVICE, "rounding"),
        # The learner divides its logits by the rollout section's temperature: there is no second key to disagree.
        ContractRow("temperature", f"{rollout.temperature:g}", f"{rollout.temperature:g}", "same"),
        ContractRow("log-probs", "after temperature", "after temperature", "same"),
        ContractRow("top-p", "1", f"{rollout.top_p:g}", "same" if rollout.top_p == 1 else "policy"),
        ContractRow("top-k", "off", str(rollout.top_k or "off"), "same" if not rollout.top_k else "policy"),
    ]
    return rows


def confirm_contract(stated: list[ContractRow], learner: dict[str, str], rollout: dict[str, str]) -> list[ContractRow]:
    """The contract as the started engines keep it.

    Args:
        stated: from `contract`.
        learner, rollout: aspect → what the engine does, from `Learner.describe_precision` and the generator.

    Raises:
        InputError: an engine does something else than the recipe states where that changes the policy or the dtype.
    """
    rows, broken = [], []
    for row in stated:
        found = {"learner": learner.get(row.aspect, row.learner), "rollout": rollout.get(row.aspect, row.rollout)}
        for side, value in found.items():
            promised = getattr(row, side)
            if value != promised and row.aspect not in ("attention", "rope", "activation"):
                broken.append(f"{row.aspect}: the {side} engine uses {value}, the recipe says {promised}")
        rows.append(ContractRow(row.aspect, found["learner"], found["rollout"], row.verdict))
    if broken:
        raise InputError("precision contract: " + "; ".join(broken))
    return rows
