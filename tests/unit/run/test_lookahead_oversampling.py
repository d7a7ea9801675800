"""`batch.oversample`: which groups a step takes, and what becomes of the others."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl import train
from megatron_rl.config import load_recipe
from megatron_rl.config.sections import BatchConfig, OversampleConfig
from megatron_rl.data import PromptSampler, PromptSet
from megatron_rl.errors import InputError
from megatron_rl.rewards.rewarder import Failure, RewardFault, Scores
from megatron_rl.rollout import Arrival, LegCounts
from megatron_rl.run import lookahead
from megatron_rl.run.lookahead import Begun, Lookahead, Oversampling, make_lookahead
from megatron_rl.run.start import Run
from megatron_rl.types import Group, Prompt, Rollout
from tests.support.groups import any_response
from tests.support.tiny import tiny_recipe

PROMPTS = [Prompt(id=f"toy:{row}", tokens=[1], answer="0") for row in range(400)]
NUM_STEPS = 12
SCORES = [
    f"reward/{name}"
    for name in ("timeouts", "worker_failures", "errors", "retries", "unjudged", "masked_frac", "unscored_frac")
]


def length(name: str) -> int:
    """Of the responses to a prompt: every fifth is long."""
    row = int(name.partition(":")[2])
    return 40 + row % 7 if row % 5 == 0 else 4 + row % 3


class Servers:
    """Sample one token a second of all groups at once; a group is there when its longest response is."""

    def __init__(self) -> None:
        self.now, self.cancelled, self.tickets = 0.0, [], []
        self.counts = lambda name: None

    def begin(self, prompts, num_samples, *, policy_version, step):
        ticket = SimpleNamespace(left={}, begun=self.now, version=policy_version)
        for place, prompt in enumerate(prompts):
            rollouts = [sampled(prompt.id, sample, policy_version) for sample in range(num_samples)]
            ticket.left[place] = (self.now + length(prompt.id), Group(prompt, rollouts))
        self.tickets.append(ticket)
        return ticket

    def completed(self, tickets):
        left = [(at, place, ticket) for ticket in tickets for place, (at, _) in ticket.left.items()]
        if not left:
            return []
        self.now = max(self.now, min(at for at, *_ in left))
        due = sorted((item for item in left if item[0] <= self.now), key=lambda item: item[0])
        groups = [(at, place, ticket, ticket.left.pop(place)[1]) for at, place, ticket in due]
        return [
            Arrival(ticket, place, group, self.now - at, self.counts(group.prompt.id))
            for at, place, ticket, group in groups
        ]

    def cancel(self, ticket):
        done = [group for at, group in ticket.left.values() if at <= self.now]
        self.cancelled += [group.prompt.id for at, group in ticket.left.values()]
        ticket.left.clear()
        return sum(rollout.length for group in done for rollout in group.rollouts)


def sampled(name: str, sample: int, version: int) -> Rollout:
    size = length(name)
    return any_response(f"{name}/{sample}", size, policy_versions=np.full(size, version, np.int32))


class Training:
    """A run whose step is ``update_s`` seconds of learning; one update a step."""

    def __init__(self, state=None, num_steps: int = NUM_STEPS, update_s: float = 20.0, **options) -> None:
        oversample = {"factor": 1.5, "rest": "carry_over", **options.pop("oversample", {})}
        self.batch = BatchConfig(prompts=8, oversample=OversampleConfig(**oversample), **options.pop("batch", {}))
        self.sampler, self.servers = PromptSampler(PROMPTS, seed=1), Servers()
        staleness = options.pop("max_staleness", 1)
        self.ahead = Oversampling(
            self.sampler,
            self.servers,
            self.batch.oversample,
            num_prompts=8,
            num_samples=2,
            max_staleness=staleness,
            num_steps=num_steps,
        )
        self.num_steps, self.update_s, self.informative = num_steps, update_s, options.pop("informative", None)
        self.first, self.steps, self.metrics = 0, [], []
        if state is not None:
            self.first, prompts, begun = state
            self.sampler.load_state_dict(prompts)
            self.ahead.load_state_dict(begun, PromptSet.of(PROMPTS))

    def run(self, until: int | None = None) -> Training:
        for step in range(self.first, self.num_steps if until is None else until):
            recipe = SimpleNamespace(batch=self.batch)
            run = SimpleNamespace(
                prompts=SimpleNamespace(observe=lambda rates: None),
                recipe=recipe,
                monitor=SimpleNamespace(phase=lambda name: nullcontext(SimpleNamespace(tokens=0))),
                ahead=self.ahead,
                learner=SimpleNamespace(num_updates=step),
                reward=self.reward,
                refuse_failures=lambda scores, step: None,
            )
            groups, metrics = train.sample(run, step)
            self.ahead.look_ahead(step, step)
            self.servers.now += self.update_s
            self.steps.append([group.prompt.id for group in groups])
            self.metrics.append(metrics)
        return self

    def reward(self, groups, step):
        for group in groups:
            signal = self.informative is None or self.informative(group.prompt.id)
            for number, rollout in enumerate(group.rollouts):
                rollout.reward = rollout.raw_reward = float(number and signal)
        return Scores(dict.fromkeys(SCORES, 0.0), [], sum(len(g.rollouts) for g in groups))

    def state(self, step: int):
        return step, self.sampler.state_dict(), self.ahead.state_dict()

    @property
    def learned(self) -> list[str]:
        return [name for names in self.steps for name in names]

    def column(self, name: str) -> list[float]:
        return [row[f"rollout/oversample/{name}"] for row in self.metrics]


def taken(training: Training) -> list[str]:
    """What the sampler gave out, in its order."""
    again = PromptSampler(PROMPTS, seed=1)
    return [prompt.id for prompt in again.take(training.sampler.state_dict()["position"])]


def named(state) -> list[str]:
    return [name for item in state[2] for name in item["prompts"]]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_carried_over_groups_are_learned_from_once_in_the_next_step(k):
    training = Training(max_staleness=k).run()
    assert [len(step) for step in training.steps] == [8] * NUM_STEPS
    left = named(training.state(NUM_STEPS))
    assert sorted(training.learned + left) == sorted(taken(training)), "each prompt once, and none is lost"
    assert len(left) == 4, "what the last step left over"
    assert training.column("carried") == [4] * (NUM_STEPS - 1) + [0]
    assert training.column("asked") == [12] * NUM_STEPS
    assert max(row["rollout/staleness_max"] for row in training.metrics) == k


def test_the_first_batch_is_short_and_the_later_ones_are_as_long_as_all():
    training = Training(num_steps=40).run()
    of_all = np.mean([length(name) for name in taken(training)])
    first, *later = [np.mean([length(name) for name in names]) for names in training.steps]
    assert first < 0.6 * of_all
    left = [length(name) for name in named(training.state(40))]
    # What was taken is what was learned from and what is left: both sides are sums of whole numbers.
    assert sum(map(length, training.learned)) + sum(left) == sum(map(length, taken(training)))
    assert np.mean(later) == pytest.approx(of_all, abs=(max(left) * len(left) + first * 8) / (39 * 8))


def test_aborted_groups_are_the_longest_and_are_lost():
    training = Training(oversample={"rest": "abort"}, max_staleness=0, num_steps=20).run()
    prompts = taken(training)
    for number, names in enumerate(training.steps):
        asked = prompts[12 * number : 12 * number + 12]
        shortest = sorted(asked, key=lambda name: (length(name), asked.index(name)))[:8]
        assert names == sorted(shortest, key=asked.index), "the order of the prompts, not that of completion"
    assert set(training.servers.cancelled) | set(training.learned) <= set(prompts)
    assert training.column("aborted") == [4] * 20
    assert named(training.state(20)) == []
    assert {row["rollout/staleness_max"] for row in training.metrics} == {0}
    assert np.mean([length(n) for n in training.learned]) < 0.7 * np.mean([length(n) for n in prompts])


def test_complete_responses_that_are_thrown_away_are_counted():
    """Seven of twelve are complete at the same moment as the eighth."""
    training = Training(oversample={"rest": "abort", "factor": 2.0}, max_staleness=0, num_steps=1).run()
    asked = taken(training)
    shortest = sorted(map(length, asked))
    surplus = sum(1 for value in shortest if value <= shortest[7]) - 8
    assert surplus > 0
    assert training.column("aborted_tokens") == [2 * surplus * shortest[7]]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rest", ["carry_over", "abort"])
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_resumed_run_begins_again_what_it_had_not_learned_from(k, rest, stop_after):
    options = {"max_staleness": k, "oversample": {"rest": rest}}
    before = Training(**options).run(stop_after)
    state = before.state(stop_after)
    after = Training(state, **options)
    after.run()
    begun_again = [group.prompt.id for ticket in after.servers.tickets for group in ticket.left.values()]
    assert after.metrics[0]["rollout/staleness_max"] == 0, "sampled anew, from the weights that were resumed"
    names = before.learned + after.learned
    assert len(set(names)) == len(names)
    assert begun_again == []
    if rest == "carry_over":
        assert set(named(state)) - set(after.learned) <= set(named(after.state(NUM_STEPS)))
        assert sorted(names + named(after.state(NUM_STEPS))) == sorted(taken(after))
        assert set(named(state)[:4]) <= set(after.steps[0]), "what had been carried over comes first"


def test_a_run_that_is_made_longer_begins_with_what_its_last_step_left_over():
    short = Training(num_steps=3).run()
    assert short.column("aborted") == [0, 0, 4]
    longer = Training(short.state(3), num_steps=5).run()
    assert set(named(short.state(3))) <= set(longer.steps[0])


def test_a_run_that_no_longer_oversamples_learns_from_what_was_carried_over():
    _, prompts, begun = Training(max_staleness=2).run(3).state(3)
    sampler = PromptSampler(PROMPTS, seed=1)
    sampler.load_state_dict(prompts)
    servers = SimpleNamespace(
        rollout=lambda prompts, num_samples, *, policy_version, step: [Group(prompt, []) for prompt in prompts]
    )
    ahead = Lookahead(sampler, servers, num_prompts=8, num_samples=2, max_staleness=0, num_steps=NUM_STEPS)
    ahead.load_state_dict(begun, PromptSet.of(PROMPTS))
    owed = list(named((0, 0, begun)))
    seen = [group.prompt.id for step in (3, 4) for group in ahead.sample(8, step=step, policy_version=step)]
    assert set(owed) <= set(seen)
    assert len(set(seen)) == len(seen)
    assert ahead.state_dict() == []


def test_groups_without_signal_are_left_out_and_never_come_again():
    def informative(name):
        return int(name.partition(":")[2]) % 3 != 0

    training = Training(batch={"filter_groups": True, "max_generations": 4}, informative=informative).run()
    assert [len(step) for step in training.steps] == [8] * NUM_STEPS
    assert all(map(informative, training.learned))
    left = named(training.state(NUM_STEPS))
    out = [name for name in taken(training) if not informative(name) and name not in left]
    assert sorted(training.learned + left + out) == sorted(taken(training))
    sampled = sum(row["groups/sampled"] for row in training.metrics)
    unseen = [name for name in left if name in training.servers.cancelled]
    assert sampled == len(taken(training)) - len(unseen), "each group is scored once"


def test_a_step_is_filled_by_further_rounds_and_ends_at_max_generations():
    def informative(name):
        return int(name.partition(":")[2]) % 6 == 0

    options = {"informative": informative, "num_steps": 1}
    one = Training(batch={"filter_groups": True}, **options).run()
    several = Training(batch={"filter_groups": True, "max_generations": 20}, **options).run()
    assert len(one.steps[0]) < 8
    assert one.column("asked") == [12]
    assert len(several.steps[0]) == 8
    missing = 8 - len(one.steps[0])
    assert several.servers.tickets[1].version == 0
    assert several.column("asked")[0] >= 12 + OversampleConfig(factor=1.5, rest="abort").num_asked(missing)


def test_the_wait_that_was_saved_and_the_lengths_of_both_kinds(monkeypatch):
    training = Training(max_staleness=1, num_steps=2)
    monkeypatch.setattr(lookahead.time, "perf_counter", lambda: training.servers.now)
    training.run(1)
    filled = training.servers.now - training.update_s
    carried = [name for name in taken(training) if name not in training.steps[0]]
    training.first = 1
    training.run()
    assert "rollout/oversample/wait_saved_s" not in training.metrics[0]
    saved = training.metrics[1]["rollout/oversample/wait_saved_s"]
    assert saved == max(map(length, carried)) - filled
    assert training.metrics[1]["rollout/oversample/length_carried"] == np.mean([length(name) for name in carried])
    own = [length(name) for name in training.steps[1] if name not in carried]
    assert training.metrics[1]["rollout/oversample/length_first"] == np.mean(own)
    assert "rollout/oversample/length_carried" not in training.metrics[0]


def test_a_group_that_is_waited_for_is_never_older_than_max_staleness():
    """Groups of 400 seconds, beside updates of 1: many steps could pass them by."""
    training = Training(max_staleness=2, update_s=1.0, num_steps=8)
    slow = taken_first(8 * 9)[::6]
    begin = training.servers.begin

    def begin_slow(prompts, num_samples, **options):
        ticket = begin(prompts, num_samples, **options)
        for place, (at, group) in ticket.left.items():
            if group.prompt.id in slow:
                ticket.left[place] = (at + 400.0, group)
        return ticket

    training.servers.begin = begin_slow
    training.run()
    assert max(row["rollout/staleness_max"] for row in training.metrics) == 2
    assert len(set(training.learned)) == 64


def taken_first(number: int) -> list[str]:
    return [prompt.id for prompt in PromptSampler(PROMPTS, seed=1).take(number)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("rollout.engine=vllm", ["batch.oversample: set, but rollout.engine vllm", "rollout.engine: vllm_server"]),
        ("rollout.max_staleness=0", ["rest: carry_over with rollout.max_staleness 0", "use rest: abort"]),
        ("batch.oversample.factor=2.5", ["batch.oversample.factor: 2.5 with rest carry_over", "at most 2"]),
        ("batch.filter_groups=true\nbatch.generation_prompts=99", ["batch.generation_prompts: 99", "remove"]),
        ("batch.oversample.factor=1", ["batch.oversample.factor: found 1", "greater than 1"]),
        ("batch.oversample.rest=drop", ["batch.oversample.rest: found 'drop'", "'carry_over' or 'abort'"]),
    ],
)
def test_what_oversampling_may_not_go_with(settings, expected):
    base = ["rollout.engine=vllm_server", "rollout.max_staleness=1", "rollout.servers.launch=1"]
    base += ["batch.oversample={factor: 1.5, rest: carry_over}"]
    load_recipe("recipes/tiny/grpo.yaml", base)
    settings = settings.split("\n")
    settings += ["rollout.max_staleness=0"] if "rollout.engine=vllm" in settings else []
    with pytest.raises(InputError) as caught:
        load_recipe("recipes/tiny/grpo.yaml", base + settings)
    for text in expected:
        assert text in str(caught.value)


def test_abort_needs_no_staleness_and_may_ask_for_more():
    oversample = {"factor": 3.0, "rest": "abort"}
    recipe = tiny_recipe(rollout={"engine": "vllm_server"}, batch={"oversample": oversample, "prompts": 16})
    assert recipe.batch.prompts_of_a_round == 48
    for config, kind in ((recipe.batch, Oversampling), (tiny_recipe().batch, Lookahead)):
        ahead = make_lookahead(config, recipe.rollout, recipe.num_steps, PromptSampler(PROMPTS), Servers())
        assert type(ahead) is kind


def test_failed_rewards_are_judged_over_the_step():
    """One of the sixteen responses of a step fails, among the first that are there: a tenth may."""

    def sample(limit: float):
        training, calls = Training(num_steps=1), []

        def reward(groups, step):
            scores = training.reward(groups, step)
            calls.append(scores.num_scored)
            failed = len(calls) == 1
            failures = [Failure("error", 1, "p", "r", "")] if failed else []
            return Scores(scores.metrics | {"reward/errors": float(failed)}, failures, scores.num_scored)

        limits = SimpleNamespace(first=limit, later=limit)
        run = SimpleNamespace(
            prompts=SimpleNamespace(observe=lambda rates: None),
            recipe=SimpleNamespace(
                batch=training.batch, reward=SimpleNamespace(max_error_frac=limits, on_error="mask")
            ),
            monitor=SimpleNamespace(phase=lambda name: nullcontext(SimpleNamespace(tokens=0))),
            ahead=training.ahead,
            learner=SimpleNamespace(num_updates=0),
            reward=reward,
        )
        run.refuse_failures = lambda scores, step: Run.refuse_failures(run, scores, step)
        return train.sample(run, 0)[1], calls

    metrics, calls = sample(0.1)
    assert metrics["reward/errors"] == 1 > 0.1 * calls[0], "of the first arrivals alone it would be too many"
    with pytest.raises(RewardFault, match=r"1 of \d+ responses could not be scored"):
        sample(0.0)


@pytest.mark.parametrize("rest", ["carry_over", "abort"])
def test_metrics_of_legs_are_of_what_is_learned_from(rest):
    """Those of a group that was carried over belong to the step that learns from it."""
    training = Training(oversample={"rest": rest})
    training.servers.counts = lambda name: LegCounts(2 + length(name), 2, 3 * length(name))
    for names, metrics in zip(training.run().steps, training.metrics, strict=True):
        lengths = [length(name) for name in names]
        assert metrics["rollout/versions_mean"] == 1  # two of a group, which has two responses
        assert metrics["rollout/legs_mean"] == (16 + sum(lengths)) / 16
        assert metrics["rollout/recomputed_tokens"] == 3 * sum(lengths)


def test_where_no_update_meets_responses_there_are_no_metrics_of_legs():
    assert not any("rollout/legs_mean" in metrics for metrics in Training().run().metrics)


def test_a_prompt_that_is_carried_over_and_comes_again_is_told_apart(monkeypatch):
    """A batch may hold a group of the step before and one of its own of the same prompt."""
    ahead = Training().ahead
    ahead._begun = [Begun(0, [PROMPTS[0], PROMPTS[1]])]
    monkeypatch.setattr(ahead._prompts, "take", lambda count: [PROMPTS[0], PROMPTS[2], PROMPTS[0]][:count])
    assert [(p.id, p.occurrence) for p in ahead._take(3, 1)] == [("toy:0", 1), ("toy:2", 0), ("toy:0", 2)]
