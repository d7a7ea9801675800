"""vLLM's book-keeping for each token and request on a CPU, without work whose outcome is known beforehand.

A decoding step of a small model spends as much time in Python as in kernels: vLLM 0.30 goes through every running
request several times, with code for drafts, encoders, sliding windows and several caches. On a CPU nothing else runs
meanwhile. Two functions get a short way for the common case; every other case calls vLLM's own:

* *A slot for the next token.* Where a request's last block has room, no block is allocated, freed or put into the
  prefix cache. vLLM finds that out through eight functions.
* *The log-prob of one sampled token* is appended to flat lists. vLLM walks over all positions and candidates with
  iterators made for them.
"""

from __future__ import annotations

from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

_allocate_slots = KVCacheManager.allocate_slots  # vLLM's
_update_sample_logprobs = LogprobsProcessor._update_sample_logprobs


def install() -> None:
    """Put this into vLLM's scheduler and its processing of outputs, if they are in this process."""
    KVCacheManager.allocate_slots = allocate_slots
    LogprobsProcessor._update_sample_logprobs = update_sample_logprobs


def allocate_slots(
    self: KVCacheManager, request: Request, num_new_tokens: int, *positional: Any, **options: Any
) -> KVCacheBlocks | None:
    """Blocks that a request needs for ``num_new_tokens`` more tokens; None where there are not enough.

    The short way is for one token that has room in an existing block and does not complete it, because complete blocks
    go into the prefix cache. There must be no drafts and no blocks from elsewhere, and the model must have one kind of
    cache whose blocks are all kept.
    """
    if num_new_tokens == 1 and not positional and not any(options.values()):
        managers = self.coordinator.single_type_managers
        if len(managers) == 1 and type(manager := managers[0]) is FullAttentionManager:
            size, num_tokens = manager.block_size, request.num_computed_tokens + 1
            blocks = manager.req_to_blocks.get(request.request_id, ())
            if num_tokens % size and len(blocks) * size >= num_tokens:
                return self.empty_kv_cache_blocks
    return _allocate_slots(self, request, num_new_tokens, *positional, **options)


def update_sample_logprobs(self: LogprobsProcessor, new: LogprobsLists) -> None:
    """Append the log-probs ``new`` of a step to the request's. The short way: one position, the sampled token alone."""
    tokens, logprobs, ranks, _ = new
    kept = self.logprobs
    if tokens.shape != (1, 1) or type(kept) is not FlatLogprobs or self.tokenizer is not None:
        return _update_sample_logprobs(self, new)
    logprob, position = logprobs.item(), len(kept.logprobs)
    self.cumulative_logprob += logprob
    kept.start_indices.append(position)
    kept.end_indices.append(position + 1)
    kept.token_ids.append(tokens.item())
    kept.logprobs.append(logprob)
    kept.ranks.append(ranks.item())
    kept.decoded_tokens.append(None)
