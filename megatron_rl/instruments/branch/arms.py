"""The arms of a branch: which suspect of `run why` each one undoes, and the recipe keys that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import Recipe
from megatron_rl.config.objective import is_weight, label_of
from megatron_rl.errors import InputError, printable, shown
from megatron_rl.instruments.lab.study import IDENTITY_KEYS, SEED_KEYS
from megatron_rl.instruments.why.changed import Event, value_at
from megatron_rl.run.identity import ABSENT

OTHER_ORDER = 1000  # added to data.seed: more than the seeds of a branch
REASON_CHARACTERS = 300
CONTROL = "control"
AS_BEFORE, CHANGE = "as-before", "recipe change"
MOST_CHANGES = 4  # keys that get an arm of their own


@dataclass(frozen=True)
class Arm:
    """One intervention. ``keys``: what it changes, dotted key → value. ``note``: what else follows from that."""

    name: str
    suspect: str  # of `run why`, or who asked for it
    keys: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class LeftOut:
    """An arm or suspect that is not tested."""

    name: str
    reason: str


@dataclass(frozen=True)
class Undo:
    """A kind of arm. ``wanted``: the values that undo the suspects, those of a recipe, or why there are none."""

    name: str
    suspects: tuple[str, ...]
    wanted: dict[str, Any] | Callable[[Recipe], dict[str, Any] | str]


def _third_rate(recipe: Recipe) -> dict[str, Any]:
    """A third of the peak, and of what the schedule gives as rates: floor and start of the warm-up."""
    schedule = recipe.schedule
    rates = {"learner.optimizer.lr": recipe.learner.optimizer.lr}
    rates |= {} if schedule.min_lr is None else {"schedule.min_lr": schedule.min_lr}
    rates |= {"schedule.warmup_from": schedule.warmup_from} if schedule.warmup_from else {}
    return {key: float(f"{rate / 3:.3g}") for key, rate in rates.items()}


def _usual_clip(recipe: Recipe) -> dict[str, Any] | str:
    if recipe.objective.policy_term.name != "ppo_clip":
        return f"objective.policy_term is {label_of(recipe.objective.policy_term, 'name')}, not ppo_clip"
    return {"objective.policy_term.clip_low": 0.2, "objective.policy_term.clip_high": 0.28}


def _bf16(recipe: Recipe) -> dict[str, Any] | str:
    if "fp16" not in (recipe.learner.dtype, recipe.rollout.dtype):
        return f"learner.dtype is {recipe.learner.dtype} and rollout.dtype {recipe.rollout.dtype}: nothing is fp16"
    return {"learner.dtype": "bf16", "rollout.dtype": "bf16"}


def _exact_engine(recipe: Recipe) -> dict[str, Any]:
    """The engine that generates with the learner's own arithmetic and layout, rounds nothing more and routes alike."""
    own = {"rollout.engine": "exact", "rollout.dtype": recipe.learner.dtype, "rollout.tensor_parallel": 1}
    return own | UNROUNDED | {"learner.fused_head": False}


def _tis(recipe: Recipe) -> dict[str, Any] | str:
    corrections = recipe.objective.active_corrections
    if weights := [label_of(item, "mode") for item in corrections if is_weight(item)]:
        return f"objective.correction has {weights[0]} already"
    kept = [item.model_dump(mode="json") for item in corrections]
    return {"objective.correction": [*kept, {"mode": "tis", "level": "token", "cap": 2.0}]}


def _overlong(recipe: Recipe) -> dict[str, Any] | str:
    if recipe.reward.overlong is not None:
        return "reward.overlong is set already"
    return {"reward.overlong": {"buffer": max(1, recipe.rollout.max_response_length // 4)}}


def _other_order(recipe: Recipe) -> dict[str, Any] | str:
    if not recipe.data.shuffle:
        return "data.shuffle is false: there is one order alone"
    if recipe.data.train_fraction < 1:
        return f"data.train_fraction is {recipe.data.train_fraction:g}: another seed chooses other prompts"
    return {"data.seed": recipe.data.seed + OTHER_ORDER}


UNROUNDED = dict.fromkeys(f"rollout.quantization.{key}" for key in ("weights", "block", "kv_cache"))
FP32 = {"learner.dtype": "fp32", "rollout.dtype": "fp32"}
UNDO = (
    Undo("third-rate", ("learning rate",), _third_rate),
    Undo("one-update", ("updates a batch",), {"batch.minibatches": 1}),
    Undo("usual-clip", ("clip range",), _usual_clip),
    Undo("no-staleness", ("staleness",), {"rollout.max_staleness": 0}),
    Undo("unrounded", ("rounding",), UNROUNDED),
    Undo("no-dose", ("dose of mismatch",), {"exact.noise": None, "exact.noise_std": 0.0}),
    Undo("bf16", ("overflow",), _bf16),
    Undo("fp32", ("rounding", "overflow"), FP32),
    Undo("r3", ("routing",), {"routing.replay": "r3"}),
    Undo("exact-engine", ("mismatch", "rounding", "routing"), _exact_engine),
    Undo("tis", ("mismatch", "rounding", "staleness", "routing", "dose of mismatch"), _tis),
    Undo("overlong-penalty", ("length",), _overlong),
    Undo("usual-temperature", ("temperature",), {"rollout.temperature": 1.0}),
    Undo("other-data-order", ("data",), _other_order),
)
"""The kinds of arms, in the order in which they stand beside each other."""
NAMES = tuple(undo.name for undo in UNDO)
ALWAYS = ("third-rate", "one-update")
"""The commonest causes: tested also where `run why` does not suspect them."""


def undoing(events: Sequence[Event]) -> list[Arm]:
    """Return the arms that undo what somebody changed in the recipe: all ``events`` together, then each of several."""
    keys = {event.key: None if event.old is ABSENT else event.old for event in events}
    if not keys:
        return []
    each = [Arm(f"before-{key.replace('.', '-')}", CHANGE, {key: old}) for key, old in keys.items()]
    return [Arm(AS_BEFORE, CHANGE, keys), *(each[:MOST_CHANGES] if len(each) > 1 else [])]


def arms_of(recipe: Recipe, suspects: Sequence[str], wanted: Sequence[str] | None) -> tuple[list[Arm], list[LeftOut]]:
    """Return the arms for ``recipe``, and what is left out with the reason.

    ``suspects``: those of `run why`, the likeliest first; their arms come in that order, then those of `ALWAYS`. Where
    there are no suspects, all arms are tried. ``wanted``: names of `NAMES` in place of that choice, or "all".
    """
    of_suspects = [undo.name for suspect in suspects for undo in UNDO if suspect in undo.suspects]
    names = (*of_suspects, *ALWAYS) if suspects else NAMES
    if wanted is not None:
        if unknown := [name for name in wanted if name not in (*NAMES, "all")]:
            raise InputError(f"--arms: {unknown[0]!r} does not exist; allowed are all, {', '.join(NAMES)}")
        names = NAMES if "all" in wanted else wanted
    kinds = {undo.name: undo for undo in UNDO}
    made = [_arm_of(recipe, kinds[name], suspects) for name in dict.fromkeys(names)]
    left_out = [arm for arm in made if isinstance(arm, LeftOut)]
    if wanted is None:
        known = {suspect for undo in UNDO for suspect in undo.suspects}
        text = "what would be right is yours to say: --arm {} KEY=VALUE"
        left_out += [LeftOut(name, text.format(name.replace(" ", "-"))) for name in suspects if name not in known]
    return [arm for arm in made if isinstance(arm, Arm)], left_out


def _arm_of(recipe: Recipe, undo: Undo, suspects: Sequence[str]) -> Arm | LeftOut:
    wanted = undo.wanted(recipe) if callable(undo.wanted) else undo.wanted
    if isinstance(wanted, str):
        return LeftOut(undo.name, wanted)
    old = recipe.model_dump(mode="json")
    keys = {key: value for key, value in wanted.items() if value_at(old, key, None) != value}
    if not keys:
        there = ", ".join(f"{key} is {shown(value, 40)}" for key, value in wanted.items())
        return LeftOut(undo.name, f"it would change nothing: {there}")
    suspect = next((name for name in suspects if name in undo.suspects), undo.suspects[0])
    counts = "batch.minibatches" in keys and (recipe.schedule.warmup_steps or recipe.schedule.style != "constant")
    note = "the schedule counts updates: with fewer of them warm-up and decay take more steps" if counts else ""
    return Arm(undo.name, suspect, keys, note)


def own_arm(name: str, settings: Sequence[str]) -> Arm:
    """Return the arm that ``--arm NAME KEY=VALUE …`` asks for."""
    from megatron_rl.config.yaml12 import parse

    if name in (*NAMES, CONTROL, AS_BEFORE, "all"):
        raise InputError(f"--arm {name}: the name of another arm; give yours a name of its own")
    if not settings:
        raise InputError(f"--arm {name}: changes nothing; give KEY=VALUE after the name")
    keys = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or key in (*SEED_KEYS, *IDENTITY_KEYS, "num_steps"):
            raise InputError(
                f"--arm {name} {setting}: expected KEY=VALUE with a key that a branch does not set by itself, as it "
                f"does with {', '.join((*IDENTITY_KEYS, *SEED_KEYS))} and num_steps"
            )
        keys[key] = parse(text)[0]
    return Arm(name, "your own", keys)


def reason_of(error: InputError) -> str:
    """Return why a recipe was refused, on one line without the places where its values were set."""
    lines = [line.strip().partition(" (set: ")[0] for line in str(error).splitlines()]
    text = printable("; ".join(lines[1:] or lines))
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]} …"
