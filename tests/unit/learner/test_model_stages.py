"""Pipeline stages that do not divide the layers: Megatron gives each the layers that the rules say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.model_rules import stage_layers
from megatron_rl.learner.model import _uneven_stages


@pytest.mark.parametrize(("layers", "stages"), [(94, 8), (61, 16), (5, 2), (94, 4), (48, 4), (7, 3)])
def test_megatron_builds_the_layers_of_each_stage(layers, stages, monkeypatch):
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_dtype="bf16",
        **_uneven_stages(layers, stages),
    )
    monkeypatch.setattr(
        transformer_block,
        "parallel_state",
        SimpleNamespace(get_virtual_pipeline_model_parallel_world_size=lambda: None),
    )
    built = [transformer_block.get_num_layers_to_build(config, pp_rank=rank) for rank in range(stages)]
    assert built == stage_layers(layers, stages)
