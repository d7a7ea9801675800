"""What an engine is started with where vLLM keeps routes in a store. Rows are in test_vllm_engine_routes.py."""

import pytest

from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rollout import route_store
from megatron_rl.rollout.engine_arguments import engine_arguments
from megatron_rl.rollout.servers.rendezvous import server_arguments
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
    arguments(record_routes=True, enable_prefix_caching=False)
    monkeypatch.setattr(route_store, "has_store", lambda: True)
    assert arguments(record_routes=True)["enable_prefix_caching"] is True
    assert arguments(record_routes=False)["enable_prefix_caching"] is False
    arguments(record_routes=False, enable_prefix_caching=False)
    with pytest.raises(InputError, match=r"enable_prefix_caching: false, but vLLM \S+ records routes in its prefix"):
        arguments(record_routes=True, enable_prefix_caching=False)
