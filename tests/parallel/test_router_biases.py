"""Biases of routers: each update counts its own tokens alone, in every layout, and only an applied one moves them."""

from pathlib import Path

import numpy as np
import pytest

from tests.parallel.pool import Jobs
from tests.support.families import save_family
from tests.support.slow import slow_but
from tests.support.tiny import stored_rollouts

FAMILIES = ("glm4_moe", "deepseek_v3", "bailing_moe")  # those with such biases
RATE = 0.03125
WAYS = {  # to make the same two updates: ranks, sections
    "one": (1, {}),
    "recompute": (1, {"learner": {"recompute": "full"}}),
    "short microbatches": (1, {"learner": {"max_tokens_per_microbatch": 40}}),
    "min_variance": (1, {"objective": {"advantage": "min_variance", "policy_term": "reinforce"}}),
    "tp2 ep2": (2, {"learner": {"parallel": {"tensor": 2, "expert": 2}}}),
    "dp2": (2, {}),
    "cp2": (2, {"learner": {"parallel": {"context": 2}}}),
    "pp3": (3, {"learner": {"parallel": {"pipeline": 3}}}),
    "tp2 pp3": (6, {"learner": {"parallel": {"tensor": 2, "pipeline": 3}}}),
}
OVERFLOW = {"learner": {"dtype": "fp16", "loss_scale": {"initial": 2.0**32}}, "rollout": {"dtype": "fp16"}}
NO_UPDATES = {"log-probs": {}, "scores": {}, "undone": {}, "skipped": OVERFLOW}
QUICK = ("recompute", "min_variance", "tp2 ep2", "cp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {family: save_family(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(models):
    jobs: dict[int, dict] = {1: {}, 2: {}, 3: {}, 6: {}}
    for family, path in models.items():
        own = {"model": {"path": str(path)}, "routing": {"bias_update_rate": RATE}, "precision": {"fp32_router": True}}
        for way, (ranks, sections) in WAYS.items():
            jobs[ranks][f"{family} {way}"] = ("loads", own | sections)
        for action, sections in NO_UPDATES.items():
            jobs[1][f"{family} {action}"] = ("changed_by", {"action": action, **own, **sections})
    with Jobs(jobs, module="tests.parallel.programs.router_biases") as results:
        yield results


def by_layer(results: list[dict], what: str) -> dict[int, list]:
    """Of all pipeline stages: layer → what each update counted, or the bias at the end."""
    found: dict[int, list] = {}
    for result in results:
        layers = result["layers"]
        found |= {layer: result[what][number :: len(layers)] for number, layer in enumerate(layers)}
    return found


@pytest.mark.parametrize("way", slow_but(QUICK, [way for way in WAYS if way != "one"]))
@pytest.mark.parametrize("family", slow_but(["glm4_moe"], FAMILIES))
def test_every_way_to_make_an_update_counts_its_tokens_once(family, way, runs):
    batch = stored_rollouts(0, minibatches=2)
    due = [sum(batch.sequences[i].whole_length for i in part) for part in batch.minibatches]
    one, other = runs[f"{family} one"], runs[f"{family} {way}"]
    counted = by_layer(one, "counted")
    topk = {sum(update) / tokens for layer in counted.values() for update, tokens in zip(layer, due, strict=True)}
    assert len(topk) == 1
    if way != "min_variance":  # its second update is of other weights
        assert by_layer(other, "counted") == counted
        assert by_layer(other, "biases") == by_layer(one, "biases")
    else:
        firsts = {layer: updates[0] for layer, updates in by_layer(other, "counted").items()}
        assert firsts == {layer: updates[0] for layer, updates in counted.items()}
        seconds = [sum(updates[1]) for updates in by_layer(other, "counted").values()]
        assert seconds == [sum(updates[1]) for updates in counted.values()]


@pytest.mark.parametrize("family", slow_but(["glm4_moe"], FAMILIES))
def test_biases_move_by_the_rate_against_the_load(family, models, runs):
    from megatron_rl.checkpoint.hf_folder import HFFolder

    stored = [t for name, t in HFFolder(models[family]).items() if name.endswith(("correction_bias", "expert_bias"))]
    result = runs[f"{family} one"][0]
    counted = np.array(result["counted"]).reshape(2, len(result["layers"]), -1)
    moves = RATE * np.sign(counted.mean(axis=-1, keepdims=True) - counted)
    expected = np.array([tensor.tolist() for tensor in stored]) + moves.sum(axis=0)
    assert np.abs(np.array(result["biases"]) - expected).max() <= 2 * np.spacing(np.float32(np.abs(expected).max()))


@pytest.mark.parametrize("action", NO_UPDATES)
@pytest.mark.parametrize("family", slow_but(["glm4_moe"], FAMILIES))
def test_what_is_no_update_changes_nothing_but_counts(family, action, runs):
    """The counts begin anew with each update."""
    result = runs[f"{family} {action}"][0]
    assert (result["biases"], result["updates"]) == (2, 0)
    assert all(name.endswith("local_tokens_per_expert") for name in result["changed"]), result["changed"]
