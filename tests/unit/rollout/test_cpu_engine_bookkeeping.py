"""vLLM's book-keeping on a CPU: the short ways end where vLLM's own do, and are taken only where they may be."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from megatron_rl.rollout import cpu_engine

BLOCK = 16
VLLM_ALLOCATE = cpu_engine._allocate_slots
CONTEXT = 200


def manager(num_blocks: int, caching: bool = False, window: int | None = None) -> KVCacheManager:
    sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    spec = FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    return KVCacheManager(
        config, CONTEXT, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=caching, watermark=0.0
    )


def request(name: str, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=CONTEXT)
    return Request(name, list(prompt), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def history(allocate, kv: KVCacheManager, prompts: list[list[int]], steps: int) -> list:
    """Decode ``prompts`` token by token as the scheduler does; the latest is preempted where there are no blocks, and
    begins again. Everything that can be seen of the cache after each allocation."""
    draw = random.Random(0)
    requests = [request(str(i), prompt) for i, prompt in enumerate(prompts)]
    waiting, running, seen = list(requests), [], []
    for _ in range(steps):
        for r in list(running):
            if r not in running:
                continue  # preempted in this step
            while (blocks := allocate(kv, r, 1, num_lookahead_tokens=0)) is None:
                preempted = running.pop()
                kv.free(preempted)
                preempted.num_computed_tokens = 0
                waiting.insert(0, preempted)
                seen.append(("preempted", preempted.request_id))
                if preempted is r:
                    break
            if blocks is not None:
                r.num_computed_tokens += 1
                r.append_output_token_ids(draw.randrange(5))
                cached = dict(kv.coordinator.single_type_managers[0].num_cached_block)
                seen.append((blocks.get_block_ids(allow_none=True), kv.get_block_ids(r.request_id), cached))
        if waiting:
            r = waiting[0]
            cached, num_cached = kv.get_computed_blocks(r)[:2]
            new = r.num_tokens - num_cached
            blocks = allocate(kv, r, new, num_cached, cached, num_lookahead_tokens=0, has_scheduled_reqs=bool(running))
            seen.append((r.request_id, num_cached, blocks and blocks.get_block_ids()))
            if blocks is not None:
                running.append(waiting.pop(0))
                r.num_computed_tokens = r.num_tokens
                r.append_output_token_ids(draw.randrange(5))
        seen.append(kv.block_pool.get_num_free_blocks())
    return seen


@pytest.mark.parametrize("caching", [False, True], ids=["no prefix cache", "prefix cache"])
@pytest.mark.parametrize("window", [None, 24], ids=["full", "sliding window"])
@pytest.mark.parametrize("num_blocks", [12, 60], ids=["preempting", "room for all"])
def test_every_block_is_where_vllm_puts_it(caching, window, num_blocks, monkeypatch):
    init_none_hash(sha256)
    prompts = [[1] * n for n in (1, 15, 16, 17, 40)] + [[1] * 40]
    expected = history(VLLM_ALLOCATE, manager(num_blocks, caching, window), prompts, 120)
    calls = Counter()

    def counted(function, name):
        return lambda *args, **options: (calls.update([name]), function(*args, **options))[1]

    monkeypatch.setattr(cpu_engine, "_allocate_slots", counted(VLLM_ALLOCATE, "vLLM's"))
    ours = counted(cpu_engine.allocate_slots, "all")
    own_history = history(ours, manager(num_blocks, caching, window), prompts, 120)
    assert own_history == expected
    assert any(entry[0] == "preempted" for entry in own_history if isinstance(entry, tuple)) == (num_blocks == 12)
    if window:
        assert calls["vLLM's"] == calls["all"] > 400
    else:
        assert calls["vLLM's"] < 0.5 * calls["all"]  # each waiting request asks in every step


def test_drafts_blocks_from_elsewhere_and_several_tokens_go_vllms_way(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_engine, "_allocate_slots", lambda *args, **options: calls.append((args[2:], options)))
    kv, r = manager(60), request("r", [1] * 20)
    VLLM_ALLOCATE(kv, r, 20)
    r.num_computed_tokens = 20
    assert cpu_engine.allocate_slots(kv, r, 1, num_lookahead_tokens=0) is kv.empty_kv_cache_blocks
    assert not calls
    others = [{"num_lookahead_tokens": 1}, {"num_external_computed_tokens": 1}, {"full_sequence_must_fit": True}]
    others += [{"delay_cache_blocks": True}, {"num_encoder_tokens": 1}, {"reserved_blocks": 1}]
    for options in others:
        cpu_engine.allocate_slots(kv, r, 1, **options)
    cpu_engine.allocate_slots(kv, r, 2)
    cpu_engine.allocate_slots(kv, r, 1, 16)
    assert calls == [((1,), options) for options in others] + [((2,), {}), ((1, 16), {})]


def processor(flat: bool = True, num_logprobs: int = 0) -> LogprobsProcessor:
    kept = FlatLogprobs() if flat else []
    return LogprobsProcessor(None, kept, None, 0.0, num_logprobs, None)


def one_step(positions: int, candidates: int, seed: int) -> LogprobsLists:
    r = np.random.default_rng(seed)
    logprobs = -r.exponential(size=(positions, candidates)).astype(np.float32)
    return LogprobsLists(r.integers(0, 99, logprobs.shape, np.int32), logprobs, r.integers(0, 9, positions))


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "dictionaries"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3)], ids=["one token", "two positions", "other candidates"])
def test_logprobs_are_what_vllm_keeps(flat, shape):
    ours, theirs = processor(flat, shape[1] - 1), processor(flat, shape[1] - 1)
    for seed in range(20):
        cpu_engine.update_sample_logprobs(ours, one_step(*shape, seed))
        cpu_engine._update_sample_logprobs(theirs, one_step(*shape, seed))
    assert ours == theirs
    if flat:
        types = [
            {type(x) for x in vars(kept.logprobs)[name]} for kept in (ours, theirs) for name in vars(kept.logprobs)
        ]
        assert types[: len(types) // 2] == types[len(types) // 2 :]  # Python numbers: numpy's would be sent differently


def test_both_are_in_vllm_once_the_worker_extension_is_imported():
    import megatron_rl.rollout.worker_extension  # noqa: F401

    assert KVCacheManager.allocate_slots is cpu_engine.allocate_slots
    assert LogprobsProcessor._update_sample_logprobs is cpu_engine.update_sample_logprobs
    assert cpu_engine._allocate_slots is not cpu_engine.allocate_slots
