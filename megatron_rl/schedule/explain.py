"""Replays a schedule on a recorded run: the schedule's inputs, action and reason at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.config.learner import ScheduleConfig
from megatron_rl.schedule.learning_rate import LearningRateSchedule


@dataclass(frozen=True)
class ReplayedStep:
    """One recorded step with the schedule's values. None: not recorded, or not known yet."""

    step: int  # rollout step, as in metrics.jsonl
    t: int  # optimizer step that the schedule counts
    length: float | None
    smoothed: float | None
    baseline: float | None
    lr: float  # rate of the replayed schedule
    shadow_lr: float  # rate that mode shadow would set
    recorded_lr: float | None
    event: str  # "" if nothing happened


def replay(
    records: Sequence[Mapping[str, float]], config: ScheduleConfig, lr: float, total_steps: int
) -> list[ReplayedStep]:
    """Replay the schedule ``config`` on ``records`` (lines of a metrics.jsonl) and return its steps.

    The length is `lr_sched/length` (the detector's input), else `response_length/mean`; t is `lr_sched/step`, else the
    rollout step (equal for one update per step and none skipped). ``lr`` is the peak rate.
    """
    schedule, steps, previous = LearningRateSchedule(config, lr, total_steps), [], None
    for record in records:
        t = int(record.get("lr_sched/step", record["step"]))
        length = record.get("lr_sched/length", record.get("response_length/mean"))
        decay = schedule.length_decay
        streak = decay.detector.streak if decay else 0
        surge = schedule.observe_length(t, length) if length is not None else None
        halvings = int(record.get("lr_sched/extra_halvings", 0))
        rate = schedule.lr(t)
        if halvings:
            rate = max(rate * 2.0**-halvings, min(rate, schedule.min_lr))
        event = ""
        if surge is not None:
            event = f"{decay.detector.explain()}: T_decay = {decay.planned_period}"
        elif decay and decay.detector.surge_step is None and decay.detector.streak > streak:
            event = decay.detector.explain()
        if previous is not None and rate != previous and t > config.warmup_steps:
            event = "; ".join(filter(None, [event, f"lr {previous:.4g} -> {rate:.4g}"]))
        previous = rate
        steps.append(
            ReplayedStep(
                step=int(record["step"]),
                t=t,
                length=length,
                smoothed=decay.detector.smoothed if decay else None,
                baseline=decay.detector.baseline if decay else None,
                lr=rate,
                shadow_lr=decay.shadow_lr(t, schedule.max_lr, schedule.min_lr) if decay else rate,
                recorded_lr=record.get("lr_sched/lr", record.get("actor/lr")),
                event=event,
            )
        )
    return steps
