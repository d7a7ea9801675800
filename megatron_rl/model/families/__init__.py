"""The families of models that can be trained, a file each. A family is added by a file and a line here. No torch."""

from __future__ import annotations

from megatron_rl.model.families import llama, qwen2, qwen3, qwen3_moe
from megatron_rl.model.families.form import Family

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (qwen3_moe, qwen3, qwen2, llama)}
