"""A simulated pipeline as text."""

from __future__ import annotations

import numpy as np

from megatron_rl.plan.servers import Arm, ServerPlan


def pipeline_lines(plan: ServerPlan) -> list[str]:
    """The arms, best described first: the recipe's own, then the others for comparison."""
    p, sampled = plan.pipeline, plan.lengths.sample()
    shares = ", ".join(f"{share}% up to {np.percentile(sampled, share):.0f}" for share in (50, 90, 99))
    learn_s = p.learn[0] + p.learn[1] * p.asking.num_prompts * p.asking.num_samples * (
        p.asking.prompt_tokens + float(sampled.mean())
    )
    both = " and the learner" if p.joins else ""
    alone = f"the learner {duration(p.publish_s)} beside them and " if p.publish_s else ""
    lines = [
        f"pipeline      {plan.lengths.source}: responses of {sampled.mean():.0f} tokens on average; {shares}; longest "
        f"{sampled.max():.0f}",
        f"  {p.num_servers} servers of up to {p.costs.slots} responses at a time; a step's {p.asking.num_prompts} × "
        f"{p.asking.num_samples} responses are learned in {duration(learn_s)}; weights take {alone}the servers{both} "
        f"{p.load_s:.1f} s",
        f"  {'in_flight, max_staleness':<28}{'a step':>9}{'tokens/s':>10}{'learner waits':>15}{'servers idle':>14}"
        f"{'decoding':>12}{'computed twice':>16}  staleness: share of tokens",
    ]
    return [*lines, *(_line(arm, p.costs.slots) for arm in plan.arms)]


def _line(arm: Arm, slots: int) -> str:
    t = arm.time
    steps = ", ".join(f"{steps}: {share:.0%}" for steps, share in t.staleness.items() if share >= 0.005)
    lost = f"; {t.given_up:.0%} more sampled and given up" if t.given_up > 0.005 else ""
    mark = "  ← the recipe's" if arm.is_recipes else ""
    return (
        f"  {arm.mode + ', ' + str(arm.max_staleness):<28}{duration(t.step_s):>9}{t.tokens_per_s:10.0f}"
        f"{t.learner_idle:15.0%}{t.servers_idle:14.0%}{f'{t.running:.0f} of {slots}':>12}{t.recomputed:16.1%}"
        f"  {steps}{lost}{mark}"
    )


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
