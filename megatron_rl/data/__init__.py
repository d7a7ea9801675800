"""Problems to prompts: files, tokenizer and chat template, and the order in which prompts come."""

from megatron_rl.data.prompts import (
    PromptSet,
    check_vocabulary,
    fingerprint,
    load_prompts,
    load_tokenizer,
    load_train,
    load_validation,
)
from megatron_rl.data.sampler import PromptSampler
from megatron_rl.data.source import check_source, read_problems

__all__ = [
    "PromptSampler",
    "PromptSet",
    "check_source",
    "check_vocabulary",
    "fingerprint",
    "load_prompts",
    "load_tokenizer",
    "load_train",
    "load_validation",
    "read_problems",
]
