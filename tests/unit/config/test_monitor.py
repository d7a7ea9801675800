"""Alarm rules of a recipe: which are refused when it is loaded, and the rules on levels that every run has."""

import pytest
from pydantic import ValidationError

from megatron_rl.config.monitor import LEVELS, RHO_BOUNDS, RISKS, AlarmRule, MonitorConfig, level_rules
from tests.support.tiny import tiny_recipe


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "exactly one of above and below"),
        ({"above": 1, "below": 0}, "exactly one of above and below"),
        ({"above": 1, "then": ["panic"]}, "warn"),
        ({"above": 1, "then": []}, "at least 1"),
        ({"above": 1, "statistic": "slope", "window": 2}, "use at least 3"),
        ({"above": 1, "statistic": "not_finite"}, "needs no bound"),
        ({"above": 1, "for": 3}, "for"),
    ],
)
def test_bad_rules_fail_at_load(rule, message):
    with pytest.raises(ValidationError, match=message):
        AlarmRule(name="rule", metric="m", **rule)


def test_rule_names_are_unique():
    rule = {"name": "twice", "metric": "m", "above": 0}
    with pytest.raises(ValidationError, match="more than one rule is named twice"):
        MonitorConfig(alarms=[rule, rule])


def recipe(learner: str, rollout: str, **keys) -> dict:
    return {"learner": {"dtype": learner}, "rollout": {"dtype": rollout, **keys}}


NO_PO = {"batch": {"minibatches": 4}, "objective": {"policy_term": "vespo"}}


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        (recipe("fp32", "fp32"), RHO_BOUNDS["fp32"]),
        (recipe("fp32", "bf16"), RHO_BOUNDS["bf16"]),
        (recipe("bf16", "bf16", quantization={"weights": "int4", "kv_cache": None, "block": [1, 1]}), 2.0),
        (recipe("fp32", "fp32", max_staleness=1), None),
        (recipe("fp32", "fp32") | {"exact": {"noise": {"kind": "stale"}}}, None),
        (recipe("fp32", "fp32") | {"precision": {"allow_asymmetric": True}}, None),
        ({}, None),
        (recipe("fp32", "fp32") | NO_PO | {"batch": {"minibatches": 1}}, RHO_BOUNDS["fp32"]),
        (recipe("fp32", "fp32") | NO_PO, None),
        (recipe("fp32", "fp32") | NO_PO | {"batch": {"minibatches": 2}}, None),
        (recipe("fp32", "fp32") | NO_PO | {"routing": {"replay": "r2"}}, RHO_BOUNDS["fp32"]),  # has the pass for po
        (recipe("fp32", "fp32") | NO_PO | {"objective": {"policy_term": "gspo"}}, RHO_BOUNDS["fp32"]),
        (recipe("fp32", "fp32") | NO_PO | {"objective": {"policy_term": "of another version"}}, RHO_BOUNDS["fp32"]),
    ],
)
def test_the_contract_bounds_rho_by_the_coarser_type(values, bound):
    rules = {rule.name: rule.above for rule in level_rules(values)}
    assert rules.get("mismatch-contract") == bound
    assert set(rules) - {"mismatch-contract"} == {rule.name for rule in LEVELS}


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        ({"learner": {"lora": {"rank": 4}}}, {"update-size"}),
        ({"rollout": {"kept_sets": True, "top_k": 8}}, {"entropy-floor"}),
        ({}, set()),
    ],
)
def test_rules_are_left_out_where_their_metric_means_something_else(keys, left_out):
    rules = {rule.name for rule in level_rules(tiny_recipe(**keys).model_dump(mode="json"))}
    assert {rule.name for rule in LEVELS} - rules == left_out


def test_risks_are_rules_on_levels():
    assert {rule.name for rule in LEVELS} > RISKS


def test_one_key_turns_them_off():
    assert level_rules({"monitor": {"levels": False}}) == []
    assert level_rules(tiny_recipe(monitor={"levels": False}).model_dump()) == []
