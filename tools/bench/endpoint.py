"""Requests a second through a conversation's chat endpoint, beside the same requests to the engine itself.

The same engine samples the same tokens for three sides: vLLM's own call, a `rollout.function` that generates, and one
that asks its endpoint over HTTP, client included. With a response's length grows the engine's part.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import aiohttp

from megatron_rl.data import load_tokenizer
from megatron_rl.rollout import process_state
from megatron_rl.rollout.conversation import Talk
from megatron_rl.rollout.generator import sampling_fields, sampling_params
from megatron_rl.rollout.requests import make_requests
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.run.prepare import talk_of
from tools.bench.lib.timing import alternate, medians
from tools.bench.parts import first_prompts, tiny


async def generates(client, problem):
    conversation = client.conversation()
    await conversation.generate()
    return conversation


async def asks(client, problem):
    async with (
        client.endpoint() as endpoint,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as session,
    ):
        body = {"messages": [{"role": "user", "content": problem.text.removeprefix("<bos>")}]}
        async with session.post(f"{endpoint.url}/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
    return endpoint.conversation


def endpoint(rounds: int = 9, prompts: int = 8, group: int = 8, length: int = 64) -> None:
    """``prompts`` · ``group`` requests at once, each answered with ``length`` tokens."""
    recipe = tiny("agent", length=length)
    asked, talk = first_prompts(recipe, prompts), talk_of(recipe, load_tokenizer(str(recipe.model.path)))
    engine = VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=16, talk=talk)
    requests = make_requests(asked, group, seed=recipe.rollout.seed, step=0)
    given = [{"prompt_token_ids": request.prompt.tokens} for request in requests]
    params = [sampling_params(sampling_fields(engine._sampling, request.seed, [])) for request in requests]

    def raw() -> list[list[int]]:
        with process_state.compilation(False):
            outputs = engine._llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def through(function) -> list[list[int]]:
        engine._talk = Talk(talk.name, function, talk.encode, talk.decode, talk.chat)
        groups = engine.rollout(asked, group, policy_version=0, step=0)
        return [rollout.tokens.tolist() for one in groups for rollout in one.rollouts]

    sides = {"engine": raw, "function": partial(through, generates), "endpoint": partial(through, asks)}
    assert raw() == sides["function"](), "other responses: nothing to compare"
    times = alternate(rounds, sides, clock=time.perf_counter)
    for name, seconds in medians(times).items():
        of_engine = statistics.median(one / other for one, other in zip(times[name], times["engine"]))
        rate = f"{len(requests) / seconds:7.1f} requests/s of {length} tokens"
        print(f"{name:9} {rate}; {of_engine:.2f} of the engine's time")
    engine.close()
