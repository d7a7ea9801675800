"""The objective section: what is accepted, what is refused with which reason, and what only earns a warning."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_rl.config import ObjectiveConfig, objective
from megatron_rl.config.objective import ObjectiveWarning, with_max_response_length
from megatron_rl.objective import ADVANTAGES, AGGREGATIONS, CORRECTIONS, POLICY_TERMS

EXAMPLE = {
    "advantage": "rloo",
    "policy_term": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "correction": [
        {"mode": "tis", "level": "token", "cap": 2.0},
        {"mode": "reject", "statistic": "seq_mean_k3", "upper": 0.001},
    ],
    "aggregation": "token-mean",
    "max_response_length": 8192,
    "distortion": None,
    "variance": None,
}


def quiet(**config) -> ObjectiveConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ObjectiveConfig.model_validate(config)


def test_the_documented_example_validates_without_a_warning_and_round_trips():
    config = quiet(**EXAMPLE)
    assert ObjectiveConfig.model_validate(config.model_dump()) == config
    for entry in (
        {"mode": "mis", "level": "sequence", "cap": 3.0},
        {"mode": "icepop", "lower": 0.5, "upper": 5.0},
    ):
        quiet(correction=[entry])


def test_every_function_has_its_spelling_in_the_schema_and_the_reverse():
    def literals(field, key):
        definitions = ObjectiveConfig.model_json_schema()["$defs"]
        return {d["properties"][key]["const"] for d in definitions.values() if key in d.get("properties", {})}

    assert literals("policy_term", "name") == set(POLICY_TERMS) | {"function"}
    assert literals("correction", "mode") == set(CORRECTIONS) | {"none", "function"}
    properties = ObjectiveConfig.model_json_schema()["properties"]
    assert set(properties["advantage"]["anyOf"][0]["enum"]) == set(ADVANTAGES)
    assert set(properties["aggregation"]["anyOf"][0]["enum"]) == set(AGGREGATIONS)


def test_short_forms():
    assert quiet(policy_term="cispo").policy_term.name == "cispo"
    assert quiet(correction=None).correction == []
    assert quiet(correction=["veto", {"mode": "none"}]).active_corrections[0].threshold == 1e-4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"policy_term": {"name": "ppo"}}, "'ppo_clip', 'gspo'"),
        ({"policy_term": {"name": "gspo", "dual_clip": 3.0}}, "dual_clip"),
        ({"policy_term": {"name": "ppo_clip", "clip_low": 1.5}}, "clip_low"),
        ({"policy_term": {"name": "ppo_clip", "dual_clip": 0.5}}, "dual_clip"),
        ({"advantages": "rloo"}, "advantages"),
        ({"advantage": "gae"}, "'rloo'"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "max_response_length, which is absent"),
        ({"correction": [{"mode": "icepop", "lower": 5.0, "upper": 0.5}]}, "swap the two"),
        ({"correction": [{"mode": "icepop", "level": "sequence"}]}, "level"),
        ({"correction": [{"mode": "mis", "cap": 2.0, "lower": 3.0}]}, "not below cap"),
        ({"correction": [{"mode": "reject", "statistic": "geometric"}]}, "neither lower nor upper"),
        ({"correction": [{"mode": "reject", "lower": 2.0, "upper": 1.0}]}, "not below upper"),
        ({"correction": [{"mode": "tis", "cap": -1.0}]}, "greater than 0"),
        ({"correction": [{"mode": "tis", "renormalize": True}]}, "renormalize"),
        ({"policy_term": "minirl", "correction": [{"mode": "tis"}]}, "already carries w"),
        ({"policy_term": "dppo", "correction": [{"mode": "icepop"}]}, "already carries w"),
        ({"policy_term": "drpo", "correction": ["m2po"]}, "m2po with policy term drpo, anchor recompute"),
        ({"anchor": "bypass", "correction": ["m2po"]}, "anchor bypass: the second moment"),
        ({"correction": ["m2po", {"mode": "m2po", "threshold": 0.1}]}, "m2po more than once"),
        (
            {"policy_term": "reinforce", "correction": [{"mode": "mis", "renormalize": True}]},
            "depends on the current policy",
        ),
        ({"correction": [{"mode": "opsm", "renormalize": True}]}, "depends on the current policy"),
        (
            {"policy_term": "reinforce", "correction": [{"mode": "tis", "normalize": True}]},
            "normalize on tis with policy",
        ),
        ({"policy_term": "vespo", "anchor": "interpolate"}, "vespo, which has no ratio r"),
        (
            {"anchor": "interpolate", "correction": [{"mode": "mis", "renormalize": True}]},
            "depends on the current policy",
        ),
        ({"correction": [{"mode": m, "normalize": True} for m in ("is", "tis")]}, "more than one correction"),
        ({"correction": [{"mode": "mis", "normalize": True}]}, "normalize"),
        ({"distortion": {"low_prob": 0.1}}, "delta"),
        ({"variance": {"sigma": 0.0}}, "sigma"),
        ({"prob_bands": [0.5, 0.1]}, "ascend"),
        ({"prob_bands": [0.0, 0.1]}, "inside"),
    ],
    ids=str,
)
def test_refused(config, reason):
    with pytest.raises(ValidationError, match=reason):
        ObjectiveConfig.model_validate(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"policy_term": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.28}}, "look like PPO's per-token bounds"),
        ({"policy_term": {"name": "ppo_clip", "clip_low": 3e-4, "clip_high": 4e-4}}, "look like GSPO's"),
        ({"policy_term": "gspo", "aggregation": "token-mean"}, "only under aggregation seq-mean-token-mean"),
        ({"correction": [{"mode": "tis"}, {"mode": "mis", "level": "sequence"}]}, "counts it twice"),
        ({"correction": [{"mode": "reject", "statistic": "seq_mean_k1", "upper": 0.001}]}, "belong to seq_mean_k3"),
        ({"correction": [{"mode": "tis", "cap": 0.5}]}, "below 1"),
        ({"anchor": "interpolate", "correction": ["veto"]}, "add correction is or tis"),
        (
            {"advantage": "min_variance"},
            "min_variance is the best baseline for terms that are multiplied by the product",
        ),
    ],
    ids=str,
)
def test_warned(config, reason):
    with pytest.warns(ObjectiveWarning, match=reason):
        ObjectiveConfig.model_validate({"aggregation": "seq-mean-token-mean", **config})


ALL = [{"mode": mode, **({"upper": 2.0} if mode in ("reject", "mask") else {})} for mode in CORRECTIONS]


@pytest.mark.parametrize(
    ("values", "num_updates", "has_mismatch", "idle"),
    [
        ({"correction": ALL}, 1, True, []),
        ({"correction": ALL}, 1, False, list(CORRECTIONS)),
        ({"correction": ALL}, 2, False, [mode for mode in CORRECTIONS if mode != "opsm"]),  # pi moves away from mu
        ({"correction": ALL[:3], "policy_term": "reinforce"}, 1, False, ["is", "tis", "mis"]),
        ({"correction": ALL[:3], "policy_term": "reinforce"}, 2, False, []),  # w is r
        ({"correction": ALL[4:-1], "anchor": "bypass"}, 2, False, []),
        ({"policy_term": "fipo"}, 1, True, ["fipo"]),
        ({"policy_term": "fipo"}, 2, True, []),
        ({"policy_term": "fipo", "anchor": "bypass"}, 1, True, []),
    ],
)
@pytest.mark.filterwarnings("ignore::megatron_rl.config.objective.ObjectiveWarning")
def test_parts_that_cannot_act_are_named(values, num_updates, has_mismatch, idle):
    without_effect = objective.parts_without_effect(ObjectiveConfig.model_validate(values), num_updates, has_mismatch)
    assert len(without_effect) == len(idle)
    assert all(re.search(rf": {name}\b", text) for name, text in zip(idle, without_effect))


def test_gspo_and_masks_on_terms_with_w_are_fine():
    quiet(policy_term="gspo", aggregation="seq-mean-token-mean")
    quiet(policy_term="minirl", correction=[{"mode": "reject", "upper": 0.001}, {"mode": "veto"}, {"mode": "opsm"}])


def test_the_length_is_filled_where_absent():
    section = {"aggregation": "seq-mean-token-sum-norm"}
    assert quiet(**with_max_response_length(section, 100)).max_response_length == 100
    assert with_max_response_length({"max_response_length": None}, 100) == {"max_response_length": 100}
    assert with_max_response_length({"max_response_length": 7}, 100) == {"max_response_length": 7}
    assert with_max_response_length(None, 5) == {"max_response_length": 5}
    assert section == {"aggregation": "seq-mean-token-sum-norm"}


def test_checking_a_recipe_loads_no_torch():
    code = "import sys; import megatron_rl.config.objective; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
