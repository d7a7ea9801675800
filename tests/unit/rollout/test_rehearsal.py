"""A `rollout.function` without an engine: what `check` says of right and of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.rollout import rehearsal
from megatron_rl.rollout.conversation import Client, load_talk
from megatron_rl.rollout.generator import RolloutError, Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.types import Prompt
from tests.support import chats
from tests.support.tiny import REPOSITORY

PROBLEM, VOCAB = Prompt("p", [5, 6, 7], "0", "^12=", "d", {}), 20


class Letters:
    def encode(self, text, add_special_tokens=False):
        return [ord(letter) % VOCAB for letter in text]

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(chr(97 + token) for token in tokens)


def rehearsed(name: str) -> str:
    return rehearsal.rehearse(load_talk(name, Letters()), PROBLEM, Sampling(12), [2], VOCAB)


def test_the_example_goes_through():
    assert "tried with three conversations" in rehearsed(f"{REPOSITORY}/recipes/tiny/calculator.py:calculator")


CALLS = "    talk = client.conversation()\n    turn = await talk.generate(stop_token_ids=[3])\n"
WRONG = {
    "args(client)": ("    return client.conversation()\n", "cannot be called as f"),
    "more(client, problem, judge)": ("    return client.conversation()\n", "missing a required argument: 'judge'"),
    "keyword(client, problem, *, judge)": (
        "    return client.conversation()\n",
        "missing a required argument: 'judge'",
    ),
    "nothing(client, problem)": ("    await client.conversation().generate()\n", "returned a NoneType"),
    "silent(client, problem)": ("    return client.conversation()\n", "the policy sampled nothing"),
    "text(client, problem)": (CALLS + "    talk.tell('=3#')\n    return talk\n", "'=3#' is text"),
    "digits(client, problem)": ("    return await client.generate('33')\n", "'33' is text"),
    "stops(client, problem)": ("    return await client.conversation().generate(stop_token_ids='#')\n", "is text"),
    "number(client, problem)": (CALLS + "    talk.tell(3)\n    return talk\n", "no sequence of token ids"),
    "beyond(client, problem)": (CALLS + "    talk.tell([20])\n    return talk\n", r"\[20\] are not tokens"),
    "spelled(client, problem)": (CALLS + "    return int(client.decode(turn.tokens))\n", "ValueError: invalid literal"),
    "ends(client, problem)": ("    raise SystemExit('bye')\n", "SystemExit: bye"),
    "keys(client, problem)": ("    return problem.extra['tool']\n", "KeyError: 'tool'"),
}


@pytest.mark.parametrize("head", WRONG)
def test_a_function_that_would_end_the_run_is_refused(head, tmp_path):
    body, message = WRONG[head]
    name = head.partition("(")[0]
    (tmp_path / f"wrong_{name}.py").write_text(f"async def {head}:\n{body}")
    with pytest.raises(InputError, match=f"rollout.function .*{message}"):
        rehearsed(f"{tmp_path}/wrong_{name}.py:{name}")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    raise ConnectionRefusedError('no judge here')\n", "no judge here"),
        ("    await asyncio.sleep(9)\n", "more than 0.2 s"),
        ("    while True: pass\n", "more than 0.2 s"),
    ],
)
def test_what_only_the_machine_lacks_is_said(body, said, tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "PATIENCE_S", 0.2)
    stops = body.replace("while True: pass", "import time; time.sleep(1)")
    (tmp_path / f"lacks_{len(body)}.py").write_text(f"import asyncio\nasync def f(client, problem):\n{stops}")
    assert said in rehearsed(f"{tmp_path}/lacks_{len(body)}.py:f")


AGENT = """import json, urllib.request, asyncio
def ask(endpoint, messages, **keys):
    body = json.dumps({"messages": messages} | keys).encode()
    key = {"Authorization": "Bearer " + endpoint.key}
    request = urllib.request.Request(endpoint.url + "/chat/completions", body, key)
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except OSError as error:
        return {"error": str(error)}
async def f(client, problem):
    async with client.endpoint() as endpoint:
        messages = [{"role": "user", "content": "ab"}]
        answer = await asyncio.to_thread(ask, endpoint, messages, KEYS)
        await asyncio.to_thread(ask, endpoint, [*messages, answer, *messages])
    return endpoint.conversation
"""


def test_what_an_endpoint_would_refuse_is_found_by_check(tmp_path):
    def checked(name, keys, template, prompt):
        (tmp_path / f"{name}.py").write_text(AGENT.replace("KEYS", keys))
        talk = load_talk(f"{tmp_path}/{name}.py:f", chats.TOKENIZER, template)
        problem = Prompt("p", prompt, "0", "", "d", {})
        return rehearsal.rehearse(talk, problem, Sampling(200), [chats.END], len(chats.TOKENIZER))

    assert checked("kept", "n=1", chats.TEMPLATE, [chats.START]).endswith("without an engine")
    said = checked("cut", "n=1", chats.CUTS, [chats.START])
    assert "endpoint: once a message of role user follows, the chat template writes an earlier answer" in said
    assert "Give data.prompt.chat_template the path" in said
    with pytest.raises(InputError, match="its program got no answer: n: 2 is not served"):
        checked("branches", "n=2", chats.TEMPLATE, [chats.START])
    with pytest.raises(InputError, match="must render to what begins with the problem's prompt"):
        checked("another", "n=1", chats.TEMPLATE, [chats.END])
    with pytest.raises(InputError, match="there is no chat template"):
        checked("plain", "n=1", None, [chats.START])


@given(
    st.one_of(
        st.text(), st.binary(), st.lists(st.one_of(st.integers(), st.floats(), st.text())), st.none(), st.floats()
    )
)
def test_only_tokens_of_the_model_are_taken(anything):
    client = Client(load_talk(f"{REPOSITORY}/recipes/tiny/calculator.py:calculator", Letters()), *TALK)
    legal = isinstance(anything, list) and all(isinstance(token, int) and 0 <= token < VOCAB for token in anything)
    if legal:
        assert client.token_ids(anything, "tell") == anything
    else:
        with pytest.raises(RolloutError, match="tell: "):
            client.token_ids(anything, "tell")


TALK = (Request(0, PROBLEM, 0, seed=0), rehearsal.StandIn(PROBLEM.tokens, False, 0), Sampling(12), [2], VOCAB)
