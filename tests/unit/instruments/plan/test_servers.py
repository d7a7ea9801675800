"""The simulated pipeline: closed forms, a simulation token by token, and what must hold for any lengths."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.instruments.plan import GPUS, make_plan, make_workload
from megatron_rl.instruments.plan.fleet import ServerCosts
from megatron_rl.instruments.plan.memory import memory_plan
from megatron_rl.instruments.plan.search import step_time
from megatron_rl.instruments.plan.servers import Asking, Pipeline, PipelineTime, simulate
from megatron_rl.instruments.plan.workload import Lengths, read_lengths
from megatron_rl.model.architecture import shape_of
from tests.support.rounding import gamma
from tests.support.slow import slow_but
from tests.support.tiny import REPOSITORY

MODES = ("finish", "abort_and_resume", "keep")
COSTS = ServerCosts(slots=64, overhead=0.5, read=[0.25 + n / 64 for n in range(65)], prefill=(1 / 128, 0.0))
"""A step of n responses takes 0.75 + n / 64 seconds: sums of few powers of two, so that equal times are equal."""


def constant(length: int) -> Lengths:
    return Lengths("constant", length, np.array([length]))


def pipeline(costs: ServerCosts = COSTS, mode: str = "finish", max_staleness: int = 0, **changes) -> Pipeline:
    asking = Asking(num_prompts=8, num_samples=4, prompt_tokens=0.0)
    learn = changes.pop("learn", (2.0, 0.0))
    return Pipeline(
        costs, changes.pop("num_servers", 1), mode, max_staleness, learn, changes.pop("asking", asking), **changes
    )


def close(value: float) -> object:
    """Sums of up to 1e6 terms in fp64."""
    return pytest.approx(value, rel=gamma(1e6), abs=0)


# ---------------------------------------------------------------- closed forms
def test_synchronous_steps_of_constant_lengths():
    """generate + learn + gather + load: 32 responses of 10 tokens at once, each step of 0.75 + 32 / 64 seconds."""
    simulated = simulate(pipeline(publish_s=3.0, load_s=0.5, learn=(2.0, 1 / 320)), constant(10), 3, warm=1)
    generate, learn = 10 * (0.75 + 0.5), 2.0 + 1.0
    assert simulated.step_s == close(generate + learn + 3.0 + 0.5)
    assert simulated.tokens_per_s == close(320 / simulated.step_s)
    assert simulated.learner_idle == close((generate + 0.5) / simulated.step_s)
    assert simulated.servers_idle == close((learn + 3.0) / simulated.step_s)
    assert simulated.servers_paused == close(0.5 / simulated.step_s)
    assert simulated.running == close(32 * generate / simulated.step_s)
    assert simulated.staleness == {0: 1.0}


def test_responses_wait_for_slots():
    """32 responses on two servers of 8: two rounds one after the other."""
    costs = replace(COSTS, slots=8)
    simulated = simulate(pipeline(costs, num_servers=2, learn=(0.0, 0.0)), constant(10), 2, warm=1)
    assert simulated.step_s == close(2 * 10 * (0.75 + 8 / 64))
    assert simulated.servers_idle == 0


def test_prompts_are_prefilled_once_for_all_their_samples():
    asking = Asking(num_prompts=8, num_samples=4, prompt_tokens=16.0)
    costs = replace(COSTS, request=0.25)
    simulated = simulate(pipeline(costs, asking=asking), constant(10), 2, warm=1)
    prefill = 8 * 16 / 128 + 32 * 0.25
    assert simulated.step_s == close(prefill + 12.5 + 2.0)
    assert simulated.servers_prefilling == close(prefill / simulated.step_s)


def test_reading_the_context_and_computing():
    """Memory traffic grows with the context, until computation takes longer: the integral over a step's tokens."""
    by_context = ServerCosts(slots=64, overhead=0.5, read=[0.25] * 65, read_token=1 / 64)
    simulated = simulate(pipeline(by_context, learn=(0.0, 0.0)), constant(10), 2, warm=1)
    assert simulated.step_s == close(10 * (0.5 + 0.25 + 32 * 5 / 64))
    by_compute = replace(by_context, compute=1.0)
    assert simulate(pipeline(by_compute, learn=(0.0, 0.0)), constant(10), 2, warm=1).step_s == close(10 * 32.5)


@pytest.mark.parametrize("learn_s", [1.0, 12.5, 40.0])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_ahead_with_finish_the_longer_of_the_two_counts(learn_s, max_staleness):
    """Servers: a batch and the loading. Learner: learning and gathering. Each waits for the other, never for both."""
    arm = pipeline(max_staleness=max_staleness, learn=(learn_s, 0.0), publish_s=1.0, load_s=0.5)
    simulated = simulate(arm, constant(10), 20, warm=6, cool=max_staleness)
    assert simulated.step_s == close(max(12.5 + 0.5, learn_s + 1.0))
    assert simulated.staleness == {max_staleness: 1.0}


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_infinite_slots_overlap_all_batches_that_staleness_allows(max_staleness):
    """No learner, no waiting for slots, a step's time the same for any number: k + 1 batches at a time."""
    costs = ServerCosts(slots=1024, overhead=1.0, read=[0.0] * 1025)
    arm = pipeline(costs, "keep", max_staleness, learn=(0.0, 0.0))
    simulated = simulate(arm, constant(12), 12 * (max_staleness + 1), warm=max_staleness + 1, cool=max_staleness)
    assert simulated.step_s == close(12 / (max_staleness + 1))


def test_cut_responses_are_prefilled_again():
    """One prompt, one sample, k = 1: each batch of 10 tokens is cut once, by the update of the batch before it."""
    costs = ServerCosts(slots=8, overhead=1.0, read=[0.0] * 9, prefill=(1 / 8, 0.0))
    asking = Asking(num_prompts=1, num_samples=1, prompt_tokens=16.0)
    arm = pipeline(costs, "abort_and_resume", 1, learn=(6.0, 0.0), asking=asking)
    kept = simulate(replace(arm, mode="keep"), constant(10), 8, warm=4, cool=1)
    cut = simulate(arm, constant(10), 8, warm=4, cool=1)
    assert kept.recomputed == 0
    assert cut.recomputed > 0
    assert cut.step_s > kept.step_s


def test_a_full_cache_gives_up_the_response_admitted_last():
    """Two of 10 tokens in a cache of 14: both reach 7, the second is given up and computes its 7 again at the end."""
    costs = ServerCosts(slots=2, overhead=1.0, read=[0.0] * 3, prefill=(1 / 8, 0.0), capacity=14)
    asking = Asking(num_prompts=1, num_samples=2, prompt_tokens=0.0)
    simulated = simulate(pipeline(costs, asking=asking, learn=(0.0, 0.0)), constant(10), 2, warm=1)
    assert simulated.step_s == close(10 + 7 / 8 + 3)
    assert simulated.recomputed == close(7 / 20)


def test_broadcast_keeps_the_learner_until_the_servers_have_it():
    arm = pipeline(mode="keep", max_staleness=1, learn=(40.0, 0.0), load_s=4.0)
    assert simulate(arm, constant(10), 8, warm=4, cool=1).step_s == close(40.0)
    assert simulate(replace(arm, joins=True), constant(10), 8, warm=4, cool=1).step_s == close(44.0)


# ---------------------------------------------------------------- any lengths
ANY = {
    "sigma": st.floats(0, 1.5),
    "slots": st.integers(1, 40),
    "num_servers": st.integers(1, 4),
    "max_staleness": st.integers(0, 3),
    "learn_s": st.floats(0, 200),
    "seed": st.integers(0, 1000),
}
OVER = [(1.0, None), (1.5, "abort"), (1.5, "carry_over")]
PRODUCT = [(mode, *over) for mode in MODES for over in OVER]
EACH_ONCE = [(mode, *over) for mode, over in zip(MODES, OVER, strict=True)]


@pytest.mark.parametrize(("mode", "factor", "rest"), slow_but(EACH_ONCE, PRODUCT))
@given(**ANY)
@settings(max_examples=15)
def test_what_must_hold(mode, factor, rest, sigma, slots, num_servers, max_staleness, learn_s, seed):
    if rest == "carry_over":
        max_staleness = max(1, max_staleness)
    random = np.random.default_rng(seed)
    lengths = Lengths("any", 400, np.ceil(random.lognormal(3, sigma, 200)))
    asking = Asking(6, 3, 4.0, factor, rest)
    costs = replace(COSTS, slots=slots)
    arm = pipeline(costs, mode, max_staleness, learn=(learn_s, 0.0), asking=asking, num_servers=num_servers, load_s=1.0)
    simulated = simulate(arm, lengths, 6)
    assert sum(simulated.staleness.values()) == close(1.0)
    assert all(0 <= steps <= max_staleness for steps in simulated.staleness)
    assert simulated.step_s >= learn_s * (1 - 1e-9)
    most = num_servers * slots / (0.75 + slots / 64)  # every server with all its slots taken
    assert simulated.tokens_per_s <= most * (1 + 1e-9)
    assert 0 <= simulated.running <= slots * (1 + 1e-9)
    for share in (
        simulated.learner_idle,
        simulated.servers_idle,
        simulated.servers_paused,
        simulated.servers_prefilling,
    ):
        assert -1e-9 <= share <= 1 + 1e-9
    assert (simulated.recomputed > 0) <= (mode == "abort_and_resume" and max_staleness > 0)
    assert (simulated.given_up > 0) <= (rest == "abort")


@given(**{name: strategy for name, strategy in ANY.items() if name != "slots"})
@settings(max_examples=25)
def test_cutting_costs_nothing_but_what_it_computes_again(sigma, num_servers, max_staleness, learn_s, seed):
    """Without prefill and with room for all, `abort_and_resume` is `keep`; the order of tokens is the same."""
    random = np.random.default_rng(seed)
    lengths = Lengths("any", 400, np.ceil(random.lognormal(3, sigma, 200)))
    costs = replace(COSTS, slots=10_000, read=[0.25] * 10_001, prefill=(0.0, 0.0))
    arms = [
        simulate(
            pipeline(costs, mode, max_staleness, learn=(learn_s, 0.0), num_servers=num_servers), lengths.again(), 6
        )
        for mode in ("keep", "abort_and_resume")
    ]
    assert arms[0].step_s == close(arms[1].step_s)
    assert arms[0].staleness.keys() == arms[1].staleness.keys()


def test_a_long_tail_is_what_running_ahead_hides():
    """Log-normal lengths, learning as long as generating: the order of the modes that the modes are there for."""
    lengths, asking = read_lengths("lognormal:16,1,256", 256), Asking(16, 8, 8.0)
    costs = ServerCosts(slots=64, overhead=0.01, read=[n * 1e-4 for n in range(65)], prefill=(1e-5, 0.0))

    def arm(mode: str, max_staleness: int) -> PipelineTime:
        made = pipeline(costs, mode, max_staleness, asking=asking, learn=(0.0, 5e-4))
        return simulate(made, lengths.again(), 40, warm=6, cool=max_staleness)

    synchronous, finish, keep = arm("finish", 0), arm("finish", 2), arm("keep", 2)
    assert synchronous.step_s > finish.step_s > keep.step_s
    assert synchronous.learner_idle > finish.learner_idle > keep.learner_idle


def test_carrying_over_leaves_nobody_out():
    """What a step does not take is in flight or learned from later; `abort` learns from shorter responses instead."""
    lengths = Lengths("two", 256, np.array([4] * 9 + [256]))
    asking = Asking(8, 1, 0.0, 1.5)
    learned = {}
    for rest in ("carry_over", "abort"):
        made = pipeline(mode="keep", max_staleness=1, asking=replace(asking, rest=rest), learn=(0.0, 0.0))
        simulated = simulate(made, lengths.again(), 200)
        learned[rest] = simulated.tokens_per_s * simulated.step_s / 8  # mean length
        assert (simulated.given_up == 0) == (rest == "carry_over")
    assert learned["abort"] < learned["carry_over"] / 2


# ---------------------------------------------------------------- the command
SERVERS = REPOSITORY / "recipes" / "servers" / "grpo-tis-qwen3-30b-a3b-2n8g-tp4ep8-servers4-ahead1.yaml"
FEW = ["--set", "batch.prompts=16"]
"""Of 128: where nothing is a mean."""


def test_plan_prints_and_writes_the_arms(capsys):
    arguments = ["plan", str(SERVERS), "--gpu", "h100", "--lengths", "lognormal:600,1"]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    arms = {(arm["mode"], arm["max_staleness"]): arm for arm in printed["pipeline"]["arms"]}
    assert [key for key, arm in arms.items() if arm["is_recipes"]] == [("finish", 1)]
    assert set(arms) == {("finish", 0), *((mode, 1) for mode in MODES), ("keep", 2)}
    tokens = 2048 * printed["pipeline"]["mean_length"]
    for arm in arms.values():
        assert arm["time"]["tokens_per_s"] * arm["time"]["step_s"] == pytest.approx(tokens, rel=0.05)  # of ~ 1e5 draws
    assert main([*arguments, *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith(tuple(f"  {mode}, " for mode in MODES))]
    assert len(shown) == len(arms)
    assert [line for line in shown if line.endswith("← the recipe's")] == [shown[0]]


def test_arms_send_weights_as_their_runs_would(capsys):
    """`finish` two steps ahead goes through files whatever the recipe says; other arms as it says."""
    by_arm = {}
    for weights in ("broadcast", "files"):
        settings = [f"rollout.servers.weights={weights}", "rollout.max_staleness=2"]
        arguments = [*FEW, *(part for setting in settings for part in ("--set", setting))]
        assert main(["plan", str(SERVERS), "--gpu", "h100", "--lengths", "lognormal:600,1", "--json", *arguments]) == 0
        arms = json.loads(capsys.readouterr().out)["pipeline"]["arms"]
        by_arm[weights] = {(arm["mode"], arm["max_staleness"]): arm["time"]["step_s"] for arm in arms}
    equal = {arm for arm, seconds in by_arm["broadcast"].items() if seconds == by_arm["files"][arm]}
    assert equal == {("finish", 2)}


def test_the_mean_of_the_lengths_is_the_plans(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("100\n300\n")
    recipe = load_recipe(SERVERS, ["batch.prompts=16"])
    lengths = read_lengths(str(file), recipe.rollout.max_response_length)
    work = make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"], mean_response=200.0)
    learn = make_plan(work, lengths).simulated.pipeline.learn
    time = step_time(work, memory_plan(work).engine)
    assert learn[1] * work.trained_tokens > time.update + time.old_logprobs  # the longer ones have most tokens
    same = make_plan(work, Lengths("same", 8192, np.array([200]))).simulated.pipeline.learn
    assert same[1] * work.trained_tokens == close(time.update + time.old_logprobs)


@pytest.mark.parametrize(("rest", "sampled"), [("carry_over", 1.0), ("abort", 1.5)])
def test_over_sampling_asks_for_its_factor_and_samples_what_is_not_carried_over(rest, sampled):
    """In the long run a group that is carried over is sampled for one step, though it is asked for in two."""
    changes = ["batch.prompts=16", "rollout.max_staleness=1", f"batch.oversample={{factor: 1.5, rest: {rest}}}"]
    recipe = load_recipe(SERVERS, changes)
    work = make_workload(recipe, shape_of(recipe.model.path)[0], GPUS["h100-80"], mean_response=200.0)
    assert work.sampled_sequences == sampled * recipe.num_sequences
    asking = make_plan(work, Lengths("same", 8192, np.array([200]))).simulated.pipeline.asking
    assert (asking.factor, asking.rest) == (1.5, rest)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "lognormal:600,1", "--mean-response", "900"], "give only one of the two"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, says, capsys):
    assert main(["plan", str(SERVERS), "--gpu", "h100", *arguments]) == 2
    assert says in capsys.readouterr().err
