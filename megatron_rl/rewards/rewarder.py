"""Scores groups of rollouts with a recipe's reward, in worker processes, then shapes by length.

`modsum` is the digit-sum task: its problem ``^2413=`` is some digits in a small base between a caret and an equals
sign, its answer the sum of the digits modulo the base. A tiny model can learn it, at once or step by step.
`score_shared` is for the rewards of a step over all ranks: each rank scores a share, and all ranks get the result.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import Fault, InputError, shown
from megatron_rl.process.user_functions import check_function
from megatron_rl.rewards.math_task import THINKING, math_verdict, respellings
from megatron_rl.rewards.pool import Outcome, WorkerPool
from megatron_rl.rewards.worker import VERL_ARGUMENTS
from megatron_rl.types import Group, Prompt, Rollout

if TYPE_CHECKING:
    from megatron_rl.config.data import RewardConfig

logger = logging.getLogger(__name__)
ANSWER_MARK = "#"


def modsum_reward(response: str, answer: str) -> float:
    """Return 1.0 if the text after the last ``#`` of ``response`` is exactly ``answer``, else 0.0.

    ``response`` is decoded without special tokens. A response without a mark, or with anything after the digit, is
    wrong. It never raises for two strings.
    """
    _, mark, final = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and final == answer)


MAX_KINDS = 8  # number of examples that a rank shares with the others
_WHAT = {"error": "failed", "limit": "went over its time or memory limit", "crash": "killed its worker process",
         "unjudged": "could not be judged"}  # fmt: skip
Task = dict[str, Any]
_IN_PLACE = {"modsum": modsum_reward, "exact": lambda response, answer: float(response.strip() == answer.strip())}
_RIGHT = {"math": r"\boxed{{}}", "modsum": "#{}"}  # how a response spells its answer


class RewardFault(Fault):
    """Too many responses could not be scored, so their rewards would be meaningless."""


@dataclass(frozen=True)
class Failure:
    """Responses of one kind. ``prompt``, ``response`` and ``detail`` (a traceback, or "") are those of the first."""

    kind: str  # "error", "limit", "crash" or "unjudged"
    count: int
    prompt: str
    response: str
    detail: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Equal for failures of the same kind: type of the exception, and the line that raised it."""
        lines = self.detail.strip().splitlines()
        places = [line.strip() for line in lines if line.startswith("  File ")]
        return self.kind, lines[-1].partition(":")[0] if lines else "", places[-1] if places else ""

    @property
    def text(self) -> str:
        """The failure for the log: prompt, response and traceback."""
        response = self.response if len(self.response) <= 200 else self.response[:200] + " …"
        head = f"the reward of prompt {self.prompt} {_WHAT[self.kind]}; the response was {response!r}"
        return head + (f"\n{self.detail.rstrip()}" if self.detail else "")

    @property
    def summary(self) -> str:
        """The failure in one line."""
        last = f": {self.detail.strip().splitlines()[-1]}" if self.detail.strip() else ""
        return f"the reward of prompt {self.prompt} {_WHAT[self.kind]}{last}"


def merge(failures: Iterable[Failure]) -> list[Failure]:
    """Return one `Failure` of each kind with the sum of the counts, ordered by first occurrence."""
    by_key: dict[tuple[str, str, str], Failure] = {}
    for failure in failures:
        first = by_key.get(failure.key)
        by_key[failure.key] = replace(first, count=first.count + failure.count) if first else failure
    return list(by_key.values())


def refuse_too_many(num_failed: int, num_scored: int, limit: float, failures: Sequence[Failure]) -> None:
    """Raise `RewardFault` if more than the share ``limit`` of the responses failed."""
    if num_failed <= limit * num_scored:
        return
    allowed = f"reward.max_error_frac allows ({limit:g})" if limit else "reward.on_error: end allows"
    raise RewardFault(
        f"{num_failed} of {num_scored} responses could not be scored, more than {allowed}; log.txt has an example of "
        f"each kind; {failures[0].summary}"
    )


def overlong_penalty(length: int, max_response_length: int, buffer: int, penalty: float) -> float:
    """Return the addition to the reward of a response of ``length`` tokens [DAPO, soft overlong punishment].

    min(-(T - (L - buffer)) / buffer · penalty, 0) with T = ``length`` and L = ``max_response_length``.
    """
    return min(-(length - (max_response_length - buffer)) / buffer * penalty, 0.0)


@dataclass(frozen=True)
class Trial:
    """A right answer and the reward that it got."""

    prompt: Prompt
    response: str
    reward: float


def check_reward(config: RewardConfig, max_response_length: int, sources: Iterable[str] = ()) -> None:
    """Raise InputError for an unusable `reward` section. Quick: starts no process and imports nothing.

    ``sources``: every `data_source` of the prompts, where already known.
    """
    for name in _names(config):
        if ":" in name:
            check_function(name, "reward")
    if config.overlong and config.overlong.buffer > max_response_length:
        raise InputError(
            f"reward.overlong.buffer: {config.overlong.buffer} is more than the maximum response length "
            f"({max_response_length}); every response would be penalised. Use a part of it, such as a quarter"
        )
    missing = sorted(set(sources) - set(config.by_source)) if config.name == "by_source" else []
    if missing:
        named = ", ".join(map(repr, missing))
        raise InputError(f"reward.by_source: no entry for data source {named}; it has {sorted(config.by_source)}")


def _names(config: RewardConfig) -> list[str]:
    return sorted(set(config.by_source.values())) if config.name == "by_source" else [config.name]


class Rewarder(AbstractContextManager):
    """Sets ``raw_reward``, ``reward`` and ``masked`` of rollouts.

    Scoring is local: each rank scores the groups that it has. If the reward needs worker processes, they start with the
    Rewarder and get ready while the engines start; `close` ends them. ``has_functions``: whether `begin` has an effect.
    """

    def __init__(self, config: RewardConfig, max_response_length: int, sources: Iterable[str] = ()) -> None:
        check_reward(config, max_response_length, sources)
        self._config = config
        self._max_response_length = max_response_length
        names = _names(config)
        functions = [name for name in names if ":" in name]
        self._pool: WorkerPool | None = None
        if functions or "math" in names:
            limits = ("concurrency", "timeout_s", "memory_limit_mib", "wait_s", "retries", "retry_wait_s")
            settings = {name: getattr(config, name) for name in limits}
            self._pool = WorkerPool(config.num_workers, algebra="math" in names, functions=functions, **settings)
        self.has_functions = bool(functions)
        self._begun: dict[int, tuple[weakref.ref, Future[Outcome]]] = {}  # by id of the rollout

    def begin(self, prompt: Prompt, rollouts: Iterable[Rollout]) -> None:
        """Begin to score responses with the user's function, and return at once; `score` waits for what is left.

        Any thread may call it. Built-in rewards are quick, so they are left to `score`. Responses that are dropped
        before `score` are not scored, unless their call is under way.
        """
        pool, name = self._pool, self._name_of(prompt)
        if pool is None or ":" not in name:
            return
        rollouts = list(rollouts)
        try:
            futures = pool.submit([_task(name, prompt, rollout) for rollout in rollouts])
        except (InputError, RuntimeError):
            return  # `score` meets and raises it, on the thread that can act on it
        for rollout, future in zip(rollouts, futures, strict=True):
            key = id(rollout)

            def forget(_: weakref.ref, key: int = key, future: Future[Outcome] = future) -> None:
                future.cancel()
                self._begun.pop(key, None)

            self._begun[key] = (weakref.ref(rollout, forget), future)

    def score(self, groups: Sequence[Group]) -> Scores:
        """Score every rollout in place and return the scores.

        A response whose scoring failed gets 0 and is counted in ``reward/timeouts`` (over its time or memory limit),
        ``reward/worker_failures`` (its worker died), ``reward/errors`` (a reward function raised or returned no number)
        or ``reward/unjudged`` (by a built-in reward, which ends no run). If its reward is a function and
        `reward.on_error` is mask, it is also ``unscored`` and ``masked``.
        """
        rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        outcomes = self._outcomes(rollouts)
        for (prompt, rollout), outcome in zip(rollouts, outcomes):
            rollout.raw_reward = outcome.value
            self._shape(rollout)
            if outcome.failure and self._config.on_error == "mask" and ":" in self._name_of(prompt):
                rollout.reward, rollout.unscored, rollout.masked = 0.0, True, True
        return _scores(rollouts, outcomes)

    def try_on(self, prompts: Iterable[Prompt]) -> Trial:
        """Score a right answer to a prompt of each reward, to prove that rewards can be computed.

        The response is the gold answer in the reward's format. Raises `InputError` if a function cannot be loaded,
        raises or does not return a number, `RewardFault` if no worker can be started.
        """
        firsts: dict[str, Prompt] = {}  # by reward
        for prompt in prompts:
            firsts.setdefault(self._config.by_source.get(prompt.data_source, self._config.name), prompt)
        trials = [self._try(prompt, name) for name, prompt in firsts.items()]
        for prompt in firsts.values():
            for line in self.unmet([prompt]):
                logger.warning("prompt %s: %s", prompt.id, line)
        return trials[0]

    def unmet(self, prompts: Iterable[Prompt]) -> list[str]:
        """Say which golds of `math` a right answer in another spelling does not meet (`respellings`)."""
        tried = {p.answer: p for p in prompts if self._name_of(p) == "math"}
        pairs = [(gold, text, prompt) for gold, prompt in tried.items() for text in respellings(gold)]
        texts = [SimpleNamespace(text=rf"\boxed{{{text}}}") for _, text, _ in pairs]
        outcomes = self._settle([self._verdict(pair[2], text) for pair, text in zip(pairs, texts)]) if pairs else []
        lines = {
            gold: f"the gold {shown(gold, 60)} is not met by the answer {shown(text, 60)}"
            for (gold, text, _), outcome in reversed(list(zip(pairs, outcomes)))  # the first spelling stays
            if not outcome.value
        }
        return list(reversed(lines.values()))

    def _try(self, prompt: Prompt, name: str) -> Trial:
        response = _RIGHT.get(name, "{}").replace("{}", prompt.answer)
        rollout = SimpleNamespace(text=response)
        try:
            outcome = self._outcomes([(prompt, rollout)])[0]
        except RuntimeError as error:  # no worker could be started
            raise RewardFault(f"reward {name}: {error}") from error
        if outcome.failure and outcome.failure != "unjudged":
            failure = Failure(outcome.failure, 1, prompt.id, response, outcome.detail)
            rule = "a reward function must return a number for every response"
            raise InputError(f"reward {name}: {failure.text}\n{rule}")
        return Trial(prompt, response, outcome.value)

    def _name_of(self, prompt: Prompt) -> str:
        """Return the reward of ``prompt``."""
        name = self._config.name
        if name != "by_source":
            return name
        if prompt.data_source not in self._config.by_source:
            check_reward(self._config, self._max_response_length, [prompt.data_source])
        return self._config.by_source[prompt.data_source]

    def _outcomes(self, rollouts: Sequence[tuple[Prompt, Rollout]]) -> list[Outcome]:
        """Score ``rollouts``. Where a built-in reward fails, the text is at fault: the outcome is "unjudged"."""
        outcomes = self._settle([self._verdict(prompt, rollout) for prompt, rollout in rollouts])
        built_in = [":" not in self._name_of(prompt) for prompt, _ in rollouts]
        at_fault = [o.failure in ("error", "limit") and own for o, own in zip(outcomes, built_in, strict=True)]
        return [replace(o, failure="unjudged") if fault else o for o, fault in zip(outcomes, at_fault)]

    def _verdict(self, prompt: Prompt, rollout: Rollout) -> float | Task | Outcome | Future[Outcome]:
        """Return the reward, or the task for a worker that computes it, or its future where `begin` sent the task."""
        begun = self._begun.pop(id(rollout), None)
        if begun is not None:
            return begun[1]
        name = self._name_of(prompt)
        if ":" in name:
            return _task(name, prompt, rollout)
        try:  # these texts come from a model or a data set, and this is the trainer's process
            if name == "math":
                thinking = [mark for mark in THINKING if prompt.text.rstrip().endswith(mark)]  # the prompt opened it
                return math_verdict("".join(thinking) + rollout.text, prompt.answer, self._config.accept_unevaluated)
            return _IN_PLACE[name](rollout.text, prompt.answer)
        except Exception as error:  # noqa: BLE001
            return Outcome(0.0, "unjudged", f"{type(error).__name__}: {error}")

    def _settle(self, verdicts: Sequence[float | Task | Outcome | Future[Outcome]]) -> list[Outcome]:
        """Compute remaining tasks in workers, equal tasks of mathematics once, and return all outcomes."""
        is_math = [isinstance(verdict, dict) and verdict["kind"] == "math" for verdict in verdicts]
        keys = [(v["candidate"], v["gold"]) if known else k for k, (v, known) in enumerate(zip(verdicts, is_math))]
        tasks = {key: verdict for key, verdict in zip(keys, verdicts) if isinstance(verdict, dict)}
        if tasks and self._pool is None:
            raise RuntimeError("this Rewarder is closed")
        computed = dict(zip(tasks, self._pool.run(list(tasks.values())))) if tasks else {}
        outcomes = [computed.get(key, verdict) for key, verdict in zip(keys, verdicts)]
        outcomes = [outcome.result() if isinstance(outcome, Future) else outcome for outcome in outcomes]
        return [Outcome(float(o)) if isinstance(o, float | int) else o for o in outcomes]

    def _shape(self, rollout: Rollout) -> None:
        rollout.reward = rollout.raw_reward
        if (long := self._config.overlong) is not None:
            rollout.reward += overlong_penalty(rollout.length, self._max_response_length, long.buffer, long.penalty)
        if self._config.mask_truncated and rollout.truncated:
            rollout.masked = True

    def close(self) -> None:
        """End the worker processes. May be called twice."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _task(name: str, prompt: Prompt, rollout: Rollout) -> Task:
    """Return the task of a worker that calls the function ``name``."""
    values = (prompt.data_source, rollout.text, prompt.answer, prompt.extra)
    return {"kind": name, **dict(zip(VERL_ARGUMENTS, values, strict=True))}


def _scores(rollouts: Sequence[tuple[Prompt, Rollout]], outcomes: Sequence[Outcome]) -> Scores:
    found, count = [outcome.failure for outcome in outcomes], max(len(rollouts), 1)
    metrics = {
        "reward/masked_frac": sum(rollout.masked for _, rollout in rollouts) / count,
        "reward/unscored_frac": sum(rollout.unscored for _, rollout in rollouts) / count,
        "reward/retries": float(sum(outcome.retries for outcome in outcomes)),
    } | {name: float(found.count(kind)) for name, kind in _COUNTED.items()}
    failures = [
        Failure(outcome.failure, 1, prompt.id, rollout.text, outcome.detail)
        for (prompt, rollout), outcome in zip(rollouts, outcomes)
        if outcome.failure
    ]
    return Scores(metrics, merge(failures), len(rollouts))


_COUNTED = {"reward/timeouts": "limit", "reward/worker_failures": "crash", "reward/errors": "error",
            "reward/unjudged": "unjudged"}  # fmt: skip
_COUNTS = (*_COUNTED, "reward/retries")
_SHARES = ("reward/masked_frac", "reward/unscored_frac")


@dataclass(frozen=True)
class Scores:
    """Scores of a batch. ``metrics``: `reward/*`. ``failures``: an example of each kind of failure."""

    metrics: dict[str, float]
    failures: list[Failure]
    num_scored: int

    @property
    def num_failed(self) -> int:
        return int(sum(self.metrics[name] for name, kind in _COUNTED.items() if kind != "unjudged"))


def merged_scores(shares: list[Scores]) -> Scores:
    """Return the scores of several calls as one."""
    if len(shares) == 1:
        return shares[0]
    count = sum(share.num_scored for share in shares)
    metrics = {name: sum(share.metrics[name] for share in shares) for name in _COUNTS}
    if count:
        for name in _SHARES:
            held = sum(round(share.metrics[name] * share.num_scored) for share in shares if share.num_scored)
            metrics[name] = held / count
    return Scores(metrics, merge(failure for share in shares for failure in share.failures), count)


def score_shared(rewarder: Rewarder, groups: list[Group]) -> Scores:
    """Score every rollout and return the scores of all ranks; each rank scores its own rollouts.

    Groups that all ranks have are divided among the ranks. A reward uses one response at a time, so a rank may have
    part of a group.
    """
    from megatron_rl.process.ranks import gather_objects, gather_rows, together, world_rank, world_size

    pairs = [(number, group, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    places = [number % world_size() if r.owner is None else r.owner for number, _, r in pairs]
    rank = world_rank()
    held = [(group, r) for (_, group, r), place in zip(pairs, places, strict=True) if place == rank]
    runs = [list(run) for _, run in groupby(held, key=lambda pair: id(pair[0]))]  # rollouts of one group
    groups_here = [Group(run[0][0].prompt, [r for _, r in run]) for run in runs]
    scores = together("rewards could not be computed", lambda: rewarder.score(groups_here))
    rows = gather_rows([(r.raw_reward, r.reward, r.masked, r.unscored) for _, r in held], places, width=4).tolist()
    for (_, _, rollout), (raw, reward, masked, unscored) in zip(pairs, rows, strict=True):
        rollout.raw_reward, rollout.reward = raw, reward
        rollout.masked, rollout.unscored = bool(masked), bool(unscored)
    return merged_scores(gather_objects(replace(scores, failures=scores.failures[:MAX_KINDS])))
