"""Change points against closed forms, suspects on made-up and on recorded runs, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.instruments.branch.plan import plan_branch
from megatron_rl.instruments.why import (
    LOOKS,
    SHORTEST,
    Case,
    _two,
    find,
    first_change,
    learning_rate,
    pettitt,
    rounding,
)
from megatron_rl.monitor.alarms import read_packed
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.rounding import rounded
from tests.support.sick_run import make_run
from tests.support.tiny import REPOSITORY, tiny_recipe
from tests.support.written_run import WrittenRun

# -- change points


@pytest.mark.parametrize(("before", "after"), [(10, 10), (5, 15), (20, 7), (15_000, 25_000)])
def test_a_clean_step_is_found_with_the_probability_of_its_closed_form(before, after):
    """K of a step is the number of pairs across it: before · after."""
    n = before + after
    at, probability = pettitt([0.0] * before + [1.0] * after)
    assert at == before
    assert probability == rounded(min(1.0, 2 * math.exp(-6 * (before * after) ** 2 / (n**3 + n**2))))


def test_a_constant_series_has_no_change():
    assert pettitt([3.0] * 50)[1] == 1.0
    assert pettitt([1.0]) == (0, 1.0)
    assert first_change("m", range(50), [3.0] * 50) is None


def test_order_alone_counts():
    values = np.random.default_rng(0).standard_normal(60)
    values[30:] += 2.0
    assert pettitt(values) == pettitt(np.exp(5 * values))


def test_the_earliest_change_is_told_not_the_largest():
    values = [1.0, 1.1] * 10 + [2.0, 2.1] * 10 + [90.0, 91.0] * 20
    change = first_change("m", range(100, 180), values)
    assert (change.step, change.before, change.after) == (120, 1.05, 2.05)
    assert change.goes_up


def test_what_is_not_finite_is_a_change():
    change = first_change("m", range(40), [1.0, 2.0] * 10 + [math.nan] * 20)
    assert change.step == 20


def test_noise_has_a_change_as_rarely_as_the_test_says():
    """At most a share SURE of series without a change; the approximation errs on the safe side."""
    rng, num_changes = np.random.default_rng(1), 0
    for _ in range(1000):
        num_changes += first_change("m", range(40), rng.standard_normal(40)) is not None
    assert num_changes <= 10


def test_short_series_have_none():
    assert first_change("m", range(7), [0.0] * SHORTEST + [1.0] * 3) is None


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
    "data": ({"critic__rewards__mean": lambda s: SLOWLY(s) / 5, "val__reward__mean": 0.7}, {}),
    "length": ({"critic__rewards__mean": SLOWLY, "response_length__mean": lambda s: 10.0 + s}, {}),
    "temperature": ({"critic__rewards__mean": SLOWLY}, {"rollout": {"temperature": 0.3}}),
    "routing": ({"critic__rewards__mean": SLOWLY, "router__agree_frac": 0.5}, {}),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_the_first_suspect(cause):
    changed, keys = PLANTED[cause]
    finding = find("run", records(**changed), tiny_recipe(**keys).model_dump(mode="json"))
    assert not finding.is_healthy
    assert finding.suspects[0].name == cause
    assert finding.suspects[0].test


def test_stale_weights_are_suspected():
    recipe = {"rollout": {"max_staleness": 4}}
    finding = find("run", records(critic__rewards__mean=SLOWLY), recipe)
    assert finding.suspects[0].name == "staleness"


def test_every_look_is_held_by_a_planted_cause():
    assert len(LOOKS) == len(PLANTED) + 2  # and staleness, and a dose


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
    assert 40 < finding.first_sign == next(sign.step for sign in finding.signs if sign.name == "reward-drop")
    assert [change.metric for change in finding.changes] == ["critic/rewards/mean"]
    harmless = find("run", records(80, noise__relative_update=4e-3), {})
    assert (harmless.first_sign, harmless.suspects[0].name) == (2, "learning rate")


def test_what_went_first_stands_first():
    changed = {"mismatch__rho_std": lambda s: 1e-6 if s < 20 else 1e-2, "critic__rewards__mean": falls(40, 15)}
    finding = find("run", records(80, **changed), {"learner": {"dtype": "fp32"}, "rollout": {"dtype": "fp32"}})
    assert (finding.changes[0].metric, finding.changes[0].step) == ("mismatch/rho_std", 20)
    assert {sign.name for sign in finding.signs if sign.step < 40} == {"mismatch-contract", "mismatch-surge"}
    assert finding.collapse == next(sign.step for sign in finding.signs if sign.name == "collapse")


@pytest.mark.parametrize(("term", "is_suspect"), [("gspo", True), ("vespo", False)])
def test_a_mismatch_that_includes_the_updates_is_no_rounding(term, is_suspect):
    """Without a pass for po, mu is compared with a pi that has moved."""
    types = {"learner": {"dtype": "bf16"}, "rollout": {"dtype": "bf16"}, "batch": {"minibatches": 4}}
    case = Case(records(**{"mismatch/rho_std": 0.5}), types | {"objective": {"policy_term": term}}, None, None)
    assert (rounding(case) is not None) == is_suspect


def test_numbers_of_a_run_without_metrics_are_absent():
    assert [look(Case([{"step": 0}], {}, None, None)) for look in LOOKS if look.__name__ in ("rounding", "data")] == [
        None,
        None,
    ]


# -- recorded runs

STUDIES = REPOSITORY / "docs" / "lab" / "runs"


def test_a_rate_that_was_raised_counts_from_the_raise_on():
    """Up to the onset alone: updates that grow at the same rate are a symptom."""
    sizes = {"noise/relative_update": lambda step: 3e-4 if step < 20 else 4e-3}
    raised = records(**sizes, **{"actor/lr": lambda step: 1e-4 if step < 20 else 1e-3})
    assert learning_rate(Case(raised, {}, 25, None)).value == 4e-3
    assert (
        "actor/lr rose from 0.0001 to 0.001 before the first sign" in learning_rate(Case(raised, {}, 25, None)).supports
    )
    assert learning_rate(Case(raised, {}, 15, None)).value == 3e-4  # the raise came after the first sign
    assert learning_rate(Case(records(**sizes, **{"actor/lr": 1e-4}), {}, 25, None)).value == 3e-4


def shares(study: str, arm: str, suspect: str) -> tuple[int, int]:
    """Of the arm's runs with a sign: how many there are, and how many have ``suspect`` among their first two."""
    runs = [
        find(run.name, run.records, run.recipe)
        for run in read_packed(STUDIES / f"{study}.jsonl.xz")
        if run.name.startswith(f"{study}/{arm}-seed")
    ]
    unwell = [finding for finding in runs if not finding.is_healthy]
    return len(unwell), sum(suspect in [s.name for s in finding.suspects[:2]] for finding in unwell)


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
    assert "first: actor/entropy" in page
    assert "1. learning rate (4×): one update changes the weights by 0.40% of their size; safe: 0.001" in page
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
    assert ("begin at step 0" in last) == bool(start)
    plan_branch(folder, from_step=0 if start else None)  # accepted, and so not refused


def test_the_page_of_a_healthy_run_says_so(tmp_path, capsys):
    folder = written(tmp_path / "run", records())
    assert main(["run", "why", str(folder / "metrics.jsonl")]) == 0
    assert capsys.readouterr().out.endswith("60 steps, no rule went off and no reward collapsed: nothing to explain\n")


def test_what_is_missing_is_named(tmp_path, capsys):
    folder = written(tmp_path / "run", records())
    (folder / "recipe.resolved.yaml").unlink()
    assert main(["run", "why", str(folder)]) == 2
    assert "`why` needs the recipe that the run wrote" in capsys.readouterr().err
    assert main(["run", "why", str(tmp_path / "nowhere")]) == 2


def test_large_numbers_have_no_exponent():
    assert [_two(value) for value in (250.0, 704.2, 1.234, 2.9e-13)] == ["250", "700", "1.2", "2.9e-13"]
