"""Routes through vLLM's scheduler as CUDA has it: asynchronous scheduling, preemption, shared prefixes, both runners.

A CPU has neither asynchronous scheduling nor the second model runner. Here vLLM's own scheduler is driven with both by
a runner without a model: a token, and the experts it is routed to, are functions of all tokens up to it. A lost,
repeated or misplaced row therefore shows. Up to 0.30 the scheduler keeps the rows, from 0.31 on a worker's store.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.rollout import route_store
from megatron_rl.rollout.process_state import contained
from tests.support.tiny import MODEL

LAYERS, TOP_K, BLOCK = 4, 2, 4


def draw(tokens: list[int]) -> bytes:
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).digest()


def next_token(tokens: list[int]) -> int:
    return 3 + draw(tokens)[0] % 90


def row(tokens: list[int]) -> np.ndarray:
    """[LAYERS, TOP_K] routes of the last of ``tokens``."""
    return np.frombuffer(draw(tokens), dtype=np.uint8)[1 : 1 + LAYERS * TOP_K].reshape(LAYERS, TOP_K) % 8


class Store:
    """vLLM's store of routes, with rows from the runner instead of from a model's routers."""

    def __init__(self, config: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.aux_output_connector import worker

        shape = SimpleNamespace(shape_per_token=(LAYERS, TOP_K), output_dtype_name="uint8")
        shape.snapshot_routing_data = lambda num_rows: torch.from_numpy(self.rows)
        monkeypatch.setattr(worker, "RoutedExpertsCapturer", lambda **_: shape)
        monkeypatch.setattr(worker, "bind_routed_experts_capturer", lambda model, capturer: None)
        monkeypatch.setattr(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
        self.connector = worker.AuxOutputWorkerConnector(vllm_config=config, model=None, kv_cache_config=cache)
        self.rows = np.empty((0, LAYERS, TOP_K), np.uint8)

    def begin(self, scheduled: Any) -> None:
        self.connector.begin_step(scheduled.aux_output_connector_metadata)

    def step(
        self, names: list[str], starts: list[int], counts: list[int], rows: list[np.ndarray], num: list[int]
    ) -> Any:
        self.rows = np.stack(rows)
        batch = SimpleNamespace(
            req_ids=names, num_computed_tokens_np=np.asarray(starts), query_start_loc_np=np.cumsum([0, *counts])
        )
        pending = self.connector.prepare_output(batch)
        pending.enqueue_cpu_copy(np.asarray(num), np.zeros(len(num), int))
        return pending


class Runner:
    """Computes a step of the scheduler; keeps what vLLM's model runners keep of a request."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.resumed = self.shared = 0

    def execute(self, scheduled: Any) -> tuple[Any, Any]:
        """The output of a step, and what the store has still to hand over of it."""
        from vllm.v1.outputs import ModelRunnerOutput

        if self.store is not None:
            self.store.begin(scheduled)
        computed = {}
        for new in scheduled.scheduled_new_reqs:
            self.resumed += new.req_id in self.tokens
            self.shared += new.num_computed_tokens if new.req_id not in self.tokens else 0
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.blocks[new.req_id], computed[new.req_id] = list(new.block_ids[0]), new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            new_blocks = list(cached.new_block_ids[i][0]) if cached.new_block_ids[i] else []
            if name in cached.resumed_req_ids:
                self.resumed += 1
                self.blocks[name], self.tokens[name] = new_blocks, list(cached.all_token_ids[name])
            else:
                self.blocks[name] += new_blocks
            computed[name] = cached.num_computed_tokens[i]
        rows, slots, sampled = [], [], []
        for name, start in computed.items():
            tokens, end = self.tokens[name], start + scheduled.num_scheduled_tokens[name]
            assert end <= len(tokens), f"{name}: scheduled up to token {end} of {len(tokens)}"
            rows += [row(tokens[: i + 1]) for i in range(start, end)]
            slots += [self.blocks[name][i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
            sampled.append([next_token(tokens)] if end == len(tokens) else [])
            tokens += sampled[-1]
        output = ModelRunnerOutput(
            req_ids=list(computed),
            req_id_to_index={name: i for i, name in enumerate(computed)},
            sampled_token_ids=sampled,
        )
        if self.store is None:
            from vllm.v1.outputs import RoutedExpertsLists

            output.routed_experts = RoutedExpertsLists(np.stack(rows), np.asarray(slots))
            return output, None
        counts = [scheduled.num_scheduled_tokens[name] for name in computed]
        return output, self.store.step(
            list(computed), list(computed.values()), counts, rows, [len(tokens) for tokens in sampled]
        )


def run(is_async: bool, v2: bool, num_blocks: int, chunk: int, caching: bool, monkeypatch) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    route_store.install(on_cpu=True)
    with contained(0):  # vLLM's configuration puts libraries into LD_PRELOAD, which later tests' processes would load
        config = EngineArgs(
            model=str(MODEL), skip_tokenizer_init=True, enable_return_routed_experts=True, max_model_len=64
        ).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.max_num_batched_tokens = config.scheduler_config.max_num_scheduled_tokens = chunk
    config.scheduler_config.enable_chunked_prefill = True
    config.cache_config.enable_prefix_caching = caching
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = num_blocks, BLOCK
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    scheduler = (AsyncScheduler if is_async else Scheduler)(
        config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=False
    )
    monkeypatch.setattr(scheduler, "use_v2_model_runner", v2)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompts = {f"{i}": [7, 8, 9, 10, 11, 12, 13, 14] + [20 + i] * (1 + i % 5) for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        sampling = SamplingParams(max_tokens=12 + 3 * i, ignore_eos=True)
        scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))
    store = Store(config, cache, monkeypatch) if route_store.has_store() else None
    runner, waiting, preempted = Runner(store), deque(), 0
    tokens, routes = defaultdict(list), defaultdict(list)
    for _ in range(2000):
        if not (scheduler.has_unfinished_requests() or waiting):
            break
        scheduled = scheduler.schedule()
        preempted += len(scheduled.preempted_req_ids or ())
        if scheduled.total_num_scheduled_tokens:
            waiting.append((scheduled, *runner.execute(scheduled)))
        elif store is not None:
            store.begin(scheduled)
        # Asynchronous: the next step is scheduled before this one's tokens are known.
        if waiting and (len(waiting) > is_async or not scheduled.total_num_scheduled_tokens):
            done, output, pending = waiting.popleft()
            if pending is not None:
                output.aux_output_connector_output = pending.process_output()
            for outputs in scheduler.update_from_output(done, output).values():
                for output in outputs.outputs:
                    tokens[output.request_id] += output.new_token_ids
                    if output.routed_experts is not None:
                        routes[output.request_id].append(output.routed_experts)
    assert not scheduler.has_unfinished_requests(), "not done within 2000 steps"
    if store is not None:
        store.connector.close()
    joined = {name: np.concatenate(pieces) for name, pieces in routes.items()}
    return {
        "prompts": prompts,
        "tokens": tokens,
        "routes": joined,
        "preempted": preempted,
        "resumed": runner.resumed,
        "shared": runner.shared,
    }


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [64, 10])
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_every_token_has_its_own_routes(is_async, v2, num_blocks, chunk, caching, monkeypatch):
    if not caching and route_store.has_store():
        return  # refused: test_route_store.py
    recorded = run(is_async, v2, num_blocks, chunk, caching, monkeypatch)
    if not caching:
        assert recorded["shared"] == 0
    elif chunk == 10:  # not all prompts are in one step, and later ones begin as the first does
        assert recorded["shared"] > 0
    assert (recorded["preempted"] > 0) == (num_blocks == 24)
    assert recorded["resumed"] >= recorded["preempted"] > 0 or num_blocks == 200
    for i, (name, prompt) in enumerate(recorded["prompts"].items()):
        whole = list(prompt)
        for _ in range(12 + 3 * i):
            whole.append(next_token(whole))
        assert recorded["tokens"][name] == whole[len(prompt) :]
        wanted = np.stack([row(whole[: j + 1]) for j in range(len(whole) - 1)])
        assert recorded["routes"][name].shape == wanted.shape
        np.testing.assert_array_equal(recorded["routes"][name], wanted)
