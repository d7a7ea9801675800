"""Agents that know nothing of training: they speak to a chat endpoint (docs/turns.md).

`agent` (agent.yaml) calls it with the package openai. `program` (agent_program.yaml) starts agent_program.py, which has
no more than the address, the key and a question.
"""

import asyncio
import os
import sys
from pathlib import Path

import openai

CALL = "#"  # where the tiny model has learned to write its answer
MOST_CALLS = 2
PROGRAM, PROGRAM_S = Path(__file__).with_name("agent_program.py"), 60.0


async def agent(client, problem):
    """Hold a conversation with OpenAI's library: after each `#` of the policy, a calculator's result is told."""
    http = openai.DefaultAsyncHttpxClient(verify=False)  # plain HTTP: 25 ms are saved, in which certificates are read
    async with (
        client.endpoint() as endpoint,
        openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, http_client=http) as api,
    ):
        messages = [{"role": "user", "content": problem.text.removeprefix("<bos>")}]
        try:
            for _ in range(MOST_CALLS):
                answer = await api.chat.completions.create(model="policy", messages=messages, stop=CALL)
                message = answer.choices[0].message
                messages += [message, {"role": "user", "content": result(message.content)}]
            await api.chat.completions.create(model="policy", messages=messages)
        except openai.BadRequestError:  # no room is left: what was said counts
            pass
    return endpoint.conversation


def result(text: str) -> str:
    """Return the sum modulo 5 of the digits in ``text``, which are every other character."""
    digits = text[::2]
    return f"={sum(map(int, digits)) % 5}{CALL}" if digits.isdecimal() else f"=?{CALL}"


async def program(client, problem):
    """Let a program of its own hold the conversation. If it fails, what was said until then counts."""
    async with client.endpoint() as endpoint:
        env = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "PATH": os.environ["PATH"]}
        question = problem.text.removeprefix("<bos>")
        started = await asyncio.create_subprocess_exec(sys.executable, "-I", str(PROGRAM), question, env=env)
        try:
            await asyncio.wait_for(started.wait(), PROGRAM_S)
        except TimeoutError:
            pass
        finally:
            if started.returncode is None:
                started.kill()
                await started.wait()
    return endpoint.conversation
