"""The table of causes: what counts for a row, and what speaks against it."""

from __future__ import annotations

import pytest

from megatron_rl.instruments.why.case import Case
from megatron_rl.instruments.why.causes import CAUSES, suspects
from megatron_rl.instruments.why.departures import WATCHED, Change
from tests.unit.instruments.why.test_onset import records


def test_every_measure_is_watched():
    assert {metric for cause in CAUSES for metric in cause.measures.split()} <= WATCHED.keys()


@pytest.mark.parametrize(("step", "is_suspect"), [(20, True), (23, True), (30, False), (41, False)])
def test_a_measure_counts_among_the_first_departures_up_to_the_sign(step, is_suspect):
    changes = [Change("actor/entropy", 20, 0.3, 0.9), Change("mismatch/rho_std", step, 1e-6, 0.2)]
    found = suspects(Case(records(), {}, 40, changes))
    assert ("mismatch" in [suspect.name for suspect in found]) == is_suspect


def clipped(updates: int, name: str = "ppo_clip", **widths) -> dict:
    return {"batch": {"minibatches": updates}, "objective": {"policy_term": {"name": name} | widths}}


def lost(share: float):
    return lambda step: 0.6 if step < 20 else 0.6 * (1 - share)


LARGE = {"noise__relative_update": 3e-3}
DOSE = {"exact": {"noise": {"kind": "logits"}}}


@pytest.mark.parametrize(
    ("cause", "recipe", "harmless", "harmful"),
    [
        ("learning rate", {}, {"noise__relative_update": 1.9e-3}, {"noise__relative_update": 2.1e-3}),
        ("optimizer", {}, {"noise__update_rms": 1.9e-4}, {"noise__update_rms": 2.1e-4}),  # two rates
        ("optimizer", {}, {"noise__update_rms": lambda s: 1e-5 if s != 20 else 1e-2}, {"noise__update_rms": 1e-2}),
        ("overflow", {}, {"actor__update_skipped": 0.04}, {"actor__update_skipped": 0.06}),
        ("routing", {}, {"router__agree_frac": 0.96}, {"router__agree_frac": 0.94}),
        ("rounding", {}, {"mismatch__rho_std": 0.029}, {"mismatch__rho_std": 0.031}),
        ("dose of mismatch", DOSE, {"mismatch__rho_std": 0.029}, {"mismatch__rho_std": 0.031}),
        ("staleness", {}, {"rollout__staleness_mean": 0.9}, {"rollout__staleness_mean": 1.1}),
        ("data", {}, {"val__reward__mean": 0.75}, {"val__reward__mean": 0.8}),  # of 0.51
        (
            "length",
            {},
            {"response_length__mean": lambda s: 10.0 + 5 * (s > 20)},
            {"response_length__mean": lambda s: 10.0 + 7 * (s > 20)},
        ),
        ("length", {}, {"response_length__clip_ratio": 0.24}, {"response_length__clip_ratio": 0.26}),
        (
            "length",
            {},
            {"response_length__clip_ratio": lambda s: float(s in (20, 22))},
            {"response_length__clip_ratio": lambda s: float(20 <= s < 23)},
        ),
        ("reward", {}, {"critic__rewards__mean": lost(0.2)}, {"critic__rewards__mean": lost(0.3)}),
        ("reward", {}, LARGE | {"critic__rewards__mean": lost(0.4)}, LARGE | {"critic__rewards__mean": lost(0.9)}),
        (
            "no signal",
            {},
            {"groups__no_signal_frac": lambda s: 0.5 + 0.5 * (s > 36)},
            {"groups__no_signal_frac": lambda s: 0.5 + 0.5 * (s > 35)},
        ),
        ("no signal", {}, {"groups__no_signal_frac": 1.0}, {"groups__no_signal_frac": lambda s: float(s > 2)}),
        (
            "no signal",
            {},
            {"groups__all_solved_frac": 0.04, "groups__none_solved_frac": 0.96},
            {"groups__all_solved_frac": 0.06, "groups__none_solved_frac": 0.94},
        ),
        (
            "no signal",
            {},
            {"groups__all_solved_frac": 0.5, "groups__none_solved_frac": 0.4},
            {"groups__all_solved_frac": 0.5, "groups__none_solved_frac": 0.5},
        ),
    ],
)
def test_a_number_counts_from_its_bound_on(cause, recipe, harmless, harmful):
    for metrics, is_suspect in ((harmless, False), (harmful, True)):
        found = suspects(Case(records(**metrics, actor__lr=1e-4), recipe, 40))
        assert (cause in {name for suspect in found for name in suspect.causes}) == is_suspect


@pytest.mark.parametrize(
    ("cause", "harmless", "harmful", "metrics"),
    [
        ("updates a batch", {"batch": {"minibatches": 4}}, {"batch": {"minibatches": 5}}, {}),
        ("updates a batch", {"batch": {"minibatches": 1}}, {"batch": {"minibatches": 2}}, {"actor__ppo_kl": 10.0}),
        ("clip range", clipped(2, clip_high=0.39), clipped(2, clip_high=0.41), {}),
        ("clip range", clipped(1, clip_high=50.0), clipped(2, clip_low=0.41), {}),
        ("clip range", clipped(2, "gspo", clip_high=50.0), clipped(2, clip_high=50.0), {}),
        ("staleness", {"rollout": {"max_staleness": 1}}, {"rollout": {"max_staleness": 2}}, {}),
        ("temperature", {"rollout": {"temperature": 1.1}}, {"rollout": {"temperature": 1.2}}, {}),
        ("temperature", {"rollout": {"temperature": 0.9}}, {"rollout": {"temperature": 0.8}}, {}),
        ("temperature", {}, {"rollout": {"temperature": 0}}, {}),
        ("rounding", DOSE, {}, {"mismatch__rho_std": 0.2}),
    ],
)
def test_a_key_counts_from_its_bound_on(cause, harmless, harmful, metrics):
    for recipe, is_suspect in ((harmless, False), (harmful, True)):
        found = suspects(Case(records(**metrics), recipe, 40))
        assert (cause in {name for suspect in found for name in suspect.causes}) == is_suspect


ENTROPY, RHO = Change("actor/entropy", 20, 0.3, 0.9, 3.0), Change("mismatch/rho_std", 20, 1e-6, 0.2)
SLOW, LATE = Change("actor/entropy", 20, 0.3, 0.9, 3.0, False), Change("actor/entropy", 21, 0.3, 0.9)
FALL = Change("critic/rewards/mean", 21, 0.6, 0.2)
SIGNAL, GRADIENT = Change("groups/no_signal_frac", 20, 0.1, 0.9, 3.0), Change("actor/grad_norm", 14, 0.3, 0.7)


@pytest.mark.parametrize(
    ("changes", "first", "effects"),
    [
        ((ENTROPY, FALL, SIGNAL), "other weights or prompts", 1),  # together: what comes first in a step
        ((ENTROPY, SIGNAL), "other weights or prompts or objective or reward", 1),  # what it earns is as before
        ((SIGNAL, LATE, FALL), "no signal", 1),  # earlier by a jump
        ((SLOW, SIGNAL), "no signal", 0),  # by and by
        ((GRADIENT, Change("mismatch/rho_std", 25, 1e-6, 0.2, 8.0)), "mismatch", 0),  # no policy makes it
        ((GRADIENT, Change("response_length/clip_ratio", 23, 0.0, 0.3)), "objective or reward", 1),  # by three records
        ((RHO, Change("router/agree_frac", 22, 1.0, 0.5)), "mismatch or routing", 0),  # a tie
    ],
)
def test_what_departs_after_something_else_is_an_effect(changes, first, effects):
    cut = {"response_length__clip_ratio": lambda s: 0.5 if s >= 23 and changes[-1].step == 23 else 0.0}
    found = suspects(Case(records(**cut), {}, 40, changes))
    assert (found[0].name, found[0].is_last) == (first, False)
    after = [suspect for suspect in found if suspect.is_last]
    assert len(after) == effects
    assert all("which comes before" in suspect.contradicts[-1] for suspect in after)
    if first == "mismatch or routing":
        assert (found[0].causes, found[0].test) == (("mismatch", "routing"), ("rollout.engine=exact",))


@pytest.mark.parametrize(("size", "first"), [(5e-4, "other weights or prompts"), (1e-2, "learning rate")])
def test_what_was_there_before_stands_behind_what_departs_at_once(size, first):
    """But where updates are large: they move a policy at once."""
    rows = records(mismatch__rho_std=0.1, noise__relative_update=size)
    found = suspects(Case(rows, {"rollout": {"quantization": {"weights": "int4"}}}, 40, [ENTROPY, FALL]))
    assert found[0].name == first
    rounding = next(suspect for suspect in found if suspect.name == "rounding")
    assert rounding.contradicts == ("actor/entropy departed at step 20, and this was there before",) * (size < 1e-3)


ROUNDED = {"rollout": {"quantization": {"weights": "int4"}}}


@pytest.mark.parametrize(
    ("rho", "changes", "first"),
    [
        (0.05, [SLOW], "rounding or objective or reward"),  # a constant not far above what is safe
        (0.2, [SLOW], "rounding"),
        (0.2, [Change("mismatch/rho_std", 20, 0.2, 0.9, 1.2)], "rounding or mismatch"),  # of engine and learner, too
    ],
)
def test_what_was_there_from_the_start_and_what_departs_by_and_by_are_a_tie(rho, changes, first):
    assert suspects(Case(records(mismatch__rho_std=rho), ROUNDED, 40, changes))[0].name == first


@pytest.mark.parametrize(
    ("moved", "adam", "first"),
    [
        (1e-3, {}, "optimizer"),
        (1e-4, {}, "optimizer or objective or reward"),  # as far as Adam may
        (5e-4, {"beta2": 0.999}, "optimizer or objective or reward"),  # whose first step is 3.2 rates then
    ],
)
def test_an_update_beyond_adams_step_is_the_optimizers_alone(moved, adam, first):
    rows = records(noise__update_rms=lambda s: 1e-5 if s < 20 else moved, actor__lr=1e-4)
    case = Case(rows, {"learner": {"optimizer": adam}}, 40, [Change("noise/relative_update", 20, 5e-4, 1e-3)])
    assert suspects(case)[0].name == first


def test_a_held_out_reward_that_falls_alone_may_be_validation():
    case = Case(records(), {}, 40, [Change("val/reward/mean", 20, 0.6, 0.2, 3.0)])
    assert "data or validation" in suspects(case)[0].name


def test_groups_that_lost_their_signal_have_none():
    rows = records(groups__no_signal_frac=lambda s: 0.85 if s < 20 else 1.0)  # too high before to depart
    assert suspects(Case(rows, {}, 26))[0].name == "no signal"


def test_a_reward_that_is_lost_at_once_may_be_prompts_where_the_policy_moves():
    fell = {"critic__rewards__mean": lambda s: 0.6 if s < 20 else 0.2}
    names = []
    for entropy in (0.3, 0.4):
        rows = records(**fell, actor__entropy=lambda s, after=entropy: 0.3 if s < 20 else after)
        names.append(suspects(Case(rows, {}, 22))[0].name)
    assert names == ["reward or prompts", "reward or other weights or prompts"]


def test_two_scales_are_not_divided():
    rows = [row | {"critic/score/mean": -0.5, "val/reward/mean": 0.3} for row in records()]
    assert "data" not in [suspect.name for suspect in suspects(Case(rows, {}, 40))]


def test_a_share_that_nobody_measured_is_not_zero():
    rows = [
        {k: v for k, v in row.items() if "clip_ratio" not in k}
        for row in records(response_length__mean=lambda s: s + 9.0)
    ]
    (length,) = [suspect for suspect in suspects(Case(rows, {}, 40)) if suspect.name == "length"]
    assert "how many were cut is not known" in length.observation


@pytest.mark.parametrize(("term", "is_suspect"), [("gspo", True), ("vespo", False)])
def test_a_mismatch_that_includes_the_updates_is_no_rounding(term, is_suspect):
    """Without a pass for po, mu is compared with a pi that has moved."""
    types = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}, "batch": {"minibatches": 4}}
    case = Case(records(**{"mismatch/rho_std": 0.2}), types | {"objective": {"policy_term": term}})
    assert ("rounding" in [suspect.name for suspect in suspects(case)]) == is_suspect
    beyond = Case(records(**{"mismatch/rho_std": 0.4}), types | {"objective": {"policy_term": term}})
    assert ("mismatch" in [suspect.name for suspect in suspects(beyond)]) == is_suspect  # more than bf16 explains


def test_a_run_without_metrics_has_no_suspect():
    assert suspects(Case([{"step": 0}], {})) == []


@pytest.mark.parametrize(
    ("rates", "sign", "is_suspect"),
    [((1e-4, 1e-3), 25, True), ((1e-4, 1e-3), 15, False), ((1e-4, 1e-4), 25, False)],
)
def test_a_rate_that_was_raised_counts_from_the_raise_on(rates, sign, is_suspect):
    """Up to the sign alone: updates that grow at the same rate are a symptom."""
    sizes = {"noise/relative_update": lambda step: 3e-4 if step < 20 else 4e-3}
    rows = records(**sizes, **{"actor/lr": lambda step: rates[step >= 20]})
    found = [suspect.observation for suspect in suspects(Case(rows, {}, sign)) if suspect.name == "learning rate"]
    assert found == ["one update changes the weights by 0.40% of their size"] * is_suspect
