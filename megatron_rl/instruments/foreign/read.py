"""Reads a run of this or another project as the rows of a metrics.jsonl, and says what its log lacks.

First the tables: names of metrics in the logs of other projects, each beside the one of ours that means the same.

A table was read from the source of one version. A metric of theirs that only resembles one of ours is not in it: it
keeps its own name, and the rules that need ours are said to see nothing.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron_rl.config.monitor import AlarmRule
from megatron_rl.errors import InputError
from megatron_rl.instruments.foreign.files import Log, find_logs
from megatron_rl.monitor.run_directory import read_metrics

LEAST_VARIANCE = 1e-6  # verl's means are float32 numbers near 1: a smaller variance of rho is their rounding


@dataclass(frozen=True)
class Name:
    """A metric's name here and in another project. ``theirs`` has ``<…>`` for a part that varies and ``k`` for a
    number.

    Of several metrics that fit (data sets, agents) the mean is taken.
    """

    ours: str
    theirs: str
    note: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """The regular expression of the whole name ``theirs``. TensorBoard writes "_" for "@"."""
        text = re.escape(self.theirs).replace("\\ ", " ")
        for part, expression in _PARTS.items():
            text = text.replace(part, expression)
        return re.compile(text)


_AT = "(?:@|_)"
_PARTS = {
    "@k": rf"{_AT}\d+",
    "<agent>": "[^/]+",
    "<data set>": "[^/]+",
    "<data source>": ".+",  # may be "openai/gsm8k"
    "<environment>": ".+",
}


@dataclass(frozen=True)
class Project:
    """One project's table. ``marks``: names that only its logs have."""

    name: str
    version: str
    commit: str
    date: str
    names: tuple[Name, ...]
    marks: tuple[str, ...]
    first_step: int = 1
    updates: str = ""  # metrics that begin so are counted in updates, all others in batches of rollouts
    leave_out: str = ""  # an expression of names that a pattern would fit by mistake
    derived: Mapping[str, Callable[[Mapping[str, float]], float | None]] = field(default_factory=dict)

    def ours(self, theirs: str) -> list[str]:
        """Which of our metrics ``theirs`` is."""
        if self.leave_out and re.fullmatch(self.leave_out, theirs):
            return []
        return [name.ours for name in self.names if name.pattern.fullmatch(theirs)]


def _rho_std(row: Mapping[str, float]) -> float | None:
    """The standard deviation of rho = po/mu, from verl's means over tokens.

    chi2_token is E rho² - 1, k3_kl is E (rho - 1 - log rho) and kl is -E log rho, so that E rho = 1 + k3_kl - kl.
    """
    chi2, k3, kl = (row.get(f"rollout_corr/{name}") for name in ("chi2_token", "k3_kl", "kl"))
    if chi2 is None or k3 is None or kl is None or not all(map(math.isfinite, (chi2, k3, kl))):
        return None
    return math.sqrt(max(chi2 + 1 - (1 + k3 - kl) ** 2, LEAST_VARIANCE))


def _no_signal(row: Mapping[str, float]) -> float | None:
    """Groups of prime-rl in which no or every response is right, of rewards 0 and 1."""
    shares = [value for name, value in row.items() if re.fullmatch(r"train/agg/all/[^/]+/solved_some", name)]
    return 1 - sum(shares) / len(shares) if shares else None


def _same(*names: str) -> tuple[Name, ...]:
    return tuple(Name(name, name) for name in names)


_SLIME = (
    Name("critic/rewards/mean", "rollout/raw_reward"),
    Name("val/reward/mean", "eval/<data set>"),
    Name("response_length/mean", "rollout/response_len/mean"),
    Name("response_length/max", "rollout/response_len/max"),
    Name("response_length/min", "rollout/response_len/min"),
    Name("response_length/clip_ratio", "rollout/truncated_ratio"),
    Name("actor/entropy", "train/entropy_loss", "by sample or token, as the loss is"),
    Name("actor/ppo_kl", "train/ppo_kl"),
    Name("actor/pg_clipfrac", "train/pg_clipfrac"),
    Name("actor/pg_loss", "train/pg_loss"),
    Name("actor/grad_norm", "train/grad_norm"),
    Name("actor/lr", "train/lr-pg_0"),
    Name("perf/time/step", "perf/step_time"),
)
_TRL = (  # trainer_state.json; with "train/" before them in TensorBoard and W&B
    Name("critic/rewards/mean", "reward"),
    Name("response_length/mean", "completions/mean_length"),
    Name("response_length/max", "completions/max_length"),
    Name("response_length/min", "completions/min_length"),
    Name("response_length/clip_ratio", "completions/clipped_ratio"),
    Name("groups/no_signal_frac", "frac_reward_zero_std"),
    Name("actor/entropy", "entropy"),
    Name("actor/pg_clipfrac", "clip_ratio/region_mean"),
    Name("actor/grad_norm", "grad_norm"),
    Name("actor/lr", "learning_rate"),
    Name("perf/time/step", "step_time"),
)
_NO_REWARD = rf"eval/(?:step|lag_steps|skipped_.*|.*_seconds|.*-(?:truncated_ratio|none_reward_ratio|pass{_AT}\d+))"

PROJECTS = (
    Project(
        name="verl",
        version="0.10.0.dev",
        commit="1dda039b9c63",
        date="2026-08-22",
        names=(
            *_same("critic/rewards/mean", "critic/rewards/max", "critic/rewards/min", "critic/score/mean"),
            Name("val/reward/mean", "val-core/<data source>/reward/mean@k"),
            Name("val/reward/mean", "val-core/<data source>/acc/mean@k"),
            *_same("response_length/mean", "response_length/max", "response_length/min"),
            Name(
                "response_length/clip_ratio", "response_length/clip_ratio", "responses as long as the longest allowed"
            ),
            *_same(
                "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_loss", "actor/grad_norm", "actor/lr"
            ),
            *_same("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token", "rollout_corr/chi2_seq"),
            *_same("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
            Name("perf/time/step", "timing_s/step"),
        ),
        marks=("timing_s/step", "perf/time_per_step", "timing_s/gen", "critic/score/mean", "actor/pg_loss"),
        derived={"mismatch/rho_std": _rho_std},
    ),
    Project(
        name="slime",
        version="0.3.1",
        commit="624b824a898a",
        date="2026-08-21",
        names=_SLIME,
        marks=("rollout/raw_reward", "rollout/response_len/mean", "train/entropy_loss", "train/pg_clipfrac"),
        first_step=0,
        updates="train/",
        leave_out=_NO_REWARD,
    ),
    Project(
        name="miles",
        version="0.1.0",
        commit="31f1ca961a94",
        date="2026-08-21",
        names=(*_SLIME, Name("rollout_corr/k3_kl", "train/train_rollout_kl")),
        marks=("train/train_rollout_kl", "train/ess_ratio"),
        first_step=0,
        updates="train/",
        leave_out=_NO_REWARD,
    ),
    Project(
        name="NeMo-RL",
        version="0.6.0",
        commit="7ea279abfbeb",
        date="2026-08-22",
        names=(
            Name("critic/rewards/mean", "train/reward"),
            Name("val/reward/mean", "validation/accuracy"),
            Name("response_length/mean", "train/mean_gen_tokens_per_sample"),
            Name("response_length/clip_ratio", "train/truncation_rate"),
            Name("actor/entropy", "train/approx_entropy", "estimated from the sampled tokens"),
            Name("actor/grad_norm", "train/grad_norm"),
            Name("actor/lr", "train/lr"),
            Name("rollout_corr/k3_kl", "train/gen_kl_error", "with reference_policy_kl_type k3, the default"),
            Name("perf/time/step", "timing/train/total_step_time"),
        ),
        marks=(
            "train/token_mult_prob_error",
            "train/gen_kl_error",
            "timing/train/total_step_time",
            "train/probs_ratio",
        ),
    ),
    Project(
        name="prime-rl",
        version="0.8.1.dev67",
        commit="559b44772e47",
        date="2026-08-21",
        names=(
            Name("critic/rewards/mean", "train/agg/all/<agent>/reward/mean"),
            Name("val/reward/mean", "eval/<environment>/all/<agent>/avg@k"),
            Name("response_length/mean", "train/agg/all/<agent>/num_output_tokens/mean"),
            Name("response_length/max", "train/agg/all/<agent>/num_output_tokens/max"),
            Name("response_length/min", "train/agg/all/<agent>/num_output_tokens/min"),
            Name("response_length/clip_ratio", "train/agg/all/<agent>/is_truncated/mean"),
            Name("actor/entropy", "entropy/all/mean"),
            Name("actor/grad_norm", "optim/grad_norm"),
            Name("actor/lr", "optim/lr"),
            Name("rollout_corr/k3_kl", "mismatch_kl/all/mean"),
            Name("rollout/staleness_mean", "off_policy/mean"),
            Name("perf/time/step", "time/step"),
        ),
        marks=("optim/grad_norm", "optim/lr", "entropy/all/mean", "mismatch_kl/all/mean", "progress/total_rollouts"),
        derived={"groups/no_signal_frac": _no_signal},
    ),
    Project(
        name="TRL",
        version="1.10.0.dev0",
        commit="f2cd57710ae3",
        date="2026-07-24",
        names=(
            Name("val/reward/mean", "eval_reward"),
            Name("val/reward/mean", "eval/reward"),
            *_TRL,
            *(Name(name.ours, f"train/{name.theirs}") for name in _TRL),
        ),
        marks=(
            "frac_reward_zero_std",
            "train/frac_reward_zero_std",
            "completions/clipped_ratio",
            "train/completions/clipped_ratio",
        ),
    ),
)


REWARDS = {"critic/rewards/mean", "critic/score/mean", "val/reward/mean"}


def project_of(names: Iterable[str]) -> Project | None:
    """The project of which ``names`` has the most marks: two, or one beside its reward and another known name.

    None where there is none: one name alone is also another project's.
    """
    present = set(names)
    if "perf/time/step" in present:  # ours, from a service: some names are verl's
        return None
    marks = {project.name: {mark for mark in project.marks if mark in present} for project in PROJECTS}
    marks["slime"] = set() if marks["miles"] else marks["slime"]  # miles has all names of slime, and its own
    best = max(PROJECTS, key=lambda project: len(marks[project.name]))
    known = {name: best.ours(name) for name in present if best.ours(name)}
    has_reward = any(REWARDS & set(ours) for ours in known.values())
    enough = len(marks[best.name]) > 1 or (has_reward and len({*known, *marks[best.name]}) > 1)
    return best if marks[best.name] and enough else None


Records = list[dict[str, float]]


@dataclass(frozen=True)
class Run:
    """The rows of a run. ``project``: whose log they come from; None for a run of ours."""

    path: Path
    records: Records
    project: Project | None = None
    kind: str = ""
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)  # our metric → theirs that it was read from
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        return not self.kind

    def source_lines(self) -> list[str]:
        """What the rows were read from, a line each; nothing for a run of ours."""
        if self.is_own:
            return []
        steps = f"steps {self.records[0]['step']} to {self.records[-1]['step']}"
        whose = (
            f"a log of {self.project.name}, by the names of {self.project.version} ({self.project.commit})"
            if self.project
            else "a log with names of megatron-rl"
        )
        return [f"{self.path}: {self.kind}, {whose}; {steps}", *self.notes]


def read_run(path: Path) -> Run:
    """The run at ``path``: a run directory or metrics.jsonl of ours, or a log of another project.

    Steps are those of the log. Raises `InputError` where there is no log, where there are several runs, and where no
    metric of the log is known.
    """
    path = Path(path)
    if _is_own(path):
        return Run(path, read_metrics(path))
    logs = _one_run(path, find_logs(path))
    points = [point for log in logs for point in log.points]
    if not points:
        raise InputError(f"{path}: the log has no number yet")
    project = project_of({name for name, _, _ in points})
    notes: list[str] = []
    rows = _rows(points, project, notes)
    sources = _sources({name for row in rows.values() for name in row}, project)
    records = [{"step": step, **_translated(rows[step], project, sources)} for step in sorted(rows)]
    known = {name for record in records for name in record if name.split("/")[0] in _AREAS}
    if project is None and not known:
        some = ", ".join(sorted({name for name, _, _ in points})[:8])
        raise InputError(
            f"{path}: nothing tells whose log it is ({some} …): a known project has two of its names here; "
            "docs/coming-from.json has the names that are read, and a CSV with those of megatron-rl is read too"
        )
    return Run(path, records, project, logs[0].kind, sources, tuple(notes))


_AREAS = {"critic", "actor", "response_length", "mismatch", "rollout_corr", "groups", "val"}


def _is_own(path: Path) -> bool:
    """Whether ``path`` is a run of ours. A broken line is left to `read_metrics`, which says what is wrong."""
    if path.is_dir() and (path / "recipe.resolved.yaml").is_file():
        return True
    file = path / "metrics.jsonl" if path.is_dir() else path
    if file.name != "metrics.jsonl" or not file.is_file():
        return False
    names: set[str] = set()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(20), lines, strict=False):  # prime-rl writes the parts of a step in several lines
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return True
            if not isinstance(row, dict) or isinstance(row.get("data"), dict):
                return not isinstance(row, dict)
            names |= row.keys()
    project = project_of(names)
    return project is None or project.name == "verl"  # ours are named as verl's are


def _one_run(path: Path, logs: Sequence[Log]) -> list[Log]:
    """Return ``logs`` if they are one run: stretches of it, or parts without a common metric, as of prime-rl."""
    seen: dict[str, Log] = {}
    for log in logs:
        names = {name for name, _, _ in log.points}
        project = project_of(names)
        ours = {our for name in names for our in (project.ours(name) if project else [name])}
        for name in sorted(ours - {"perf/time/step"}):
            earlier = seen.setdefault(name, log)
            if earlier is not log and not (log.group and log.group == earlier.group):
                listed = ", ".join(str(log.path) for log in logs[:10])
                raise InputError(f"{path}: {len(logs)} logs of several runs (each has {name}); give one of {listed}")
    return list(logs)


def _rows(points: Sequence[tuple[str, int, float]], project: Project | None, notes: list[str]) -> dict[int, dict]:
    """Values by step and name. The newest value of a step counts; of several updates in a step, their mean."""
    newest = {(name, step): value for name, step, value in points}
    prefix = project.updates if project else ""
    is_update = {name: bool(prefix) and name.startswith(prefix) for name, _ in newest}
    batches = sorted({step for name, step in newest if not is_update[name] and name.startswith("rollout/")})
    updates = sorted({step for name, step in newest if is_update[name]})
    place = _places(updates, batches)
    if (each := max((list(place.values()).count(batch) for batch in set(place.values())), default=1)) > 1:
        notes.append(f"{each} updates a step: {prefix}… are means over them")
    rows: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, step), value in newest.items():
        rows[place[step] if is_update[name] else step][name].append(value)
    return {step: {name: sum(values) / len(values) for name, values in row.items()} for step, row in rows.items()}


def _places(updates: Sequence[int], batches: Sequence[int]) -> dict[int, int]:
    """The batch of each update.

    Both may be counted in updates (slime with --wandb-always-use-train-step): then batches are some steps apart, and an
    update belongs to the last batch before it. Otherwise a batch has the same number of updates, and the last batch may
    have less.
    """
    if not updates or not batches:
        return {step: step for step in updates}
    gaps = [later - earlier for earlier, later in pairwise(batches)]
    if gaps and min(gaps) > 1 and updates[-1] < batches[-1] + min(gaps) and len(updates) > len(batches):
        return {step: batches[max(bisect_right(batches, step) - 1, 0)] for step in updates}
    each = max(1, -(-(updates[-1] + 1) // (batches[-1] + 1)))
    return {step: step // each for step in updates}


def _sources(names: set[str], project: Project | None) -> dict[str, list[str]]:
    names_of_key: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        for our in project.ours(name) if project else []:
            names_of_key[our].append(name)
    return dict(names_of_key)


def _translated(row: Mapping[str, float], project: Project | None, sources: Mapping[str, Sequence[str]]) -> dict:
    """Return ``row`` under our names; other metrics keep their own."""
    taken = {name for names in sources.values() for name in names}
    values = {name: value for name, value in row.items() if name not in taken}
    for our, names in sources.items():
        if present := [row[name] for name in names if name in row]:
            values[our] = sum(present) / len(present)
    for our, derive in project.derived.items() if project else ():
        if our not in values and (value := derive(row)) is not None:
            values[our] = value
    return values


def blind_rules(records: Sequence[Mapping[str, float]], rules: Sequence[AlarmRule]) -> dict[str, str]:
    """The rules that never see their metric in ``records``, each with the metric."""
    present = {name for record in records for name in record}
    return {rule.name: rule.metric for rule in rules if rule.metric not in present}
