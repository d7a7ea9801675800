"""What an engine is started with where vLLM keeps routes in a store. Rows are in test_vllm_engine_routes.py."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.rollout import route_store
from megatron_rl.rollout.engine_arguments import engine_arguments
from megatron_rl.rollout.process_state import contained
from megatron_rl.rollout.servers.rendezvous import server_arguments
from tests.support.families import save_family
from tests.support.tiny import MODEL


@pytest.mark.parametrize("place", ["beside the learner", "server"])
def test_where_vllm_keeps_routes_by_blocks_they_have_the_prefix_cache(place, monkeypatch):
    """As from vLLM 0.31 on. Elsewhere a CPU does without the cache for prompts shorter than a block."""

    def arguments(record_routes: bool, **fields) -> dict:
        config = RolloutConfig.model_validate(fields)
        if place == "server":
            precision = PrecisionConfig()
            return server_arguments(config, MODEL, "cpu", 16, record_routes=record_routes, precision=precision)
        return engine_arguments(config, MODEL, "cpu", 16, record_routes=record_routes)

    monkeypatch.setattr(route_store, "has_store", lambda: False)
    assert arguments(record_routes=True)["enable_prefix_caching"] is False
    monkeypatch.setattr(route_store, "has_store", lambda: True)
    assert arguments(record_routes=True)["enable_prefix_caching"] is True
    assert arguments(record_routes=False)["enable_prefix_caching"] is False


@pytest.mark.parametrize("family", ["deepseek_v3", "olmoe"])
def test_blocks_of_latent_attention_have_names_and_are_not_looked_up(family, tmp_path):
    """On a CPU without AMX vLLM turns the prefix cache off there, whose names its store of routes wants."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if not route_store.has_store():
        return
    arguments = engine_arguments(RolloutConfig(), save_family(tmp_path, family), "cpu", 16, record_routes=True)
    with contained(0):  # vLLM's configuration puts libraries into LD_PRELOAD
        config = EngineArgs(**arguments).create_engine_config()
    assert config.cache_config.enable_prefix_caching
    assert config.model_config.use_mla == (family == "deepseek_v3")
    kind = MLAAttentionSpec if config.model_config.use_mla else FullAttentionSpec
    groups = [SimpleNamespace(kv_cache_spec=kind(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32))]
    manager = SimpleNamespace(enable_caching=True, kv_cache_config=SimpleNamespace(kv_cache_groups=groups))
    for skips in (False, True):
        request = SimpleNamespace(skip_reading_prefix_cache=skips)
        looks_up = KVCacheManager.prefix_cache_lookup_enabled(manager, request)
        assert looks_up == (family == "olmoe" and not skips)
