"""Teachers with engines of their own: the log-prob that each gives the tokens which the policy sampled.

A teacher scores the sampled ids as they are, prompt and response in one pass. vLLM calls these prompt log-probs. They
are at temperature 1 over the whole vocabulary, whatever the request says. vLLM looks nothing up in its prefix cache for
such a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_rl.config import Recipe
from megatron_rl.config.rollout import QuantizationConfig, RolloutConfig
from megatron_rl.config.second_model import TeacherModelConfig
from megatron_rl.model.architecture import read_architecture
from megatron_rl.process.ranks import gather_objects, together, world_rank
from megatron_rl.rollout.generator import RolloutError, checked_scores
from megatron_rl.rollout.servers.client import RequestRefused, ServerClient, ServerError
from megatron_rl.rollout.servers.rendezvous import CONFIG_FILE, Address, digest_of_config, read_token
from megatron_rl.rollout.servers.wire import COMPLETIONS, MODELS, SETTINGS
from megatron_rl.types import MIN_LOGPROB, Group, Rollout, Scores, TokenScorer

RETRIES = 3  # of one response that failed, on the next address each time, before the run ends


class ServerScorer:
    """`TokenScorer` on servers that hold the teacher.

    ``most_tokens``: of prompt and response. ``at_once``: requests in flight to one address. ``path``: the teacher's
    folder. Raises `RolloutError` where an address does not answer, its model is too short, or, of our servers, has
    another config.
    """

    def __init__(
        self, addresses: Sequence[str], most_tokens: int, deadline_s: float, at_once: int, path: Path | None = None
    ) -> None:
        self._addresses, self._deadline_s, self._at_once = list(addresses), deadline_s, at_once
        self._config = None if path is None else digest_of_config(path / CONFIG_FILE)
        self._token = read_token() or ""
        self._models = asyncio.run(self._with_clients(partial(self._find, most_tokens)))

    def score(self, rollouts: Sequence[Rollout], top_k: int = 0) -> list[Scores]:
        """See `TokenScorer`. Raises `RolloutError` where a response cannot be scored."""
        return asyncio.run(self._with_clients(partial(self._score_all, rollouts, top_k)))

    def close(self) -> None:
        """Nothing is held between calls."""

    async def _with_clients(self, work: Any) -> Any:
        addresses = [Address(url, url.rstrip("/")) for url in self._addresses]
        clients = [ServerClient(address, self._token, self._deadline_s) for address in addresses]
        try:
            return await work(clients)
        finally:
            for client in clients:
                await client.close()

    async def _find(self, most_tokens: int, clients: list[ServerClient]) -> list[str | None]:
        """The name of the model at each address; None for a server of ours."""
        names: list[str | None] = []
        for client in clients:
            name, longest = None, None
            try:
                with suppress(RequestRefused):  # another kind of server
                    agreed = (await client.ask("GET", SETTINGS))["agreed"]
                    longest = agreed["max_model_len"]
                    if self._config not in (None, agreed["config"]):
                        raise RolloutError(
                            f"teacher.addresses: {client.address.url} holds a model with another config.json than "
                            "teacher.path; give the address of a server of that model, or its folder"
                        )
                if longest is None:
                    model = (await client.ask("GET", MODELS))["data"][0]
                    name, longest = model["id"], model.get("max_model_len")
                is_short = longest is not None and longest < most_tokens + 1
            except (ServerError, TypeError, KeyError, IndexError) as error:
                raise RolloutError(
                    f"teacher.addresses: {client.address.url} does not answer as a server that scores: {error}"
                ) from error
            if is_short:
                raise RolloutError(
                    f"teacher.addresses: {client.address.url} takes {longest} tokens; it needs {most_tokens + 1}, one "
                    "more than data.prompt.max_length + rollout.max_response_length; start it with a longer limit"
                )
            names.append(name)
        return names

    async def _score_all(self, rollouts: Sequence[Rollout], top_k: int, clients: list[ServerClient]) -> list[Scores]:
        places = asyncio.Semaphore(self._at_once * len(clients))

        async def one(number: int, rollout: Rollout) -> Scores:
            async with places:
                failures: list[str] = []
                for attempt in range(RETRIES + 1):
                    which = (world_rank() + number + attempt) % len(clients)
                    try:
                        return await self._score(clients[which], self._models[which], rollout, top_k)
                    except RolloutError as error:
                        raise RolloutError(f"teacher.addresses: {clients[which].address.url}: {error}") from error
                    except ServerError as error:
                        failures.append(f"{clients[which].address.url}: {error}")
                        if isinstance(error, RequestRefused):
                            break
                        await asyncio.sleep(2**attempt if attempt < RETRIES else 0)
                raise RolloutError(f"response {rollout.id} was not scored: {'; '.join(dict.fromkeys(failures))}")

        return list(await asyncio.gather(*(one(number, rollout) for number, rollout in enumerate(rollouts))))

    async def _score(self, client: ServerClient, model: str | None, rollout: Rollout, top_k: int) -> Scores:
        tokens, first = rollout.whole.tolist(), rollout.prompt_length
        if model is None:
            body = {"token_ids": tokens, "first": first, "top_k": top_k}
            return checked_scores(rollout, await client.score(body), top_k)
        wanted = {"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": top_k, "temperature": 1.0}
        answer = await client.ask("POST", COMPLETIONS, wanted)
        try:
            places = answer["choices"][0]["prompt_logprobs"]
            if len(places) != len(tokens):
                raise RolloutError(f"response {rollout.id}: {len(places)} log-probs of {len(tokens)} tokens")
            of_response = zip(places[first:], tokens[first:], strict=True)
            values = [float(place[str(token)]["logprob"]) for place, token in of_response]
            scores = Scores(np.array(values, np.float32))
            if top_k:  # the sampled token comes with them where it is none of them
                said = [
                    sorted((-float(x["logprob"]), int(token)) for token, x in place.items()) for place in places[first:]
                ]
                found = np.array([best[:top_k] for best in said], np.float64).reshape(len(said), -1, 2)
                scores = Scores(scores.logprobs, found[..., 1].astype(np.int32), -found[..., 0].astype(np.float32))
        except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise RolloutError(
                f"no prompt log-probs of response {rollout.id} ({type(error).__name__}: {error}); serve the teacher "
                "with vLLM, or `megatron-rl serve`"
            ) from error
        return checked_scores(rollout, scores, top_k)


def engine_config(rollout: RolloutConfig, top_k: int = 0) -> RolloutConfig:
    """The engine of a teacher beside the learner: it samples one token after each response, which nobody reads.
    ``top_k``: most tokens that a request asks for at each place."""
    own = {"engine": "vllm", "quantization": QuantizationConfig(), "function": None, "verify_refit": False}
    own |= {
        "sampled_head": top_k,
        "max_staleness": 0,
        "tensor_parallel": 1,
        "max_response_length": rollout.max_response_length + 1,
    }
    return rollout.model_copy(update=own)


class Teachers:
    """The teachers of a run that have engines of their own. Every rank has one of these; its methods are collective.

    ``data_sources``: of all prompts; a teacher of none of them is not started. Raises what the engines raise.
    """

    def __init__(self, recipe: Recipe, data_sources: Iterable[str], device: Literal["cpu", "cuda"]) -> None:
        self._config, self._models = recipe.teacher, {}
        self._vocab_size = read_architecture(recipe.model.path).vocab_size
        taught = {self._config.key_of(source) for source in data_sources}
        try:
            for key, model in self._config.models.items():
                if key in taught:
                    self._models[key] = together(key, partial(_scorer, recipe, model, device), fault=RolloutError)
        except Exception:
            self.close()
            raise

    def teach(self, groups: list[Group]) -> dict[str, float]:
        """Give the responses their `Rollout.teacher_logprobs`, on the rank that has each; `teacher/*` by data source.

        Raises `RolloutError` on every rank where one response could not be scored.
        """
        together("the teacher", partial(self._score, groups), fault=RolloutError, describe=str)
        return self._by_data_source(groups) if self._config.by_source else {}

    def _score(self, groups: list[Group]) -> None:
        for key, model in self._models.items():
            mine = [group for group in groups if self._config.key_of(group.prompt.data_source) == key]
            rollouts = [rollout for group in mine for rollout in group.rollouts if rollout.tokens is not None]
            scores = model.score(rollouts, self._config.top_k) if rollouts else []
            for rollout, of_rollout in zip(rollouts, scores, strict=True):
                rollout.teacher_logprobs, tokens, of_tokens = of_rollout
                if tokens is not None:
                    foreign = tokens >= self._vocab_size  # a teacher may have rows that its tokenizer does not use
                    rollout.teacher_tokens = np.where(foreign, -1, tokens)
                    rollout.teacher_set_logprobs = np.where(foreign, np.float32(-np.inf), of_tokens)

    def _by_data_source(self, groups: list[Group]) -> dict[str, float]:
        """`teacher/<data source>/kl`: the mean of log mu - log τ over its trained tokens."""
        sums: dict[str, np.ndarray] = {}
        for group in groups:
            for rollout in (rollout for rollout in group.rollouts if rollout.tokens is not None):
                gap = rollout.inference_logprobs.astype(np.float64) - rollout.teacher_logprobs.clip(min=MIN_LOGPROB)
                of_source = sums.setdefault(group.prompt.data_source, np.zeros(2))
                of_source += (gap[rollout.loss_mask].sum(), rollout.num_trained)
        totals: dict[str, np.ndarray] = {}
        for share in gather_objects(sums):
            for source, pair in share.items():
                totals[source] = totals.get(source, 0.0) + pair
        return {f"teacher/{source}/kl": total / count for source, (total, count) in sorted(totals.items()) if count}

    def close(self) -> None:
        """End the engines."""
        for model in self._models.values():
            model.close()


def _scorer(recipe: Recipe, model: TeacherModelConfig, device: Literal["cpu", "cuda"]) -> TokenScorer:
    rollout, longest_prompt = recipe.rollout, recipe.data.prompt.max_length
    if model.engine == "vllm_server":
        most = longest_prompt + rollout.max_response_length
        return ServerScorer(model.addresses, most, rollout.servers.request_deadline_s, rollout.max_num_seqs, model.path)
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    path = model.path or recipe.model.path
    return VllmGenerator(
        engine_config(rollout, recipe.teacher.top_k),
        path,
        max_prompt_length=longest_prompt,
        device=device,
        precision=recipe.precision,
        sleeps=False,
    )
