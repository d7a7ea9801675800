"""Studies of the lab: what ships is matched to its controls, and a study that is not is refused with its reason."""

from __future__ import annotations

import json
import lzma
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_rl.errors import InputError
from megatron_rl.instruments.lab import load_study

LAB = Path(__file__).parents[4] / "recipes" / "lab"
FILES = sorted([*LAB.glob("*/study.yaml"), *LAB.glob("*/scale.yaml")])
SHIPPED = sorted(path.parent.name for path in LAB.glob("*/study.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_spread_of_rewards_is_that_of_the_pairs_which_its_pilots_name(name):
    """A study without such pairs has the spread of another study that it names, or none."""
    study = load_study(LAB / name).study
    texts = [text for text in study.pilots if "101 to 106" in text]
    if not texts:
        named = set(re.findall(r"study (\w+)", " ".join([study.setting, *study.pilots]))) & set(SHIPPED) - {name}
        assert named or not any(outcome.spread for outcome in study.outcomes.values())
        return
    (text,) = texts
    pairs = re.search(r"differ by (.*?)(?: in reward)?, a standard", " ".join(text.split())).group(1)
    differences = [float(number) for number in re.findall(r"-?\d\.\d{3}", pairs)]
    assert len(differences) == 6
    assert study.outcomes["reward"].spread == round(statistics.stdev(differences), 3)


def test_the_spread_of_early_reward_is_that_of_floors_runs():
    study, runs = load_study(LAB / "remedies_early").study, {}
    with lzma.open(LAB.parents[1] / "docs" / "lab" / "runs" / "floor.jsonl.xz", "rt") as file:
        for line in file:
            run = json.loads(line)
            values = {r["step"]: r["val/reward/mean"] for r in run.get("records", ()) if "val/reward/mean" in r}
            runs[run.get("run")] = [values[step] for step in (20, 40) if step in values]
    spread = {}
    for one, other in (("int4", "int4-split"), ("exact", "int4")):
        pairs = [statistics.mean(runs[f"{one}-seed{i}"]) - statistics.mean(runs[f"{other}-seed{i}"]) for i in range(10)]
        spread[one] = round(statistics.stdev(pairs), 3)
    assert spread == {"int4": 0.112, "exact": 0.148}
    assert study.outcomes["early reward"].spread == max(spread.values())
    assert all(str(value) in " ".join(study.pilots) for value in spread.values())


@pytest.fixture
def write(tmp_path):
    """Writes a study over the lab's base: two arms that differ in the learning rate, changed as the test says."""

    def write(**changes):
        values = {
            "name": "made-up",
            "title": "A made-up study",
            "source": "nowhere",
            "claim": "a larger rate is worse",
            "setting": "any",
            "base": str(LAB / "base.yaml"),
            "outcomes": {"reward": {"metric": "val/reward/mean", "statistic": "last"}},
            "arms": {"plain": {}, "large": arm({"learner.optimizer.lr": 1e-3}, ["learner.optimizer.lr"])},
            "figure": [{"title": "rate", "arms": ["plain", "large"]}],
        } | changes
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return path

    return write


PRIMARY = {"arm": "large", "outcome": "reward"}


def outcome(**more):
    return {"outcomes": {"reward": {"metric": "m", "statistic": "last"} | more}}


def large(overrides, **more):
    return {"arms": {"plain": {}, "large": arm(overrides, ["learner.optimizer.lr"]) | more}}


def arm(overrides, differs_in, **more):
    return {"set": overrides, "control": "plain", "differs_in": differs_in, "expect": {"reward": "lower"}} | more


def test_the_papers_studies_are_there_at_both_sizes():
    studies = {"floor", "mismatch", "corrections", "hacking", "length_decay", "clock", "routing", "precision"}
    studies |= {"remedies"}
    assert studies <= set(SHIPPED)
    assert sorted(path.parent.name for path in LAB.glob("*/scale.yaml")) == sorted(studies)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_arm_passes_check_and_differs_from_its_control_as_declared(file):
    loaded = load_study(file)
    loaded.check(offline=True)
    assert loaded.study.name == file.parent.name + ("-scale" if file.stem == "scale" else "")
    assert len(loaded.study.seeds) >= 3
    compared = [arm for arm in loaded.study.arms.values() if arm.control]
    # One thing at a time; a learning-rate schedule takes several keys to say, and score centering needs a head.
    same = {"rollout.sampled_head": "objective.score_centering"}
    assert all(
        len({key.split(".")[0] if key.startswith("schedule.") else same.get(key, key) for key in arm.differs_in}) == 1
        for arm in compared
    )
    assert any(arm.expect for arm in compared)
    # What is tested for "same" has a margin, and a trend is over arms of one control.
    for primary in loaded.study.decisive():
        expected = loaded.study.arms[primary.arm].expect[primary.outcome]
        assert expected != "same" or loaded.study.outcomes[primary.outcome].margin or file.parent.name == "servers"


def objectives_of(name):
    loaded = load_study(LAB / name)
    jobs = loaded.jobs(Path("runs"), seeds=loaded.study.seeds[:1])
    return {job.arm: loaded.recipe(job) for job in jobs}


def test_the_mean_rate_is_one_rate():
    from megatron_rl.config.learner import OptimizerConfig
    from megatron_rl.learner.optimizer import build_scheduler

    recipe = objectives_of("length_decay")["mean-rate"]
    rate = recipe.schedule.min_lr
    groups = [{"default_config": True}]
    optimizer = SimpleNamespace(param_groups=groups)
    scheduler = build_scheduler(recipe.schedule, OptimizerConfig(lr=recipe.learner.optimizer.lr), optimizer, 800)
    rates = []
    for _ in range(10):
        rates.append(groups[0]["lr"])
        scheduler.step(1)
    assert rates[1:] == [rate] * 9  # all but the first of 800 updates


def test_jobs_come_seed_by_seed_and_carry_their_seed_everywhere(write, tmp_path):
    loaded = load_study(write(seeds=[7, 8]))
    jobs = loaded.jobs(tmp_path / "runs")
    assert [job.name for job in jobs] == ["plain-seed7", "large-seed7", "plain-seed8", "large-seed8"]
    recipe = loaded.recipe(jobs[3])
    assert (recipe.seed, recipe.rollout.seed, recipe.data.seed) == (8, 8, 8)
    assert recipe.learner.optimizer.lr == 1e-3
    assert recipe.run_dir == tmp_path / "runs" / "large-seed8"
    assert [job.name for job in loaded.jobs(tmp_path, seeds=[8], arms=["large"])] == ["large-seed8"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": "red"}, ["colour", "unknown key"]),
        ({"outcoms": {}}, ["outcoms", "did you mean 'outcomes'"]),
        ({"seeds": [1, 1]}, ["seeds", "twice"]),
        ({"base": "nowhere.yaml"}, ["base", "nowhere.yaml", "no such file"]),
        ({"figure": [{"title": "rate", "arms": ["plain", "larg"]}]}, ["figure.0.arms", "'larg'", "'large'"]),
        ({"outcomes": {"reward": {"metric": "m", "statistic": "median"}}}, ["outcomes.reward.statistic", "'median'"]),
        ({"primaries": [{"arm": "large", "outcome": "rewrd"}]}, ["primaries.0.outcome", "'reward'"]),
        ({"primaries": [{"arm": "plain", "outcome": "reward"}]}, ["primaries.0", "predict before you test"]),
        ({"gate": {"arm": "larg", "outcome": "reward"}}, ["gate.arm", "'large'"]),
        ({"gate": PRIMARY, "primaries": [PRIMARY]}, ["primaries", "is the gate"]),
        (
            {"trends": {"t": {"outcome": "reward", "dose": "dos", "arms": ["plain", "large"], "expect": "lower"}}},
            ["trends.t.dose", "'dos'"],
        ),
        (outcome(ratio=True, margin=0.1), ["outcomes.reward", "a factor above 1"]),
        (outcome(first_step=9, last_step=1), ["outcomes.reward", "before first_step"]),
        (large({}, control="plane"), ["arms.large.control", "'plane'", "'plain'"]),
        (large({}, control="large"), ["arms.large.control", "its own control"]),
        (large({}, control=None), ["arms.large", "no control"]),
        (large({"learner.optimizer.lr": 1}, differs_in=[]), ["arms.large.differs_in", "missing"]),
        (large({"seed": 3}, differs_in=["seed"]), ["arms.large.set.seed", "by the study itself"]),
        (large({}, expect={"rewrd": "lower"}), ["arms.large.expect", "'reward'"]),
        (large({}, expect={"reward": "better"}), ["expect.reward", "'better'"]),
    ],
)
def test_errors_name_key_and_value(write, changes, words):
    with pytest.raises(InputError) as error:
        load_study(write(**changes))
    assert all(word in str(error.value) for word in ["study.yaml", *words]), error.value


@pytest.mark.parametrize(
    ("large", "words"),
    [
        # an unmatched control: one key too many
        (
            arm({"learner.optimizer.lr": 1e-3, "batch.minibatches": 2}, ["learner.optimizer.lr"]),
            ["batch.minibatches", "not matched"],
        ),
        # a key that is declared and the same
        (arm({"learner.optimizer.lr": 1e-4}, ["learner.optimizer.lr"]), ["learner.optimizer.lr", "same value"]),
        (arm({"learner.optimiser.lr": 1e-3}, ["learner.optimizer.lr"]), ["arm large", "did you mean 'optimizer'"]),
        (arm({"batch.minibatches": 7}, ["batch.minibatches"]), ["arm large", "does not divide"]),
        # a combination that the recipe only warns of is no evidence
        (
            arm({"objective.policy_term": {"name": "gspo", "clip_low": 0.2}}, ["objective.policy_term"]),
            ["arm large", "PPO's per-token bounds"],
        ),
    ],
)
def test_check_refuses_arms_that_are_not_what_they_say(write, large, words):
    loaded = load_study(write(arms={"plain": {}, "large": large}))
    with pytest.raises(InputError) as error:
        loaded.check()
    assert all(word in str(error.value) for word in ["study.yaml", *words]), error.value


def test_names_that_the_study_has_not_are_refused(write, tmp_path):
    loaded = load_study(write())
    with pytest.raises(InputError, match=r"--arms: 'larg' does not exist; did you mean 'large'"):
        loaded.jobs(tmp_path, arms=["larg"])
    with pytest.raises(InputError, match=r"--seeds: '9' does not exist; allowed are 0, 1, 2"):
        loaded.jobs(tmp_path, seeds=[9])
