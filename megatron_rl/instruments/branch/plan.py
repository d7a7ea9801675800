"""What a branch runs: the checkpoint it starts from, the outcome that tells a cure, and the study of its arms."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from megatron_rl.checkpoint.manifest import checkpoint_name, checkpoint_step, list_checkpoints, newest_checkpoint
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.branch.arms import CHANGE, CONTROL, Arm, LeftOut, arms_of, reason_of, undoing
from megatron_rl.instruments.lab.jobs import Job, LoadedStudy
from megatron_rl.instruments.lab.study import Direction, Study
from megatron_rl.instruments.why.changed import history_of
from megatron_rl.instruments.why.onset import find
from megatron_rl.monitor import RunDirectory, read_metrics
from megatron_rl.run.identity import read_recipe, recipe_in_force
from megatron_rl.run.prepare import check_recipe

Records = Sequence[Mapping[str, float]]

FOLDER = "branch"  # of a run: the arms' runs
AFTERWARDS = 20  # steps beyond the first sign, so that an arm has the time to differ
BEFORE = 10  # steps before the checkpoint: the level that an arm has to bring back
NEVER = 1_000_000  # consecutive overflows: more than an arm has updates
DECISIVE = 0.25  # share of the loss: a smaller difference from the control counts as none

OUTCOMES = {
    "reward": "critic/score/mean",  # without penalties of length, which an arm may change
    "mismatch": "mismatch/rho_std",
    "gradient": "actor/grad_norm",
}
"""What an arm may bring back, by the name that --outcome takes; any other metric has its own name."""
LEARNED = frozenset({"critic/score/mean", "critic/rewards/mean", "val/reward/mean"})
"""What a run is meant to raise: an arm may raise it also where nothing of it was lost."""
WORSE = {"reward": (0.8, 0.0), "mismatch": (0.0, 1.5), "gradient": (0.5, 2.0)}
"""Level afterwards over level before, at most or at least, from which a metric counts as lost; 0: not in that way."""


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
    """The study of a branch. Its seeds count from 0, which stands for the run's own random numbers.

    All other seeds draw other samples from the same prompts. ``study.base``: the recipe of the run.
    """

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
        """Return the command that runs ``job`` here, on as many ranks as the run had.

        It begins from the run's checkpoint, until the arm has one of its own. Raises `InputError` if the run had ranks
        on several nodes.
        """
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

    def submission(self, job: Job) -> list[str]:
        """Return the command that submits ``job`` to Slurm, from a checkout; options of sbatch go behind the first."""
        script = "train_servers" if self.recipe_of_run.rollout.engine == "vllm_server" else "train"
        name = f"--job-name={self.parent.name}-{job.name}"
        begin = [] if self.checkpoint is None else ["--begin-from", str(self.checkpoint)]
        return ["slurm/submit.sh", name, f"slurm/{script}.sbatch", *self.settings(job), *begin]

    @property
    def parent_ends_at(self) -> int:
        """The step of the run's last record, which may have a validation alone."""
        return self.recipe_of_run.num_steps

    def planned_seconds(self, num_jobs: int) -> float | None:
        """Return seconds of ``num_jobs`` arms one after another, by the run's own steps; None where it timed none."""
        times = [r["perf/time/step"] for r in read_metrics(self.parent) if "perf/time/step" in r]
        return median(times) * self.steps * num_jobs if times else None


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
    """Return the checkpoint to start from and its step: of ``from_step``, or the newest up to ``onset``.

    Step 0 is where the run started, without a checkpoint. Raises `InputError` where there is no such checkpoint.
    """
    there = {checkpoint_step(path): path for path in list_checkpoints(directory.checkpoints)}
    shown = ", ".join(map(str, there)) or "none"
    if from_step is not None:
        if from_step and from_step not in there:
            raise InputError(
                f"--from {from_step}: {directory.checkpoints} has no complete checkpoint of this step; steps that have "
                f"one: {shown}"
            )
        return there.get(from_step), from_step
    newest = None if onset is None else newest_checkpoint(directory.checkpoints, onset)
    if newest is None:
        raise InputError(
            f"{directory.checkpoints}: no complete checkpoint at or before the onset, step {onset}; steps that have "
            f"one: {shown}. --from 0 starts the arms where the run started, --from STEP at one of these"
        )
    return newest, checkpoint_step(newest)


def levels(records: Records, metric: str, begin: int, first_step: int, end: int) -> tuple[float, float] | None:
    """Return the mean of ``metric`` before ``begin`` and over the steps that count; None without both.

    A run that ended before ``first_step`` has the mean of its last five values. One that starts at step 0 has its first
    value before.
    """
    seen = [(int(r["step"]), float(r[metric])) for r in records if metric in r and math.isfinite(r[metric])]
    before = [value for step, value in seen if begin - BEFORE <= step < begin] or [v for s, v in seen if s == begin][:1]
    later = [value for step, value in seen if step > begin]
    after = [value for step, value in seen if first_step <= step < end] or later[-5:]
    if not before or not after:
        return None
    return sum(before) / len(before), sum(after) / len(after)


def loss_of(records: Records, begin: int, steps: int, outcome: str | None) -> Loss:
    """Return what was lost: of the metric ``outcome``, or the first of `OUTCOMES` that is clearly worse afterwards.

    Raises `InputError` where nothing was lost.
    """
    window = (begin, first_that_counts(begin, steps), begin + steps)
    not_lost = []
    for name in OUTCOMES if outcome is None else (outcome,):
        metric = OUTCOMES.get(name, name)
        pair = levels(records, metric, *window)
        if pair is None:
            not_lost.append(f"{metric} was not measured both before step {begin} and from step {window[1]} on")
            continue
        loss = Loss(name, metric, *pair)
        if outcome is None:
            least, most = WORSE[name]
            is_lost = (least and loss.after <= least * loss.before) or (most and loss.after >= most * loss.before)
            is_lost = is_lost and loss.before != loss.after
        else:
            is_lost = loss.after != loss.before or metric in LEARNED
        if is_lost:
            return loss
        not_lost.append(
            f"{metric} is {loss.before:.3g} before step {begin} and {loss.after:.3g} from step {window[1]} on"
        )
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
    end = begin + steps
    schedule = recipe.schedule
    keys: dict[str, Any] = {
        "num_steps": end,
        "checkpoint.keep_last": 1,
        "checkpoint.export_hf": False,
        "learner.max_consecutive_overflows": NEVER,
        "monitor.plots": False,
        "monitor.tensorboard": False,
        "recorder.record_batches": "off",
        "recorder.evidence": None,
    }
    for number, rule in enumerate(recipe.monitor.alarms):
        kept = [action for action in rule.then if action in ("warn", "decay_lr")]
        keys |= {} if kept == rule.then else {f"monitor.alarms.{number}.then": kept or ["warn"]}
    sinks = recipe.monitor.sinks.model_dump(mode="json")
    keys |= {f"monitor.sinks.{name}": None for name, sink in sinks.items() if sink is not None}
    if schedule.style in ("linear", "cosine") and schedule.decay_steps is None:
        keys["schedule.decay_steps"] = recipe.num_updates
    return keys


def make_study(
    recipe: Recipe, base: Path, arms: Sequence[Arm], seeds: int, loss: Loss, begin: int, steps: int
) -> Study:
    """Return the study: the control, and each of ``arms`` with the prediction that it brings the loss back."""
    common = common_keys(recipe, begin, steps)
    mean = {"metric": loss.metric, "statistic": "mean", "first_step": first_that_counts(begin, steps)}
    described: dict[str, Any] = {CONTROL: {"set": common}}
    for arm in arms:
        own = {key: value for key, value in arm.keys.items() if key != "data.seed"}  # `Branch.seed_values` sets it
        described[arm.name] = {
            "set": common | own,
            "control": CONTROL,
            "differs_in": list(arm.keys)[:3],
            "expect": {"loss": loss.back},
        }
    try:
        return Study.model_validate(
            {
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
        )
    except ValidationError as error:
        problems = "; ".join(str(item["msg"]) for item in error.errors())
        raise InputError(f"the arms make no study: {problems}") from error


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
    """Return the branch of the run in folder ``run``. No engine starts.

    Raises `InputError` for a healthy run (unless ``from_step`` is given), without a checkpoint to start from, where
    nothing was lost, or where no arm applies.
    """
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
    if steps is None:
        steps = max(0, sign - begin) + AFTERWARDS
    loss = loss_of(records, begin, steps, outcome)
    is_change = [e.kind == "recipe" and e.weight != "none" and e.step == finding.changed_at for e in finding.history]
    changed = undoing([event for event, decides in zip(finding.history, is_change, strict=True) if decides])
    suspects = [name for s in finding.suspects for name in s.causes if not (changed and name.startswith(CHANGE))]
    names = None if wanted is None else [name for name in wanted if name not in {arm.name for arm in changed}]
    chosen, left_out = arms_of(recipe, suspects, names)
    chosen = [*(arm for arm in changed if wanted is None or arm.name in wanted), *chosen, *own]
    study, arms = make_study(recipe, base, chosen, seeds, loss, begin, steps), tuple(chosen)
    draft = Branch(study, base, begin, directory.root, recipe, checkpoint, steps, onset, loss, arms)
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
    return _loaded(path, path.stat().st_mtime_ns if path.is_file() else 0, overrides)


@cache
def _loaded(path: Path, changed: int, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, read once for each time ``changed`` of its file."""
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
