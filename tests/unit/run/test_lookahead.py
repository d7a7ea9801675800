"""Prompts of batches that run ahead: in order, once each, also over a resume; and how stale a batch is."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import BatchConfig
from megatron_rl.data import PromptSampler, PromptSet
from megatron_rl.errors import InputError
from megatron_rl.run import lookahead
from megatron_rl.run.lookahead import Lookahead, staleness_metrics
from megatron_rl.types import Group, Prompt
from tests.support.groups import any_response

PROMPTS = [Prompt(id=f"toy:{row}", tokens=[1, 20 + row], answer="0") for row in range(12)]
NUM_STEPS = 8


class Engine:
    """Answers at once, from the weights it had when it was asked; ``open``: steps of batches begun and not finished.

    ``idle``: how often it had nothing to do while somebody waited for a batch to the end.
    """

    def __init__(self) -> None:
        self.open: list[int] = []
        self.most_open = 0
        self.idle = 0

    def rollout(self, prompts, num_samples, *, policy_version, step):
        return [
            Group(prompt, [any_response(f"{prompt.id}/0", policy_versions=np.full(1, policy_version, np.int32))])
            for prompt in prompts
        ]

    def begin(self, prompts, num_samples, *, policy_version, step):
        self.open.append(step)
        self.most_open = max(self.most_open, len(self.open))
        return step, self.rollout(prompts, num_samples, policy_version=policy_version, step=step)

    def finish(self, ticket):
        self.idle += len(self.open) == 1
        self.open.remove(ticket[0])
        return ticket[1]


def looking_ahead(sampler, engine, num_prompts: int, max_staleness: int, num_steps: int, refills: bool = False):
    batch = BatchConfig(prompts=num_prompts, filter_groups=refills)
    rollout = RolloutConfig(engine="vllm_server", num_samples=1, max_staleness=max_staleness)
    return Lookahead(sampler, engine, batch, rollout, num_steps)


def run(
    max_staleness: int, *, stop_after: int = NUM_STEPS, refill: tuple[int, ...] = (), state=None, num_steps=NUM_STEPS
):
    """(per step: prompt ids and staleness), and the state at the end; one update a step."""
    sampler, engine = PromptSampler(PROMPTS, seed=1), Engine()
    ahead = looking_ahead(sampler, engine, 2, max_staleness, NUM_STEPS, bool(refill))
    first = 0
    if state is not None:
        first, prompts, begun = state
        sampler.load_state_dict(prompts)
        ahead.load_state_dict(begun, PromptSet.of(PROMPTS))
    seen = []
    for step in range(first, stop_after):
        groups = ahead.sample(2, step=step, policy_version=step)
        if step in refill:
            groups += ahead.sample(1, step=step, policy_version=step)
        ahead.look_ahead(step, policy_version=step)
        staleness = staleness_metrics(groups, num_updates=step)["rollout/staleness_max"]
        seen.append(([group.prompt.id for group in groups], staleness))
    assert engine.most_open <= max_staleness + 1  # the step's own is one of them
    if max_staleness and not refill and stop_after == NUM_STEPS:
        assert engine.idle == 1  # at the last step, when nothing is left to begin
    return seen, (stop_after, sampler.state_dict(), ahead.state_dict())


def ids(seen) -> list[str]:
    return [name for names, _ in seen for name in names]


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_prompts_do_not_depend_on_how_far_ahead(k):
    seen, state = run(k)
    assert ids(seen) == ids(run(0)[0])
    assert [staleness for _, staleness in seen] == [min(step, k) for step in range(NUM_STEPS)]
    assert state[2] == []  # nothing is begun beyond the end


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("refill", [(), (2, 3)])
def test_a_resumed_run_asks_for_the_same_prompts_once_each(k, refill):
    whole, _ = run(k, refill=refill)
    for stop_after in (1, 3, 5):
        before, state = run(k, refill=refill, stop_after=stop_after)
        after, _ = run(k, refill=refill, state=state)
        assert ids(before) + ids(after) == ids(whole)
        assert after[0][1] == 0  # sampled anew, from the weights that were resumed


def test_a_run_resumed_without_running_ahead_first_learns_from_what_was_begun():
    before, state = run(2, stop_after=3)
    after, _ = run(0, state=state)
    assert ids(before) + ids(after) == ids(run(0)[0])


def test_a_prompt_that_is_gone_is_named():
    _, (_, _, begun) = run(1, stop_after=2)
    ahead = looking_ahead(PromptSampler(PROMPTS), Engine(), 2, max_staleness=1, num_steps=8)
    with pytest.raises(InputError, match=r"begun with prompt 'toy:\d+', which is not in data.train"):
        ahead.load_state_dict(begun, PromptSet.of(PROMPTS[:0]))


def sampled(*versions: int) -> list[Group]:
    return [Group(PROMPTS[0], [any_response("toy:0/0", len(versions), policy_versions=np.array(versions, np.int32))])]


def test_staleness_is_of_the_responses_of_all_ranks(monkeypatch):
    """Another rank has three tokens, of age 2, 3 and 7; this one has two."""
    monkeypatch.setattr(lookahead, "gather_objects", lambda own: [own, (12, 3, 7)])
    measured = staleness_metrics(sampled(8, 9), num_updates=10)
    assert measured == {"rollout/staleness_mean": (2 + 1 + 12) / 5, "rollout/staleness_max": 7.0}


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_prompt_that_a_step_takes_again_says_so(max_staleness):
    """Three prompts, steps of two and a refill of two: a step takes one of them twice. Also after a resume."""

    def asked(first: int, last: int, state=None):
        sampler, engine = PromptSampler(PROMPTS[:3], shuffle=False), Engine()
        ahead = looking_ahead(sampler, engine, 2, max_staleness, num_steps=6, refills=True)
        if state is not None:
            sampler.load_state_dict(state[0])
            ahead.load_state_dict(state[1], PromptSet.of(PROMPTS[:3]))
        seen = []
        for step in range(first, last):
            groups = [group for _ in range(2) for group in ahead.sample(2, step=step, policy_version=step)]
            ahead.look_ahead(step, policy_version=step)
            seen.append([(group.prompt.id, group.prompt.occurrence) for group in groups])
        return seen, (sampler.state_dict(), ahead.state_dict())

    whole, _ = asked(0, 6)
    assert whole[0] == [("toy:0", 0), ("toy:1", 0), ("toy:2", 0), ("toy:0", 1)]
    assert all(len(set(step)) == 4 for step in whole)
    before, state = asked(0, 3)
    assert before + asked(3, 6, state)[0] == whole


def test_a_resumed_run_asks_again_with_the_same_occurrences():
    """Steps of four from three prompts: a batch that was begun ahead holds one of them twice."""

    def made(state=None):
        sampler = PromptSampler(PROMPTS[:3], shuffle=False)
        ahead = looking_ahead(sampler, Engine(), 4, max_staleness=1, num_steps=4)
        if state is not None:
            sampler.load_state_dict(state[0])
            ahead.load_state_dict(state[1], PromptSet.of(PROMPTS[:3]))
        return sampler, ahead

    def asked(ahead, step):
        return [(g.prompt.id, g.prompt.occurrence) for g in ahead.sample(4, step=step, policy_version=step)]

    sampler, ahead = made()
    asked(ahead, 0)
    state = sampler.state_dict(), ahead.state_dict()
    again = asked(made(state)[1], 1)
    assert again == asked(ahead, 1) == [("toy:1", 0), ("toy:2", 0), ("toy:0", 0), ("toy:1", 1)]
