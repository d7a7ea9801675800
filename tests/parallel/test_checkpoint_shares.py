"""Every rank writes an equal share of a checkpoint, and reads what its layout holds."""

import pytest

from megatron_rl.checkpoint.shards import boxes
from megatron_rl.instruments.plan import GPUS
from megatron_rl.instruments.plan.learner import checkpoint_cost
from megatron_rl.instruments.plan.workload import Workload
from megatron_rl.model.architecture import read_architecture
from tests.parallel.pool import Jobs
from tests.support.slow import slow_but
from tests.support.tiny import tiny_recipe

LAYOUTS = {
    "dp4": {},
    "ep2": {"expert": 2},
    "tp2ep2": {"tensor": 2, "expert": 2},
    "tp2ep4": {"tensor": 2, "expert": 4},
    "pp2": {"pipeline": 2},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Layout → what each of four ranks found."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs = {
        name: ("save_and_load", {"folder": str(folder / name), "learner": {"dtype": "bf16", "parallel": parallel}})
        for name, parallel in LAYOUTS.items()
    }
    with Jobs({4: jobs}, module="tests.parallel.programs.shares") as results:
        yield results


@pytest.mark.parametrize("layout", slow_but(["dp4", "tp2ep2"], LAYOUTS))
def test_ranks_write_equal_shares(ranks, layout):
    written = [rank["written"] for rank in ranks[layout]]
    assert min(written) > 0.9 * max(written), written


@pytest.mark.parametrize("layout", slow_but(["dp4"], ["dp4", "ep2"]))
def test_the_plan_knows_how_much(ranks, layout):
    recipe = tiny_recipe(learner={"dtype": "bf16", "parallel": LAYOUTS[layout]})
    work = Workload(recipe, read_architecture(recipe.model.path), GPUS["h100-80"], 1, 4, 1.0, 1.0, host_gib=0.0)
    assert sum(rank["payload"] for rank in ranks[layout]) == 4 * checkpoint_cost(work).size


@pytest.mark.parametrize("layout", slow_but(["dp4", "tp2ep2"], LAYOUTS))
def test_a_rank_reads_what_it_holds(ranks, layout):
    """Its weights, and of the optimizer what it owns; each tensor takes up to 2 kB more in its file, and a tensor
    that two ranks wrote parts of is read as these parts."""
    for rank in ranks[layout]:
        assert rank["held"] < rank["read"] < rank["held"] + 2048 * rank["pieces"]


@pytest.mark.parametrize("layout", slow_but(["dp4", "tp2ep2"], LAYOUTS))
def test_saving_gathers_nothing_of_the_state(ranks, layout):
    """What a rank receives from others describes tensors; it holds none of them, and is nothing on the ranks that do
    not write the index."""
    for number, rank in enumerate(ranks[layout]):
        assert rank["tensor_bytes_received"] == 0
        assert rank["object_bytes_received"] < (1024 * rank["all_pieces"] if number == 0 else 4096), rank


@pytest.mark.parametrize("layout", slow_but(["dp4", "tp2ep2"], LAYOUTS))
def test_megatron_reads_it_and_it_reads_megatrons(ranks, layout):
    """Megatron's `fully_reshardable` builder, which gathers, reads and writes the same format."""
    for rank in ranks[layout]:
        assert rank["megatron_reads"]
        assert rank["reads_megatron"]


def test_a_checkpoint_with_a_hole_is_not_published(ranks):
    for rank in ranks["dp4"]:
        assert "Failed to validate global plan" in rank["hole"]
        assert rank["left"] == ["step_00000000"]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 3, 2, 2), (4, 1, 3)])
def test_boxes_are_ranges_of_the_flattened_tensor(shape):
    import torch

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            ranges = list(boxes(shape, start, stop))
            assert len(ranges) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in ranges]
            assert torch.cat([torch.empty(0, dtype=torch.int64), *parts]).tolist() == list(range(start, stop))
