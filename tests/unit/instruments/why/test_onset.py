"""Suspects on made-up and on recorded runs, what is said where none fits, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.instruments.branch.plan import plan_branch
from megatron_rl.instruments.why.causes import CAUSES
from megatron_rl.instruments.why.changed import Event
from megatron_rl.instruments.why.onset import _lasting_fall, find, page
from megatron_rl.monitor.alarms import read_packed
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.sick_run import make_run
from tests.support.tiny import REPOSITORY, tiny_recipe
from tests.support.written_run import WrittenRun

# -- suspects


def records(steps: int = 60, **changed) -> list[dict[str, float]]:
    """A run that learns a little, with metrics put in by ``changed``: values, or functions of the step."""
    usual = {
        "critic/rewards/mean": lambda step: 0.5 + 0.005 * step + 0.02 * (step % 2),
        "actor/entropy": 0.3,
        "actor/grad_norm": lambda step: 0.5 + 0.1 * (step % 3),
        "actor/ppo_kl": 0.0,
        "mismatch/rho_std": 1e-6,
        "noise/relative_update": 5e-4,
        "response_length/mean": 10.0,
        "response_length/clip_ratio": 0.0,
        "groups/no_signal_frac": 0.1,
        "actor/update_skipped": 0.0,
    }
    metrics = usual | {name.replace("__", "/"): value for name, value in changed.items()}
    return [
        {"step": step} | {name: value(step) if callable(value) else value for name, value in metrics.items()}
        for step in range(steps)
    ]


def falls(at: int, over: int):
    """A reward that falls to nothing from step ``at`` on, over so many steps."""
    return lambda step: 0.6 * min(1.0, max(0.0, 1 - (step - at) / over)) + 0.001 * (step % 2)


SLOWLY = falls(20, 20)
PLANTED = {
    "learning rate": (
        {"noise__relative_update": 4e-3, "critic__rewards__mean": SLOWLY, "actor__entropy": lambda s: 0.3 + s / 50},
        {},
    ),
    "optimizer": (
        {"noise__relative_update": 4e-3, "noise__update_rms": 1e-3, "actor__lr": 1e-4, "critic__rewards__mean": SLOWLY},
        {},
    ),
    "updates a batch": ({"critic__rewards__mean": SLOWLY, "actor__ppo_kl": 0.1}, {"batch": {"minibatches": 8}}),
    "clip range": (
        {"critic__rewards__mean": SLOWLY},
        {"batch": {"minibatches": 4}, "objective": {"policy_term": {"name": "ppo_clip", "clip_high": 50.0}}},
    ),
    "rounding": (
        {"critic__rewards__mean": SLOWLY, "mismatch__rho_std": 0.3},
        {"rollout": {"quantization": {"weights": "int4"}}},
    ),
    "overflow": ({"actor__update_skipped": 1.0}, {}),
    "reward": ({"critic__rewards__mean": falls(30, 1)}, {}),
    "objective or reward": ({"critic__rewards__mean": falls(30, 25)}, {}),
    "data": ({"critic__rewards__mean": lambda s: SLOWLY(s) / 5, "val__reward__mean": 0.7}, {}),
    "length": ({"critic__rewards__mean": SLOWLY, "response_length__mean": lambda s: 10.0 + s}, {}),
    "temperature": ({"critic__rewards__mean": SLOWLY}, {"rollout": {"temperature": 0.3}}),
    "routing": ({"critic__rewards__mean": SLOWLY, "router__agree_frac": 0.5}, {}),
    "mismatch": ({"critic__rewards__mean": falls(30, 20), "mismatch__rho_std": lambda s: 1e-6 if s < 25 else 0.2}, {}),
    "no signal": ({"groups__no_signal_frac": lambda s: 0.1 if s < 25 else 1.0}, {}),
    "other weights or prompts": (
        {"critic__rewards__mean": falls(30, 4), "actor__entropy": lambda s: 0.3 if s < 30 else 1.2},
        {},
    ),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_the_first_suspect(cause):
    changed, keys = PLANTED[cause]
    finding = find("run", records(**changed), tiny_recipe(**keys).model_dump(mode="json"))
    assert not finding.is_healthy
    assert finding.suspects[0].causes[0] == cause
    assert finding.suspects[0].test or finding.suspects[0].apart


def test_stale_weights_are_suspected():
    recipe = {"rollout": {"max_staleness": 4}}
    finding = find("run", records(critic__rewards__mean=SLOWLY), recipe)
    assert finding.suspects[0].name == "staleness"


def test_every_cause_is_held_by_a_planted_one():
    assert {cause.name for cause in CAUSES} == {*PLANTED, "staleness", "dose of mismatch"}


def test_where_no_suspect_fits_the_earliest_departure_is_told():
    repeats = {"response__repetition_frac": lambda s: 0.0 if s < 23 else 0.5, "alarm__own": lambda s: float(s == 25)}
    finding = find("run", records(**repeats), {})
    assert finding.suspects == ()
    said = page(finding, None)
    assert "no suspect fits; the earliest departure is response/repetition_frac at step 23" in said
    assert "not measured, so that nothing is said of it: " in said
    assert "router/agree_frac" in said


def test_a_run_is_held_against_another_one():
    """What was wrong from the start has no healthy stretch."""
    good, bad = records(), records(mismatch__rho_std=0.2, critic__rewards__mean=0.3)
    finding = find("run", bad, {}, good=good)
    assert (finding.suspects[0].name, finding.onset) == ("mismatch", 0)
    assert "What left the other run's curves (there → here), in order:\n  step     0  mismatch" in page(finding, None)
    assert "in order:\n  nothing" in page(find("run", records(), {}, good=good), None)
    # In the first step nothing was learned.
    low = {"critic__rewards__mean": 0.05, "groups__no_signal_frac": 0.9}
    assert find("run", records(**low), {}, good=good).suspects[0].name == "reward or other weights or prompts"
    others = find("run", records(**low, actor__entropy=1.5), {}, good=good).suspects
    assert [(s.name, s.is_last) for s in others[:2]] == [("other weights or prompts", False), ("no signal", True)]
    keys = [Event(0, "recipe", "learner.optimizer.weight_decay", 0.0, 9.0)]
    assert find("run", bad, {}, keys, good).suspects[0].name == "recipe change"


def test_groups_that_differ_without_any_signal_inside_are_copies_or_rewards_of_prompts():
    alike = {"groups__no_signal_frac": 1.0, "actor__grad_norm": 0.0}
    for solved, name in ((0.4, "no signal"), (0.0, "reward"), (1.0, "reward")):
        rows = records(**alike, groups__all_solved_frac=solved, groups__none_solved_frac=1 - solved)
        assert find("run", rows, {}).suspects[0].name == name
        against = find("run", rows, {}, good=records(groups__all_solved_frac=0.0, groups__none_solved_frac=0.0))
        assert "no signal" in {cause for suspect in against.suspects[:2] for cause in suspect.causes}


def test_a_reward_that_breaks_under_the_same_policy_is_the_judges_the_answers_or_the_prompts():
    rows = records(critic__rewards__mean=lambda s: 0.8 if s < 20 else 0.2)
    first = find("run", rows, {}).suspects[0]
    assert first.observation.endswith("by the same policy: judge, answers or prompts are others")
    assert {"reward.name", "data.train", "data.prompt"} <= {*first.keys}


@pytest.mark.parametrize(
    ("updates", "first", "is_large"),
    [
        ({"noise__relative_update": 6e-3}, "learning rate", True),
        ({"actor__ppo_kl": 0.1}, "reward or prompts", True),
        ({}, "reward or prompts", False),
    ],
)
def test_large_updates_may_lose_a_reward_at_once(updates, first, is_large):
    found = find("run", records(critic__rewards__mean=falls(30, 1), **updates), {}).suspects
    assert found[0].name == first
    reward = next(suspect for suspect in found if "reward" in suspect.causes)
    assert reward.contradicts == ("updates are large: these may lose it as fast",) * is_large


def test_a_fall_that_lasts_is_a_sign():
    fell = find("run", records(critic__rewards__mean=lambda s: (0.6 if s < 20 else 0.45) + 0.01 * (s % 2)), {})
    assert [sign.name for sign in fell.signs] == ["reward-fell"]
    assert 17 <= fell.onset <= 20
    assert find("run", records(critic__rewards__mean=lambda s: 0.45 if 20 <= s < 30 else 0.6), {}).is_healthy


def test_a_log_without_mismatch_says_that_the_engine_would_look_the_same():
    rows = records(critic__rewards__mean=falls(30, 1))
    assert find("run", rows, {}).suspects[0].name == "reward or prompts"
    without = [{name: value for name, value in row.items() if name != "mismatch/rho_std"} for row in rows]
    first = find("run", without, {}).suspects[0]
    assert (first.name, "rollout" in first.keys) == ("reward or prompts or mismatch", True)


def test_updates_that_grow_at_the_same_rate_are_not_the_rates():
    grown = {"noise__relative_update": lambda s: 5e-4 if s < 25 else 9e-3, "critic__rewards__mean": falls(28, 20)}
    names = [find("run", records(**grown, actor__lr=rate), {}).suspects[0].name for rate in (1e-4, grown_rate)]
    assert names == ["optimizer or objective or reward", "learning rate"]


def grown_rate(step: int) -> float:
    return 1e-4 if step < 25 else 2e-3


def test_what_somebody_changed_before_the_sign_comes_first_and_frees_what_was_as_high_before():
    """A number above a constant of tiny models is no cause where it was as high in the healthy stretch."""
    changed = {"critic__rewards__mean": falls(22, 20), "noise__relative_update": 4e-3}
    history = [
        Event(20, "recipe", "objective.entropy_bonus", 0.0, 1.0),
        Event(20, "recipe", "monitor.plots", True, False, "none"),
        Event(50, "recipe", "batch.prompts", 16, 8),
    ]
    assert find("run", records(**changed), {}).suspects[0].name == "learning rate"
    finding = find("run", records(**changed), {}, history)
    assert [suspect.name for suspect in finding.suspects] == ["recipe change"]
    assert finding.suspects[0].keys == ("objective.entropy_bonus",)
    assert finding.suspects[0].test == ("objective.entropy_bonus=0.0",)
    assert 20 <= finding.onset <= finding.first_sign
    assert finding.changed_at == 20
    with_rate = [*history, Event(20, "recipe", "learner.optimizer.lr", 1e-4, 1e-3)]
    assert [s.name for s in find("run", records(**changed), {}, with_rate).suspects] == [
        "recipe change",
        "learning rate",
    ]


def test_a_change_after_the_departure_is_no_cause():
    changed = {"critic__rewards__mean": falls(30, 12), "mismatch__rho_std": lambda s: 1e-6 if s < 22 else 0.2}
    finding = find("run", records(**changed), {}, [Event(24, "recipe", "batch.prompts", 16, 8)])
    late = next(suspect for suspect in finding.suspects if suspect.name == "recipe change")
    assert late.contradicts == ("mismatch/rho_std had departed at step 22",)


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.1])
def test_a_reward_is_judged_by_its_range(scale):
    """Shifted below 0, the same curve collapses as well; noise around a level never does."""
    shift = -1.0 if scale < 0 else 0.0
    falling = records(critic__rewards__mean=lambda s: abs(scale) * falls(30, 5)(s) + shift)
    steady = records(critic__rewards__mean=lambda s: shift + abs(scale) * (0.5 + 0.05 * ((s * 7) % 5 - 2)))
    assert find("run", falling, {}).collapse is not None
    assert find("run", steady, {}).is_healthy


def test_what_a_log_does_not_have_is_no_sign_of_health():
    said = page(find("run", [{"step": s, "actor/entropy": 0.3} for s in range(30)], {}), None)
    assert "cannot tell: the log has no reward" in said
    flat = find("run", records(critic__rewards__mean=lambda s: 0.5 + 0.01 * (s % 2)), {})
    assert flat.rises is False
    assert "The reward did not rise" in page(flat, None)
    assert find("run", records(), {}).rises is True


def test_a_log_of_every_tenth_step_is_judged_by_its_records():
    rows = [record | {"step": 10 * record["step"]} for record in records(20, critic__rewards__mean=falls(15, 1))]
    finding = find("run", rows, {})
    assert (finding.onset, finding.suspects[0].causes) == (160, ("reward", "objective or reward"))


def test_the_spread_of_rho_follows_from_k3():
    rows = records(critic__rewards__mean=falls(30, 20), **{"rollout_corr/k3_kl": lambda s: 1e-4 if s < 20 else 0.2})
    finding = find("run", [{k: v for k, v in row.items() if k != "mismatch/rho_std"} for row in rows], {})
    assert finding.suspects[0].name == "mismatch"


def test_a_training_set_learned_by_heart_is_a_sign():
    rows = records(critic__rewards__mean=lambda s: min(1.0, 0.5 + 0.01 * s))
    for row in rows[::10]:
        row["val/reward/mean"] = 0.6 if row["step"] < 30 else 0.35
    finding = find("run", rows, {})
    assert "learned-by-heart" in [sign.name for sign in finding.signs]
    assert finding.suspects[0].name == "data or validation"


def test_a_healthy_run_has_no_suspect_whatever_its_recipe():
    recipe = tiny_recipe(rollout={"temperature": 0.3}, batch={"minibatches": 8}).model_dump(mode="json")
    finding = find("run", records(), recipe)
    assert finding.is_healthy
    assert (finding.signs, finding.changes, finding.suspects) == ((), (), ())


def test_a_risk_is_a_sign_but_no_onset():
    """What changes long after the warning, near the harm, is looked at."""
    changed = {"noise__relative_update": 4e-3, "critic__rewards__mean": falls(40, 15)}
    finding = find("run", records(80, **changed), {})
    assert (finding.signs[0].name, finding.signs[0].step) == ("update-size", 2)
    assert 40 < finding.first_sign == next(sign.step for sign in finding.signs if sign.name == "reward-break")
    assert [change.metric for change in finding.changes] == ["critic/rewards/mean"]
    harmless = find("run", records(80, noise__relative_update=4e-3), {})
    assert (harmless.first_sign, harmless.suspects[0].name) == (2, "learning rate")


def test_what_went_first_stands_first():
    changed = {"mismatch__rho_std": lambda s: 1e-6 if s < 20 else 1e-2, "critic__rewards__mean": falls(40, 15)}
    finding = find("run", records(80, **changed), {"learner": {"dtype": "fp32"}, "rollout": {"dtype": "fp32"}})
    assert (finding.changes[0].metric, finding.changes[0].step) == ("mismatch/rho_std", 20)
    assert {sign.name for sign in finding.signs if sign.step < 40} == {"mismatch-contract", "mismatch-surge"}
    assert finding.collapse == next(sign.step for sign in finding.signs if sign.name == "collapse")


@pytest.mark.parametrize(
    ("over", "changed_at", "first"),
    [
        (1, 28, "recipe change"),  # at once
        (1, 20, "reward or prompts"),  # a jump, long after
        (25, 22, "recipe change or objective or reward"),  # by and by, long after: metrics do not tell
    ],
)
def test_a_change_that_a_jump_follows_late_does_not_come_first(over, changed_at, first):
    event = Event(changed_at, "recipe", "objective.entropy_bonus", 0.0, 1e-5)
    found = find("run", records(critic__rewards__mean=falls(30, over)), {}, [event]).suspects
    assert found[0].name == first
    assert any("recipe change" in suspect.name for suspect in found)


@pytest.mark.parametrize(("step", "is_suspect"), [(29, True), (20, False)])
def test_another_host_is_a_suspect_only_where_something_follows_at_once(step, is_suspect):
    event = Event(step, "environment", "hardware.host", "a", "b", "weak")
    found = find("run", records(critic__rewards__mean=falls(30, 1)), {}, [event]).suspects
    assert any("environment" in suspect.name for suspect in found) == is_suspect


# -- recorded runs

STUDIES = REPOSITORY / "docs" / "lab" / "runs"


def shares(study: str, arm: str, suspect: str) -> tuple[int, int]:
    """Of the arm's runs with a sign: how many there are, and how many have ``suspect`` among their first two."""
    runs = [
        find(run.name, run.records, run.recipe)
        for run in read_packed(STUDIES / f"{study}.jsonl.xz")
        if run.name.startswith(f"{study}/{arm}-seed")
    ]
    unwell = [finding for finding in runs if not finding.is_healthy]
    return len(unwell), sum(any(suspect in s.causes for s in finding.suspects[:2]) for finding in unwell)


@pytest.mark.parametrize(("arm", "least"), [("int4", 8), ("stale", 8)])
def test_doses_of_mismatch_are_suspected_in_the_labs_runs(arm, least):
    unwell, right = shares("mismatch", arm, "dose of mismatch")
    assert unwell >= least
    assert right == unwell


@pytest.mark.parametrize("arm", ["fp32", "fp16", "bf16-rollout"])
def test_no_dose_is_suspected_where_there_is_none(arm):
    assert shares("precision", arm, "dose of mismatch")[1] == 0


# -- the command


def written(folder: Path, rows: list[dict[str, float]], **keys) -> Path:
    run = WrittenRun(folder)
    run.directory.recipe.write_text(tiny_recipe(name="run", **keys).model_dump_json())
    sink = JsonlSink(run.directory.metrics)
    for row in rows:
        sink.write(row["step"], {name: value for name, value in row.items() if name != "step"})
    return folder


def test_the_page_names_signs_changes_suspects_and_a_run_that_decides(tmp_path, capsys):
    changed, _ = PLANTED["learning rate"]
    folder = written(tmp_path / "run", records(**changed), learner={"optimizer": {"lr": 3e-3}})
    assert main(["run", "why", str(folder)]) == 0
    page = capsys.readouterr().out
    assert "reward-drop" in page
    assert "the first departure: " in page
    assert "1. learning rate: one update changes the weights by 0.40% of their size" in page
    assert "for: by a constant of tiny models" in page
    assert f"megatron-rl train {folder}/recipe.resolved.yaml --set name=run-learning-rate" in page
    test = next(line for line in page.splitlines() if "test:" in line)
    overrides = [part.strip() for part in test.split("--set ")[1:]]
    recipe = load_recipe(folder / "recipe.resolved.yaml", overrides)
    assert (recipe.name, recipe.learner.optimizer.lr) == ("run-learning-rate", 1e-3)
    assert main(["run", "why", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["healthy"], told["suspects"][0]["name"]) == (False, "learning rate")


@pytest.mark.parametrize(("checkpoints", "start"), [((10, 20, 30), ""), ((30, 35), " --from 0"), ((), " --from 0")])
def test_the_page_ends_with_a_branch_that_has_where_to_start(tmp_path, capsys, checkpoints, start):
    folder = make_run(tmp_path / "sick", checkpoints=checkpoints)
    assert main(["run", "why", str(folder)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"`megatron-rl run branch {folder}{start}`" in last
    assert ("no checkpoint is as early" in last) == bool(start)
    plan_branch(folder, from_step=0 if start else None)  # accepted, and so not refused


def test_the_page_of_a_healthy_run_says_so(tmp_path, capsys):
    folder = written(tmp_path / "run", records())
    assert main(["run", "why", str(folder / "metrics.jsonl")]) == 0
    assert capsys.readouterr().out.endswith("60 steps, no rule went off and no reward collapsed: nothing to explain\n")


def test_what_is_missing_is_named(tmp_path, capsys):
    folder = written(tmp_path / "run", records())
    (folder / "recipe.resolved.yaml").unlink()
    assert main(["run", "why", str(folder)]) == 2
    assert "recipe.resolved.yaml: cannot be read" in capsys.readouterr().err
    assert main(["run", "why", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(("falls", "found"), [(0.0, 0), (0.25, 100)])
def test_noise_of_the_reward_is_no_fall(falls, found):
    """100 rewards with noise about a level of 0.5, and about one that is lost from step 40 on."""
    told = 0
    for seed in range(100):
        noise = (0.15 if falls == 0 else 0.02) * np.random.default_rng(seed).standard_normal(80)
        records = [{"step": i, "critic/rewards/mean": 0.5 - falls * (i >= 40) + float(x)} for i, x in enumerate(noise)]
        told += _lasting_fall(records) is not None
    assert told == found
