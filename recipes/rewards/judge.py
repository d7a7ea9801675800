"""A reward that asks a judge over HTTP: `reward: {name: recipes/rewards/judge.py:judge}`, with JUDGE_URL set."""

import os

import aiohttp

_session = None


async def judge(response: str, answer: str) -> float:
    """The score from 0 to 1 that a judge gives."""
    global _session
    if _session is None:  # one for all calls: it keeps connections open
        _session = aiohttp.ClientSession(raise_for_status=True)
    question = f"Gold answer: {answer}\nResponse: {response}\nScore from 0 to 1, the number alone:"
    body = {"model": "judge", "temperature": 0, "messages": [{"role": "user", "content": question}]}
    async with _session.post(os.environ["JUDGE_URL"] + "/v1/chat/completions", json=body) as reply:
        said = (await reply.json())["choices"][0]["message"]["content"]
    return float(said)
