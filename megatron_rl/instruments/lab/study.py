"""A study file: a base recipe, arms that change a key, seeds, and the predictions of the tested claim."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.base import AnyPath, Section

Statistic = Literal["last", "mean", "max", "log_slope", "step_pcc", "collapse_step"]
Direction = Literal["higher", "lower", "same"]
DEFAULT_METRICS = (
    "critic/rewards/mean",
    "mismatch/rho_std",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "hacking/J",
)
"""What a study's figure shows if its `panels` are empty."""
IDENTITY_KEYS = ("name", "run_root")
"""Keys that only identify a run."""
SEED_KEYS = ("seed", "rollout.seed", "data.seed")
"""Keys that a seed of the study sets: all randomness of a run."""


class Outcome(Section):
    """One number per run, by which arms are compared."""

    metric: str
    """Name in metrics.jsonl."""
    statistic: Statistic
    """last, mean, max: of the recorded values. log_slope: least squares of their logarithms over steps. step_pcc:
    Pearson correlation with the step. collapse_step: first step whose running mean over `window` steps is below half
    of the best so far; the number of steps where that never happens."""
    window: PositiveInt = 5
    """Steps of the running mean of collapse_step."""
    first_step: NonNegativeInt = 0
    """Records from this step on count."""
    last_step: NonNegativeInt | None = None
    """Records up to this step count; null: all."""
    ratio: bool = False
    """Compare as a ratio to the control (logarithms are subtracted) instead of as a difference."""
    margin: PositiveFloat | None = None
    """Largest difference that counts as none (of a ratio, a factor above 1): what two runs of one recipe differ by.
    `same` is shown by two one-sided tests against it, and a difference within it is no finding. null: `same` can only
    be contradicted."""
    spread: PositiveFloat | None = None
    """Standard deviation over seeds of the paired differences (of a ratio, of their logarithms) where runs of this
    setting were measured before the study: what `lab power` reckons with until the study has runs of its own."""

    @model_validator(mode="after")
    def _fits_the_statistic(self) -> Outcome:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(f"last_step: {self.last_step} is before first_step ({self.first_step}); swap them")
        if self.ratio and self.margin is not None and self.margin <= 1:
            raise ValueError(f"margin: {self.margin}, but of a ratio it is a factor above 1, such as 1.1")
        return self


class Yoke(Section):
    """A value that is an outcome of another arm's run with the same seed."""

    arm: str
    """The arm, which is not yoked itself."""
    outcome: str
    """The outcome of it."""


class Arm(Section):
    """One condition: its changes, its control, and the predictions for it."""

    set: dict[str, Any] = {}
    """Overrides of the base recipe: dotted key → value."""
    yoked: dict[str, Yoke] = {}
    """Keys of `set` whose value in each seed is an outcome of another arm's run of that seed, such as its mean rate.
    Runs wait for those of the other arm; the value in `set` is what `check` and `plan` take."""
    differs_in: list[str] = Field([], max_length=3)
    """Keys in which this arm differs from its control, and no others; empty for a control. Checked."""
    control: str | None = None
    """The arm to compare with; null: this arm is a control itself."""
    expect: dict[str, Direction] = {}
    """Outcome → what the claim predicts against the control."""
    label: str | None = None
    """Name in figures; null: the arm's own."""


class Primary(Section):
    """One comparison that decides the study's claim."""

    arm: str
    """The arm, which has a prediction for the outcome."""
    outcome: str
    """What it is compared in."""


class Trend(Section):
    """Does an outcome follow the dose? A regression over the runs of several arms, runs of one seed sharing an
    intercept."""

    outcome: str
    """The outcome that is explained; of a ratio outcome, its logarithm."""
    dose: str
    """The outcome that measures each run's dose."""
    arms: list[str] = Field(min_length=2)
    """Arms whose runs count, the control among them."""
    expect: Direction
    """Sign of the slope."""
    margin: PositiveFloat | None = None
    """Largest slope that counts as none, per unit of the dose."""
    doses: list[float] = []
    """Doses of the arms as the pilots had them: what `lab power` reckons with until the study has runs."""
    spread: PositiveFloat | None = None
    """Standard deviation of the regression's residuals in pilots, for `lab power`."""


class FigureRow(Section):
    """One row of the study's figure."""

    title: str
    """What the row compares."""
    arms: list[str] = Field(min_length=1, max_length=8)
    """Its curves."""


class Study(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the study, of its folder of runs and of its figure."""
    title: str
    """Heading of figure and report."""
    source: str
    """The paper and place of the claim."""
    claim: str
    """What is claimed to cause what."""
    setting: str
    """Why this base: how it was chosen, and that it was before arms were compared."""
    base: AnyPath
    """Recipe that all arms share, relative to the study file."""
    pilots: list[str] = []
    """Runs that were made before the study, and what was chosen by them: on controls and doses, never on outcomes."""
    seeds: list[NonNegativeInt] = Field([0, 1, 2], min_length=1)
    """Repetitions; arms are compared seed by seed."""
    level: float = Field(0.05, gt=0, lt=1)
    """Probability of one or more false findings among all primaries and trends, by Holm's correction."""
    primaries: list[Primary] = []
    """The comparisons that decide, fixed before the runs; empty: every prediction."""
    trends: dict[str, Trend] = {}
    """Regressions that decide with them, by name."""
    gate: Primary | None = None
    """What must come out as predicted before anything else can be tested, such as harm before its cure. It is tested
    first, at the full level, and not among the primaries; where it fails, every other verdict is "not testable", and
    `lab run` leaves the other arms alone."""
    outcomes: dict[str, Outcome] = Field(min_length=1)
    """What is compared, by name."""
    arms: dict[str, Arm] = Field(min_length=2)
    """Conditions, by name."""
    figure: list[FigureRow] = Field(min_length=1)
    """Rows of the figure."""
    panels: list[str] = []
    """Metrics of the figure's columns; empty: the report's own choice."""

    @model_validator(mode="after")
    def _names_exist(self) -> Study:
        problems = []
        if len(set(self.seeds)) < len(self.seeds):
            problems.append(f"seeds: {self.seeds} names a seed twice")
        for name, arm in self.arms.items():
            at = f"arms.{name}"
            if arm.control is None and (arm.differs_in or arm.expect):
                problems.append(f"{at}: has differs_in or expect but no control to be compared with; name one")
            if arm.control is not None:
                problems += unknown_names(f"{at}.control", [arm.control], self.arms)
                if arm.control == name:
                    problems.append(f"{at}.control: an arm cannot be its own control")
                if not arm.differs_in:
                    problems.append(f"{at}.differs_in: missing; name the key in which it differs from {arm.control!r}")
            problems += unknown_names(f"{at}.expect", arm.expect, self.outcomes)
            for key, yoke in arm.yoked.items():
                problems += self._wrong_yoke(f"{at}.yoked.{key}", name, key, yoke)
            problems += [
                f"{at}.set.{key}: set by the study itself" for key in (*SEED_KEYS, *IDENTITY_KEYS) if key in arm.set
            ]
        for index, primary in enumerate(self.primaries):
            problems += self._wrong_primary(f"primaries.{index}", primary)
        if self.gate is not None:
            problems += self._wrong_primary("gate", self.gate)
            if self.gate in self.primaries:
                problems.append(f"primaries: {self.gate.arm}, {self.gate.outcome} is the gate; name it there alone")
        for name, trend in self.trends.items():
            at = f"trends.{name}"
            problems += unknown_names(f"{at}.outcome", [trend.outcome], self.outcomes)
            problems += unknown_names(f"{at}.dose", [trend.dose], self.outcomes)
            problems += unknown_names(f"{at}.arms", trend.arms, self.arms)
        for index, row in enumerate(self.figure):
            problems += unknown_names(f"figure.{index}.arms", row.arms, self.arms)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _wrong_yoke(self, at: str, name: str, key: str, yoke: Yoke) -> list[str]:
        problems = [
            *unknown_names(f"{at}.arm", [yoke.arm], self.arms),
            *unknown_names(f"{at}.outcome", [yoke.outcome], self.outcomes),
        ]
        if key not in self.arms[name].set:
            problems.append(f"{at}: arms.{name}.set has no {key!r}; give the value that `check` and `plan` take")
        if problems:
            return problems
        if yoke.arm == name or self.arms[yoke.arm].yoked:
            problems.append(f"{at}.arm: {yoke.arm!r} is yoked itself; name an arm that is not")
        if self.outcomes[yoke.outcome].statistic == "collapse_step":
            problems.append(f"{at}.outcome: {yoke.outcome!r} is a collapse step, which one run alone does not have")
        return problems

    def _wrong_primary(self, at: str, primary: Primary) -> list[str]:
        problems = [
            *unknown_names(f"{at}.arm", [primary.arm], self.arms),
            *unknown_names(f"{at}.outcome", [primary.outcome], self.outcomes),
        ]
        if not problems and primary.outcome not in self.arms[primary.arm].expect:
            problems.append(f"{at}: arms.{primary.arm}.expect has no {primary.outcome!r}; predict before you test")
        return problems

    def decisive(self) -> list[Primary]:
        """Return the primaries; if there are none, every prediction except the gate's."""
        predicted = [Primary(arm=arm, outcome=name) for arm, values in self.arms.items() for name in values.expect]
        return self.primaries or [primary for primary in predicted if primary != self.gate]

    @property
    def gate_arms(self) -> tuple[str, ...]:
        """Return the arm of the gate and its control; empty without a gate."""
        return () if self.gate is None else (self.gate.arm, str(self.arms[self.gate.arm].control))

    def commitment(self) -> dict[str, Any]:
        """Return the parts that are fixed before the runs: all except words and drawings."""
        words = {"title", "source", "claim", "setting", "pilots", "figure", "panels"}
        values = self.model_dump(mode="json", exclude=words)
        for arm in values["arms"].values():
            del arm["label"]
            if not arm["yoked"]:  # for studies registered before arms could be yoked
                del arm["yoked"]
        return values


def unknown_names(at: str, names: Sequence[str] | Mapping[str, Any], allowed: Mapping[str, Any]) -> Iterator[str]:
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(allowed)}"
            yield f"{at}: {name!r} does not exist; {hint}"
