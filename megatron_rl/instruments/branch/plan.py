"""What a branch runs: the checkpoint it starts from, the outcome that tells a cure, and the study of its arms."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from megatron_rl.checkpoint.manifest import checkpoint_name, checkpoint_step, list_checkpoints
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.arms import CHANGE, CONTROL, Arm, LeftOut, arms_of, reason_of, undoing
from megatron_rl.instruments.lab.jobs import Job, LoadedStudy
from megatron_rl.instruments.lab.study import Direction, Study
from megatron_rl.instruments.why.changed import history_of, value_at
from megatron_rl.instruments.why.onset import find
from megatron_rl.monitor import RunDirectory, read_metrics
from megatron_rl.run.identity import read_recipe, recipe_in_force
from megatron_rl.run.prepare import check_recipe

Records = Sequence[Mapping[str, float]]

FOLDER = "branch"  # of a run: the arms' runs
AFTERWARDS = 20  # steps beyond the first sign, so that an arm has the time to differ
BEFORE = 10  # steps before the checkpoint: the level that an arm has to bring back
SPARED = ("checkpoint.export_hf", "monitor.plots", "monitor.tensorboard")
NEVER = 1_000_000  # consecutive overflows: more than an arm has updates
DECISIVE = 0.25  # share of the loss: a smaller difference from the control counts as none

OUTCOMES = {
    "reward": ("critic/score/mean", 0.8, 0.0),  # without penalties of length, which an arm may change
    "mismatch": ("mismatch/rho_std", 0.0, 1.5),
    "gradient": ("actor/grad_norm", 0.5, 2.0),
}
"""What an arm may bring back, by the name that --outcome takes (any other metric has its own name): the metric, and its
level afterwards over that before, at most or at least, from which it counts as lost; 0: not in that way."""
LEARNED = frozenset({"critic/score/mean", "critic/rewards/mean", "val/reward/mean"})
"""What a run is meant to raise: an arm may raise it also where nothing of it was lost."""


@dataclass(frozen=True)
class Loss:
    """What the run lost: a metric's level ``before`` the checkpoint and ``after`` it, over the steps that count."""

    name: str
    metric: str
    before: float
    after: float

    @property
    def back(self) -> Direction:
        """The direction of a cure."""
        return "higher" if self.after < self.before or self.metric in LEARNED else "lower"

    @property
    def size(self) -> float:
        """What was lost; 0 where a run learned nothing and lost nothing."""
        return max(0.0, self.before - self.after if self.back == "higher" else self.after - self.before)

    @property
    def margin(self) -> float:
        """The largest difference from the control that counts as none."""
        return DECISIVE * self.size


@dataclass(frozen=True)
class Branch(LoadedStudy):
    """The study of a branch. Seed 0 has the run's own random numbers, the others draw other samples from the same
    prompts. ``study.base``: the recipe of the run."""

    parent: Path = Path()  # the run's folder
    recipe_of_run: Recipe | None = None
    checkpoint: Path | None = None  # None: the arms start where the run started
    steps: int = 0  # of each arm
    onset: int | None = None
    loss: Loss | None = None
    arms: tuple[Arm, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def root(self) -> Path:
        """The default folder of the arms' runs."""
        return self.parent / FOLDER / checkpoint_name(self.begin)

    @property
    def first_step(self) -> int:
        """The first step that counts: the arms' second half."""
        return first_that_counts(self.begin, self.steps)

    def seed_values(self, arm: str, seed: int) -> dict[str, Any]:
        """Return what ``seed`` sets in a run of ``arm``; the order of the prompts stays, unless the arm changes it."""
        recipe = self.recipe_of_run
        own = next((item.keys for item in self.arms if item.name == arm), {})
        data_seed = own.get("data.seed", recipe.data.seed)
        return {"seed": recipe.seed + seed, "rollout.seed": recipe.rollout.seed + seed, "data.seed": data_seed}

    def recipe(self, job: Job) -> Recipe:
        """Return the recipe of one run. What the run's own recipe is warned of, its arms may be as well."""
        return _load(self.base, job.overrides)

    def settings(self, job: Job) -> list[str]:
        """Return the recipe of ``job`` as arguments of `train`."""
        return [str(self.base), *(part for override in job.overrides for part in ("--set", override))]

    def command(self, job: Job, root: Path) -> list[str]:
        """Return the command that runs ``job`` here, on as many ranks as the run had: from the run's checkpoint, until
        the arm has one of its own."""
        ranks, local = ranks_of(RunDirectory(self.parent))
        if ranks != local:
            raise InputError(
                f"{self.parent}: ran on {ranks} ranks, {local} of them on a node; --print-jobs prints a command for "
                "Slurm for each arm"
            )
        has_own = bool(list_checkpoints(RunDirectory(root / job.name).checkpoints))
        resume = "auto" if has_own or self.checkpoint is None else str(self.checkpoint)
        several = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
        return [sys.executable, "-m", *several, "megatron_rl", "train", *self.settings(job), "--resume", resume]

    def changes(self, arm: Arm) -> dict[str, list[Any]]:
        """Return the keys that ``arm`` changes: key → the run's value and the arm's."""
        old = self.recipe_of_run.model_dump(mode="json")
        return {key: [value_at(old, key, None), value] for key, value in arm.keys.items()}

    def submission(self, job: Job) -> list[str]:
        """Return the command that submits ``job`` to Slurm, from a checkout; options of sbatch go behind the first."""
        script = "train_servers" if self.recipe_of_run.rollout.engine == "vllm_server" else "train"
        name = f"--job-name={self.parent.name}-{job.name}"
        begin = [] if self.checkpoint is None else ["--begin-from", str(self.checkpoint)]
        return ["slurm/submit.sh", name, f"slurm/{script}.sbatch", *self.settings(job), *begin]


def first_that_counts(begin: int, steps: int) -> int:
    """Return the first step of the second half of ``steps`` from ``begin`` on."""
    return begin + steps - max(1, steps // 2)


def ranks_of(directory: RunDirectory) -> tuple[int, int]:
    """Return the ranks of a run, all of them and those of one node, as its environment.json says."""
    try:
        variables = json.loads(directory.environment.read_text(encoding="utf-8")).get("variables", {})
        ranks = int(variables.get("WORLD_SIZE", 1))
        return ranks, int(variables.get("LOCAL_WORLD_SIZE", ranks))
    except (OSError, ValueError, AttributeError):
        return 1, 1


def checkpoint_before(directory: RunDirectory, onset: int | None, from_step: int | None) -> tuple[Path | None, int]:
    """Return the checkpoint of ``from_step``, or the newest up to ``onset``, and its step; none for the start, 0."""
    there = {checkpoint_step(path): path for path in list_checkpoints(directory.checkpoints)}
    early = [step for step in there if onset is not None and step <= onset]
    step = from_step if from_step is not None or not early else max(early)
    if step is None or (step and step not in there):
        asked, where = "", f"at or before the onset, step {onset}"
        if from_step is not None:
            asked, where = f"--from {from_step}: ", "of this step"
        raise InputError(
            f"{asked}{directory.checkpoints}: no complete checkpoint {where}; steps that have one: "
            f"{', '.join(map(str, there)) or 'none'}. --from 0 starts the arms where the run started, --from STEP at "
            "one of these"
        )
    return there.get(step), step


def levels(records: Records, metric: str, begin: int, first_step: int, end: int) -> tuple[float, float] | None:
    """Return the mean of ``metric`` before ``begin`` and over the steps that count; None without both. A run that ended
    before ``first_step`` has the mean of its last five values, one that starts at step 0 has its first value before.
    """
    seen = [(int(r["step"]), float(r[metric])) for r in records if math.isfinite(r.get(metric, math.nan))]
    before = [value for step, value in seen if begin - BEFORE <= step < begin] or [v for s, v in seen if s == begin][:1]
    after = [value for step, value in seen if first_step <= step < end] or [v for s, v in seen if s > begin][-5:]
    return (fmean(before), fmean(after)) if before and after else None


def loss_of(records: Records, begin: int, steps: int, outcome: str | None) -> Loss:
    """Return what was lost: of the metric ``outcome``, or the first of `OUTCOMES` that is clearly worse afterwards."""
    first = first_that_counts(begin, steps)
    not_lost = []
    for name in OUTCOMES if outcome is None else (outcome,):
        metric, least, most = OUTCOMES.get(name, (name, 0.0, 0.0))
        pair = levels(records, metric, begin, first, begin + steps)
        if pair is None:
            not_lost.append(f"{metric} was not measured both before step {begin} and from step {first} on")
            continue
        before, after = pair
        is_worse = (least and after <= least * before) or (most and after >= most * before)
        if (is_worse or outcome) and (before != after or (outcome and metric in LEARNED)):
            return Loss(name, metric, before, after)
        not_lost.append(f"{metric} is {before:.3g} before step {begin} and {after:.3g} from step {first} on")
    raise InputError(
        "there is nothing to bring back:\n"
        + "\n".join(f"  {line}" for line in not_lost)
        + "\n  name another metric with --outcome (a reward also where it was low from the start), another checkpoint "
        "with --from, or more --steps"
    )


def common_keys(recipe: Recipe, begin: int, steps: int) -> dict[str, Any]:
    """Return what all arms have beside their own keys: an end, and nothing on disk or in a service that they can spare.

    No alarm ends an arm, so that all are compared over the same steps; one that halves the rate still does. A schedule
    that ends at the run's last step keeps its end.
    """
    keys: dict[str, Any] = dict.fromkeys(SPARED, False)
    keys |= {"num_steps": begin + steps, "checkpoint.keep_last": 1, "learner.max_consecutive_overflows": NEVER}
    keys |= {"recorder.record_batches": "off", "recorder.evidence": None}
    for number, rule in enumerate(recipe.monitor.alarms):
        kept = [action for action in rule.then if action in ("warn", "decay_lr")]
        keys |= {} if kept == rule.then else {f"monitor.alarms.{number}.then": kept or ["warn"]}
    sinks = recipe.monitor.sinks.model_dump(mode="json")
    keys |= {f"monitor.sinks.{name}": None for name, sink in sinks.items() if sink is not None}
    if recipe.schedule.style in ("linear", "cosine") and recipe.schedule.decay_steps is None:
        keys["schedule.decay_steps"] = recipe.num_updates
    return keys


def make_study(
    recipe: Recipe, base: Path, arms: Sequence[Arm], seeds: int, loss: Loss, begin: int, steps: int
) -> Study:
    """Return the study: the control, and each of ``arms`` with the prediction that it brings the loss back."""
    common = common_keys(recipe, begin, steps)
    described: dict[str, Any] = {CONTROL: {"set": common}}
    for arm in arms:
        own = {key: value for key, value in arm.keys.items() if key != "data.seed"}  # `Branch.seed_values` sets it
        expected = {"control": CONTROL, "differs_in": list(arm.keys)[:3], "expect": {"loss": loss.back}}
        described[arm.name] = {"set": common | own} | expected
    mean = {"metric": loss.metric, "statistic": "mean", "first_step": first_that_counts(begin, steps)}
    study = {
        "name": FOLDER,
        "title": f"Branch of {recipe.name}",
        "source": "`run why`",
        "claim": f"one of the arms brings {loss.metric} back",
        "setting": f"the run's own, from step {begin} on",
        "base": str(base),
        "seeds": list(range(seeds)),
        "outcomes": {"loss": mean | {"margin": loss.margin or None}},
        "arms": described,
        "figure": [{"title": loss.metric, "arms": [CONTROL]}],
    }
    try:
        return Study.model_validate(study)
    except ValidationError as error:
        raise InputError(f"the arms make no study: {'; '.join(str(e['msg']) for e in error.errors())}") from error


def plan_branch(
    run: Path,
    *,
    from_step: int | None = None,
    steps: int | None = None,
    seeds: int = 4,
    wanted: Sequence[str] | None = None,
    own: Sequence[Arm] = (),
    outcome: str | None = None,
) -> Branch:
    """Return the branch of the run in folder ``run``. A healthy run needs ``from_step``. No engine starts."""
    directory = RunDirectory(run.resolve())
    records = read_metrics(directory.metrics)
    finding = find(str(run), records, read_recipe(directory.recipe), history_of(directory, records))
    if finding.is_healthy and from_step is None:
        raise InputError(
            f"{run}: {len(records)} steps, no rule went off and no reward collapsed: there is no cause to look for; "
            "--from STEP starts the arms at a checkpoint all the same"
        )
    onset, sign = finding.onset, finding.first_sign or 0
    checkpoint, begin = checkpoint_before(directory, onset, from_step)
    base = recipe_in_force(directory, max(begin, sign))  # which the run went wrong with, not one of before
    recipe = _load(base)
    steps = max(0, sign - begin) + AFTERWARDS if steps is None else steps
    loss = loss_of(records, begin, steps, outcome)
    events = [event for event in finding.history if event.kind == "recipe" and event.weight != "none"]
    changed = undoing([event for event in events if event.step == finding.changed_at])
    suspects = [name for s in finding.suspects for name in s.causes if not (changed and name.startswith(CHANGE))]
    names = None if wanted is None else [name for name in wanted if name not in {arm.name for arm in changed}]
    chosen, left_out = arms_of(recipe, suspects, names)
    chosen = [*(arm for arm in changed if wanted is None or arm.name in wanted), *chosen, *own]
    study = make_study(recipe, base, chosen, seeds, loss, begin, steps)
    draft = Branch(study, base, begin, directory.root, recipe, checkpoint, steps, onset, loss, tuple(chosen))
    refused = _refused(draft)
    if names := [arm.name for arm in own if arm.name in refused]:
        raise InputError(f"--arm {names[0]}: {refused[names[0]]}")
    kept = tuple(arm for arm in chosen if arm.name not in refused)
    left_out += [LeftOut(name, reason) for name, reason in refused.items()]
    if not kept:
        reasons = "\n".join(f"  {item.name}: {item.reason}" for item in left_out)
        raise InputError(f"{run}: no arm applies to this recipe; --arm NAME KEY=VALUE adds your own\n{reasons}")
    study = make_study(recipe, base, kept, seeds, loss, begin, steps)
    return replace(draft, study=study, arms=kept, left_out=tuple(left_out))


def _load(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load_recipe(path, overrides)


def _refused(branch: Branch) -> dict[str, str]:
    """Return arms whose recipe is refused, with the reason. Raises `InputError` if the control's is."""
    refused = {}
    for job in branch.jobs(branch.root, seeds=[0]):
        try:
            check_recipe(branch.recipe(job), offline=True)
        except InputError as error:
            if job.arm == CONTROL:
                raise
            refused[job.arm] = reason_of(error)
    return refused
