"""Conversations of several turns: tokens, masks and routes in closed form, and how they share an engine's steps."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

import numpy as np
import pytest

from megatron_rl.batch import build_batch
from megatron_rl.config import ObjectiveConfig
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.sections import BatchConfig
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout.conversation import Client, Requests, Talk, Turn, hold, load_talk, turn_seed
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.requests import Request, elsewhere, make_rollout
from megatron_rl.routing import route_checksums
from megatron_rl.types import Group, Prompt
from tests.support.tiny import MODEL

LIMIT = 8  # rollout.max_response_length
PROBLEM = Prompt(id="p:0", tokens=[5, 6], answer="", text="")
ARCHITECTURE = read_architecture(MODEL)
WIDTH = (ARCHITECTURE.num_layers, ARCHITECTURE.experts_per_token)


class Engine:
    """Answers request n with ``answers[n]``, one token a step; every route of request n leads to expert n."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers, self.asked, self.running, self.aborted = answers, [], {}, []
        self.together: list[int] = []  # requests that each step worked on

    def submit(self, tokens, fields):
        name = str(len(self.asked))
        self.running[name] = len(self.answers[len(self.asked)])
        self.asked.append((tokens, fields))
        return name

    def step(self):
        self.together.append(len(self.running))
        self.running = {name: left - 1 for name, left in self.running.items()}
        return [(name, name) for name in [n for n, left in self.running.items() if not left] if self._ended(name)]

    def _ended(self, name):
        del self.running[name]
        return True

    def to_turn(self, tokens, output):
        answer = list(self.answers[int(output)])
        routes = np.full((len(tokens) + len(answer) - 1, *WIDTH), int(output))
        cut = len(answer) == self.asked[int(output)][1]["max_tokens"]
        return Turn(tokens, answer, [-float(t) for t in answer], "length" if cut else "stop", routes)

    def abort(self, names):
        self.aborted += names


def held(engine: Engine, *functions, deadline: float = math.inf, shortest: int = 1) -> list:
    """What ``functions`` return, each with a client of sample 0, 1, …"""
    results = [None] * len(functions)

    async def one(place, function, requests):
        talk = Talk(
            "f",
            function,
            lambda text: [ord(c) for c in text],
            lambda tokens: "".join(map(chr, tokens)),
            shortest=shortest,
        )
        request = Request(0, PROBLEM, place, seed=100 + place)
        client = Client(talk, request, requests, Sampling(LIMIT), [2], ARCHITECTURE.vocab_size)
        results[place] = conversation = await function(client, PROBLEM)
        conversation.check(client)

    async def all_of_them():
        requests = Requests(engine)
        await hold([partial(one, i, f, requests) for i, f in enumerate(functions)], requests, deadline)

    asyncio.run(all_of_them())
    return results


async def with_a_tool(client, problem):
    conversation = client.conversation()
    await conversation.generate(stop_token_ids=[11])
    assert conversation.tell([20])
    await conversation.generate(max_tokens=2)
    assert conversation.tell([21])  # nothing follows it, so it is left out
    return conversation


def test_tokens_masks_and_routes_of_two_turns():
    engine = Engine([10, 11], [12])
    (conversation,) = held(engine, with_a_tool)
    assert [tokens for tokens, _ in engine.asked] == [[5, 6], [5, 6, 10, 11, 20]]
    assert conversation.response == [10, 11, 20, 12]
    assert conversation.sampled.tolist() == [True, True, False, True]
    assert conversation.logprobs == [-10.0, -11.0, 0.0, -12.0]
    # Rows of tokens 5, 6, 10 are of the first request; the second's prefill has those of 11 and 20. 12 has none.
    assert conversation.routes[:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    assert conversation.finish_reason == "stop"
    assert conversation.num_turns == 2
    first, second = (fields for _, fields in engine.asked)
    assert (first["stop_token_ids"], second["stop_token_ids"]) == ([2, 11], [2])
    assert (first["max_tokens"], second["max_tokens"]) == (LIMIT, 2)
    assert (first["seed"], second["seed"]) == (100, turn_seed(100, 1))


def test_a_response_of_several_turns_is_sealed_and_masked():
    (conversation,) = held(Engine([10, 11], [12]), with_a_tool)
    request = Request(0, PROBLEM, 0, seed=0)
    rollout = make_rollout(
        request,
        conversation.response,
        conversation.logprobs,
        conversation.finish_reason,
        7,
        routes=conversation.routes,
        architecture=ARCHITECTURE,
        sampled=conversation.sampled,
        num_turns=2,
    )
    whole = np.array([5, 6, 10, 11, 20, 12])
    assert np.array_equal(rollout.route_checksums, route_checksums(request.sequence_id, whole, rollout.routed_experts))
    assert rollout.policy_versions.tolist() == [7] * 4
    assert (rollout.length, rollout.num_sampled) == (4, 3)
    away = elsewhere(request, 4, "stop", 3, 2)
    masked = elsewhere(request, 4, "stop", 3, 2)
    masked.masked = True
    for reward, one in enumerate((rollout, away, masked)):
        one.reward = float(reward)
    batch = build_batch(0, [Group(PROBLEM, [rollout, away, masked])], BatchConfig(), ObjectiveConfig())
    here, there, out = batch.sequences
    assert here.loss_mask.tolist() == [True, True, False, True]
    assert [s.num_trained for s in batch.sequences] == [3, 3, 0]
    assert (there.whole_length, out.whole_length) == (6, 6)


def test_the_room_ends_a_conversation():
    async def talkative(client, problem):
        conversation = client.conversation()
        await conversation.generate()
        assert conversation.room == LIMIT - 2
        assert not conversation.tell([20] * (LIMIT - 2)), "no token could follow"
        assert conversation.room == LIMIT - 2
        return conversation

    (conversation,) = held(Engine([10, 11]), talkative)
    assert conversation.finish_reason == "length"
    assert conversation.response == [10, 11]
    (cut,) = held(Engine([10] * LIMIT), one_turn)
    assert cut.finish_reason == "length"


async def one_turn(client, problem):
    conversation = client.conversation()
    await conversation.generate()
    return conversation


def test_requests_of_many_conversations_run_together():
    """Eight of two turns each take the steps of one: 2 for the first turn and 1 for the second."""
    engine = Engine(*[[10, 11]] * 8, *[[12]] * 8)
    held(engine, *[with_a_tool] * 8)
    assert engine.together == [8, 8, 8]


def test_the_engine_goes_on_while_a_conversation_waits_for_its_tool():
    async def waits(client, problem):
        await asyncio.sleep(0.05)
        return await one_turn(client, problem)

    engine = Engine([10, 11], [12])
    held(engine, waits, one_turn)
    assert [tokens for tokens, _ in engine.asked] == [[5, 6], [5, 6]]
    assert engine.together == [1, 1, 1]


def test_side_requests_are_not_trained_on():
    async def asks_twice(client, problem):
        aside = await client.generate([7])
        assert aside.tokens == [30]
        return await one_turn(client, problem)

    (conversation,) = held(Engine([30], [10]), asks_twice)
    assert conversation.response == [10]
    with pytest.raises(RolloutError, match="continues other tokens"):
        conversation.add(Turn([7], [30], [-1.0], "stop"))


async def says_nothing(client, problem):
    return client.conversation()


async def of_another(client, problem):
    other = Client.__new__(Client)
    other.__dict__ |= client.__dict__
    return await one_turn(other, problem)


async def no_token(client, problem):
    conversation = client.conversation()
    conversation.tell([ARCHITECTURE.vocab_size])


async def no_room(client, problem):
    await client.generate([1] * (len(PROBLEM.tokens) + LIMIT))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (says_nothing, "sampled nothing"),
        (of_another, "another problem or sample"),
        (no_token, "are not tokens of the model"),
        (no_room, "10 tokens leave no room"),
    ],
)
def test_what_cannot_be_a_conversation_is_refused(function, message):
    with pytest.raises(RolloutError, match=message):
        held(Engine([10]), function)


async def lone_token(client, problem):
    conversation = client.conversation()
    await client.generate([1])
    await conversation.generate()
    return conversation


def test_a_lone_token_is_refused_where_it_would_begin_with_the_state_of_another_sequence():
    held(Engine([10], [11]), lone_token)
    with pytest.raises(RolloutError, match=r"1 token; .*give two tokens, or set rollout.enforce_eager: true"):
        held(Engine([10]), lone_token, shortest=2)


def test_a_failure_or_the_deadline_ends_all_and_leaves_no_request():
    async def fails(client, problem):
        raise KeyError("tool")

    engine = Engine([10] * 5)
    with pytest.raises(KeyError):
        held(engine, one_turn, fails)
    assert engine.aborted == ["0"]

    async def hangs(client, problem):
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        held(Engine(), hangs, deadline=time.monotonic() - 1.0)


def test_seeds_of_turns_differ_and_stay():
    assert turn_seed(978665020535351071, 0) == 978665020535351071
    assert len({turn_seed(seed, turn) for seed in range(50) for turn in range(20)}) == 50 * 20
    assert turn_seed(1, 1) == turn_seed(1, 1) < 2**63


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": "exact"}, "need engine: vllm or vllm_server"),
        ({"tensor_parallel": 2}, "use tensor_parallel: 1"),
        ({"kept_sets": True, "top_k": 8}, "use kept_sets: false"),
        ({"function": "f"}, "should match pattern"),
    ],
)
def test_what_a_function_does_not_go_with_is_refused(sections, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig.model_validate({"function": "mine.py:f", **sections})


def test_servers_may_have_several_ranks_and_run_ahead():
    servers = {"function": "mine.py:f", "engine": "vllm_server", "tensor_parallel": 2, "max_staleness": 1}
    assert RolloutConfig.model_validate(servers).function == "mine.py:f"


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "plain_turns.py").write_text("def f(client, problem): pass\n")
    (tmp_path / "broken_turns.py").write_text("async def f(client, problem): pass\nraise KeyError('x')\n")
    with pytest.raises(InputError, match=r"plain_turns.py:f: it is no `async def`"):
        load_talk(f"{tmp_path}/plain_turns.py:f", None)
    with pytest.raises(InputError, match="the file cannot be imported: KeyError"):
        load_talk(f"{tmp_path}/broken_turns.py:f", None)
