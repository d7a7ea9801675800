"""Engines in several ranks of one job: shared work, the same result everywhere, Megatron's groups undisturbed."""

import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.rollout import Sampling
from tests.e2e.hf_reference import rounding_bound
from tests.e2e.programs import rollout as rollout_programs
from tests.parallel.gloo import run_ranks
from tests.support.families import DELTA_NETS, save_family
from tests.support.slow import slow_but
from tests.support.tiny import MODEL


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Key/value heads → the tiny model with so many; with one head, vLLM copies it to both ranks of an engine. Families
    → random models of delta nets."""
    folder = tmp_path_factory.mktemp("one head")
    for file in MODEL.iterdir():
        shutil.copy(file, folder)
    weights = {
        name: tensor[: len(tensor) // 2].clone() if re.search("[kv]_proj", name) else tensor
        for name, tensor in HFFolder(MODEL).items()
    }
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"initializer_range": 0.06, "moe_intermediate_size": 64}
    families = {name: save_family(tmp_path_factory.mktemp(name), name, **sizes) for name in DELTA_NETS}
    return {1: folder, 2: MODEL, **families}


@pytest.fixture(scope="module")
def alone(models):
    @functools.cache
    def results(heads):
        generator = rollout_programs.start(1, models[heads])
        try:
            return rollout_programs.sample(generator, models[heads])
        finally:
            generator.close()

    return results


@pytest.fixture
def left_by_a_killed_run():
    """Shared memory by the name that vLLM would give it."""
    files = [Path("/dev/shm") / f"-tp:0-[0-1]-cpushm_{rank}" for rank in (0, 1)]
    made = [file for file in files if not file.exists()]
    for file in made:
        file.touch()
    yield
    for file in made:
        file.unlink()


def rollouts(results):
    return [rollout for groups in results for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize(
    ("tensor_parallel", "heads"),
    slow_but([(2, 2)], [(1, 2), (2, 2), (2, 1), *((2, family) for family in DELTA_NETS)]),
    ids=["two engines", "one engine over two ranks", "more ranks than key/value heads", *DELTA_NETS],
)
def test_two_ranks_return_what_one_returns(tensor_parallel, heads, models, alone, left_by_a_killed_run):
    arguments = {"tensor_parallel": tensor_parallel, "model": models[heads]}
    ranks = run_ranks("tests.e2e.programs.rollout", "rollout_beside_megatron", 2, **arguments)
    bound = 2 * max(rounding_bound(groups, Sampling(24), models[heads]) for groups in alone(heads))
    owners = []
    for expected, *on_ranks in zip(
        rollouts(alone(heads)), *(rollouts(returned["results"]) for returned in ranks), strict=True
    ):
        assert len({one.owner for one in on_ranks}) == 1
        owners.append(on_ranks[0].owner)
        for rank, one in enumerate(on_ranks):
            assert (one.id, one.length, one.finish_reason) == (expected.id, expected.length, expected.finish_reason)
            if rank != one.owner:
                assert one.tokens is one.inference_logprobs is one.policy_versions is one.routed_experts is None
        whole = on_ranks[owners[-1]]
        assert whole.tokens.tolist() == expected.tokens.tolist()
        assert np.abs(whole.inference_logprobs - expected.inference_logprobs).max() <= bound
        assert (whole.policy_versions == expected.policy_versions).all()
        assert (np.sort(whole.routed_experts, -1) == np.sort(expected.routed_experts, -1)).all()
    assert abs(owners.count(0) - owners.count(1)) <= 3, "one for each of three calls"
    for rank, returned in enumerate(ranks):
        assert [len(groups) for groups in returned["results"]] == [7, 1, 7]
        # world, tensor, expert, data: before the engine, beside it, after it
        assert returned["sums"] == [[3.0, 3.0, 3.0, rank + 1.0]] * 3
        assert returned["untouched"]


def test_an_error_on_one_rank_is_the_error_of_all():
    messages = run_ranks("tests.e2e.programs.rollout", "one_engine_fails", 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("rank 1: vLLM failed on prompts validation-0000, validation-0001, validation-0002")
    assert messages[0].endswith("IndexError: broken on purpose")
