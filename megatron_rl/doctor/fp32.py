"""Whether fp32 is fp32: a product of matrices whose exact value TF32 cannot give, in every library that multiplies."""

from __future__ import annotations

from megatron_rl.doctor.outcome import Outcome, failed, passed
from megatron_rl.doctor.setting import Setting


def products(setting: Setting) -> Outcome:
    """Every library that multiplies fp32 matrices for a run does so in full."""
    return judge_products(found_products(setting))


def found_products(setting: Setting) -> dict[str, str]:
    """Library → "fp32", "tf32" or "less than tf32", as `process.fp32_products` measures it on this process's device."""
    from megatron_rl.learner.model import use_transformer_engine
    from megatron_rl.learner.process_groups import resolve_device
    from megatron_rl.process.fp32_products import measured_products

    device = resolve_device(setting.device)
    return measured_products(device, transformer_engine=use_transformer_engine(device), triton=device.type == "cuda")


def judge_products(found: dict[str, str]) -> Outcome:
    """``found``: library → what it does to fp32 matrices."""
    wrong = {name: value for name, value in found.items() if value != "fp32"}
    if not wrong:
        return passed(f"{', '.join(found)}: products of fp32 matrices have the exact value, which TF32 has not")
    told = ", ".join(f"{name} ({value})" for name, value in wrong.items())
    return failed(
        f"products of fp32 matrices are not those of fp32: {told}. What a recipe calls fp32 would be TF32",
        "megatron-rl sets NVIDIA_TF32_OVERRIDE=0 for cuBLAS and TransformerEngine, and TRITON_F32_DEFAULT=ieee for "
        "Triton, before either reads it. Look for what changes them later (a sitecustomize.py, a wrapper of python), "
        "and at `packages`: another version may read other variables. Meanwhile say tf32 in recipes, not fp32.",
        products=found,
    )
