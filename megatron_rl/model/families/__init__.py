"""The families of models that can be trained, a file each. A family is added by a file and a line here. No torch."""

from __future__ import annotations

from megatron_rl.model.families import (
    bailing_moe,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from megatron_rl.model.families.form import Family

_FILES = (
    qwen3_moe,
    qwen3_next,
    qwen3_5_moe,
    qwen2_moe,
    glm4_moe,
    deepseek_v3,
    bailing_moe,
    olmoe,
    gpt_oss,
    qwen3,
    qwen2,
    llama,
)
FAMILIES: dict[str, Family] = {file.FAMILY.model_type: file.FAMILY for file in _FILES}
