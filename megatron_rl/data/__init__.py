"""From problems to prompts: files, tokenizer, chat template, and the order of prompts."""

from megatron_rl.data.prompts import (
    check_vocabulary,
    fingerprint,
    load_prompts,
    load_tokenizer,
    load_train,
    load_validation,
    prompts_digest,
)
from megatron_rl.data.sampler import MixedSampler, PromptSampler, in_another_order, make_sampler
from megatron_rl.data.source import check_source, read_problems
from megatron_rl.data.table import PromptSet

__all__ = [
    "MixedSampler",
    "PromptSampler",
    "PromptSet",
    "check_source",
    "check_vocabulary",
    "fingerprint",
    "in_another_order",
    "load_prompts",
    "load_tokenizer",
    "load_train",
    "load_validation",
    "make_sampler",
    "prompts_digest",
    "read_problems",
]
