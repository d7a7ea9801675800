"""Parts of weights on ranks: what each rank has of a projection, and the whole from all of them."""

import pytest
import torch

from megatron_rl.checkpoint.shards import WeightMap
from megatron_rl.model.families import FAMILIES
from tests.unit.checkpoint.test_fused import NEXT


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_rank_has_its_heads_of_every_section_of_a_delta_net(family, size):
    of_rank = object.__new__(WeightMap)
    of_rank.architecture = NEXT
    rows = [w for w in FAMILIES[family].layer if w.memory[0].endswith(("in_proj.weight", "conv1d.weight"))]
    assert len(rows) == 2
    for row in rows:
        tensors = [torch.randn(shape) for shape in row.shapes(NEXT)]
        shards = [of_rank._split(row.sharding, tensors, size, rank) for rank in range(size)]
        sections = NEXT.linear.sections[: len(row.disk)]
        for shard in shards:
            assert len(shard) == sum(sections) // size
        for again, tensor in zip(of_rank._merge(row.sharding, shards), tensors, strict=True):
            assert torch.equal(again, tensor)
