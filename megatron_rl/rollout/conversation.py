"""Conversations of more than one turn: what a user's `rollout.function` gets, and how its requests share an engine.

The function talks to the engine in token ids, so nothing that was sampled is ever tokenized again. What it returns is
one response to the problem: all tokens after the prompt, with a mask of those that the policy sampled. The others (tool
results) are read by the model and left out of the loss.

Shapes: ``P`` prompt tokens, ``R`` tokens after them, ``L`` layers, ``K`` experts per token.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import operator
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_rl.errors import InputError, shown
from megatron_rl.model.architecture import Architecture
from megatron_rl.process.user_functions import load_function
from megatron_rl.rollout.chat import Chat
from megatron_rl.rollout.generator import TOO_SHORT, LegCounts, RolloutError, Sampling, sampling_fields
from megatron_rl.rollout.requests import Request, Sealed, make_rollout
from megatron_rl.routing import checksums_from_row, joined_checksums, route_checksums
from megatron_rl.types import FinishReason, Prompt, Rollout

if TYPE_CHECKING:
    from megatron_rl.rollout.endpoint import Endpoint

Function = Callable[["Client", Prompt], Awaitable["Conversation"]]


@dataclass(frozen=True)
class Talk:
    """A `rollout.function`, and the tokenizer's two ways. No special tokens are added, and none are decoded."""

    name: str  # of the function, for messages
    function: Function
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    chat: Chat | None = None  # None: there is no chat template
    shortest: int = 1  # tokens that the engine can begin with (`generator.shortest_prompt`)


def load_talk(
    name: str, tokenizer: Any, template: str | None = None, arguments: Mapping[str, Any] | None = None
) -> Talk:
    """Import `rollout.function` ``name``. Raises `InputError` where it cannot be imported or is no ``async def``.

    ``template``, ``arguments``: of `Client.endpoint`, as `Chat` takes them.
    """
    try:
        function = load_function(name)
    except Exception as error:
        raise InputError(
            f"rollout.function {name}: the file cannot be imported: {type(error).__name__}: {shown(error)}"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise InputError(f"rollout.function {name}: it is no `async def`; write `async def f(client, problem)`")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise InputError(
            f"rollout.function {name}: it cannot be called as f(client, problem): {error}; write "
            "`async def f(client, problem)`"
        ) from error
    encode = partial(tokenizer.encode, add_special_tokens=False)
    chat = None if template is None else Chat(tokenizer, template, arguments)
    return Talk(name, function, encode, partial(tokenizer.decode, skip_special_tokens=True), chat)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of request 0, 1, 2, … of a conversation; ``seed``: of the response (`requests.request_seed`)."""
    if not turn:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Turn:
    """What the engine sampled for one request."""

    prompt: list[int]  # all tokens that it continues
    tokens: list[int]  # sampled tokens, the stop token included
    logprobs: list[float]  # log mu of each
    finish_reason: FinishReason  # "stop": ended with a stop token; "length": cut at the limit
    routes: np.ndarray | None = None  # [prompt + tokens - 1 - first_row, L, K]; None: the engine records none
    first_row: int = 0  # of `routes`: those of earlier tokens were not asked for
    checksums: np.ndarray | None = None  # of routes that a server sealed; None: as the engine records them
    versions: np.ndarray | None = None  # [tokens] int32, of the weights that sampled each; None: the engine's
    counts: LegCounts = LegCounts()  # noqa: RUF009 - how weight updates met it; frozen
    num_cached: int | None = None  # tokens of `prompt` that the engine had in its cache; None: it does not say

    def cut(self, length: int, sequence_id: str) -> Turn:
        """Return the turn of the first ``length`` sampled tokens, which were to be the last."""
        if length == len(self.tokens):
            return replace(self, finish_reason="stop")
        end, routes, checksums = len(self.prompt) + length - 1 - self.first_row, self.routes, self.checksums
        if routes is not None and checksums is not None:
            whole, num_layers = np.array([*self.prompt, *self.tokens]), routes.shape[1]
            behind = route_checksums(sequence_id, whole, routes[end:], self.first_row + end)[-num_layers:]
            layers = (checksums[-num_layers:].view(np.uint64) - behind.view(np.uint64)).view(np.int64)
            checksums = np.concatenate([checksums[:end], layers])
        return replace(
            self,
            tokens=self.tokens[:length],
            logprobs=self.logprobs[:length],
            finish_reason="stop",
            routes=None if routes is None else routes[:end],
            checksums=checksums,
            versions=None if self.versions is None else self.versions[:length],
        )


class Conversation:
    """The tokens of one conversation, and which of them the policy sampled. `Client.conversation` makes one."""

    def __init__(self, client: Client, prompt: list[int], max_response_length: int) -> None:
        self._client, self._num_prompt, self._limit = client, len(prompt), len(prompt) + max_response_length
        self._tokens = list(prompt)
        self._sampled: list[bool] = []  # of each token after the prompt
        self._logprobs: list[float] = []
        self._versions: list[np.ndarray] = []
        self._routes: list[np.ndarray] | None = []
        self._checksums: list[np.ndarray] = []  # of sealed `_routes`
        self._num_rows = self._end = 0  # rows of `_routes`; tokens up to the end of the last turn
        self._last: Turn | None = None
        self._counts = LegCounts()  # of all turns, without their versions
        self.num_turns = self.num_reread = 0  # reread: tokens that the engine computed for an earlier turn as well
        self.truncated = False  # there was no room to go on; the function may set it, too
        self.refusal = ""  # what a program was told that got no answer from an `Endpoint`

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, those of the prompt first."""
        return list(self._tokens)

    @property
    def room(self) -> int:
        """How many tokens may follow: `rollout.max_response_length` without what is there after the prompt."""
        return self._limit - len(self._tokens)

    async def generate(self, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()) -> Turn:
        """Let the policy continue the conversation, and return what it sampled. Arguments: see `Client.generate`."""
        turn = await self._client.sample(self._tokens, max_tokens, stop_token_ids, self._num_rows)
        self.add(turn)
        return turn

    async def reply(
        self,
        told: Sequence[int],
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        cut: Callable[[list[int]], int | None] = lambda tokens: None,
    ) -> Turn | None:
        """`tell`, then `generate`: both or, where the caller is cancelled, neither. None: there is no room.

        ``cut``: how many of the sampled tokens stay, where text ends the turn that is not one token; None: all.
        """
        told = self._client.token_ids(told, "reply")
        if len(told) >= self.room:
            self.truncated = True
            return None
        turn = await self._client.sample([*self._tokens, *told], max_tokens, stop_token_ids, self._num_rows)
        if (length := cut(turn.tokens)) is not None:
            turn = turn.cut(length, self._client.sequence_id)
        self.truncated = False
        self.tell(told)
        self.add(turn)
        return turn

    def add(self, turn: Turn) -> None:
        """Append what `Client.generate` sampled after exactly the tokens that are here. They are trained on."""
        if turn.prompt != self._tokens:
            raise RolloutError("the turn continues other tokens than the conversation has; generate from its `tokens`")
        self._add_routes(turn)
        self._tokens += turn.tokens
        self._sampled += [True] * len(turn.tokens)
        self._logprobs += turn.logprobs
        if turn.versions is not None:  # what was told before it was read by the weights that began it
            self._versions += [np.repeat(turn.versions[:1], len(turn.prompt) - (self._end or self._num_prompt))]
            self._versions += [turn.versions]
        self._counts += turn.counts
        if turn.num_cached is not None and self.num_turns:  # the last sampled token was not read yet
            self.num_reread += max(0, self._end - 1 - turn.num_cached)
        self._last, self._end, self.num_turns = turn, len(self._tokens), self.num_turns + 1

    def _add_routes(self, turn: Turn) -> None:
        """Keep the rows of earlier turns, with which their tokens were sampled, and append those that are new: of the
        last turn's final token, of the tool result, and of what was sampled now."""
        if turn.routes is None or self._routes is None:
            self._routes = None
            return
        end, known = len(turn.prompt) + len(turn.tokens) - 1, self._num_rows - turn.first_row
        if len(turn.routes) != end - turn.first_row or known < 0:
            raise RolloutError(
                f"the engine recorded {len(turn.routes)} rows of routes for {end - turn.first_row} tokens"
            )
        if turn.checksums is not None:
            whole = np.array([*turn.prompt, *turn.tokens])
            self._checksums.append(
                checksums_from_row(
                    turn.checksums, self._client.sequence_id, whole, turn.routes, self._num_rows, turn.first_row
                )
            )
        self._routes.append(turn.routes[known:])
        self._num_rows = end

    def tell(self, tokens: Sequence[int]) -> bool:
        """Append what the policy did not sample, such as a tool's result: it is read, and not trained on.

        Returns False, and appends nothing, where no token could follow them; the conversation is then truncated.
        """
        tokens = self._client.token_ids(tokens, "tell")
        if len(tokens) >= self.room:
            self.truncated = True
            return False
        self._tokens += tokens
        self._sampled += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        return True

    # What the engine makes a response of. Tokens that were told after the last turn are left out: nothing follows them.

    @property
    def response(self) -> list[int]:
        """[R]"""
        return self._tokens[self._num_prompt : self._end]

    @property
    def sampled(self) -> np.ndarray:
        """[R] bool"""
        return np.array(self._sampled[: len(self.response)], dtype=bool)

    @property
    def logprobs(self) -> list[float]:
        """[R], 0 where the policy did not sample the token."""
        return self._logprobs[: len(self.response)]

    @property
    def routes(self) -> np.ndarray | Sealed | None:
        """[P + R - 1, L, K] over all turns, sealed where a server sealed them; None where the engine recorded none."""
        if not self._routes:
            return None
        routes = np.concatenate(self._routes)
        if not self._checksums:
            return routes
        return routes, joined_checksums(self._checksums, routes.shape[1])

    @property
    def policy_versions(self) -> np.ndarray | None:
        """[R] int32, of the weights that sampled each token, or that read it; None where turns do not say."""
        return np.concatenate(self._versions) if self._versions else None

    @property
    def finish_reason(self) -> FinishReason:
        assert self._last is not None
        return "length" if self.truncated else self._last.finish_reason

    def counts(self, num_versions: int) -> LegCounts:
        """Return how weight updates met the conversation, which ``num_versions`` policies sampled."""
        return replace(self._counts, versions=num_versions)

    def to_rollout(
        self, request: Request, versions: int | np.ndarray, architecture: Architecture | None, text: str
    ) -> Rollout:
        """Return the conversation as the response to ``request``. Arguments, and what it raises: see `make_rollout`."""
        return make_rollout(
            request,
            self.response,
            self.logprobs,
            self.finish_reason,
            versions,
            routes=self.routes,
            architecture=architecture,
            text=text,
            sampled=self.sampled,
            num_turns=self.num_turns,
        )

    def check(self, client: Client) -> None:
        """Raise `RolloutError` unless it is the conversation of ``client`` and has a turn."""
        if self._client is not client:
            raise RolloutError("it returned the conversation of another problem or sample")
        if not self.num_turns:
            raise RolloutError("it returned a conversation in which the policy sampled nothing; call `generate`")


class TurnSource(Protocol):
    """What samples the turns of one or more conversations."""

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        """Sample after ``tokens`` (``fields``: `generator.sampling_fields`). Routes before ``first_row`` may be left
        out."""
        ...


class Client:
    """The engine as one conversation sees it."""

    def __init__(
        self, talk: Talk, request: Request, requests: TurnSource, sampling: Sampling, stops: list[int], vocab_size: int
    ) -> None:
        self.encode, self.decode, self.vocab_size = talk.encode, talk.decode, vocab_size
        self.seed = request.seed  # of the response: for random numbers of the function's own
        self.sequence_id = request.sequence_id
        self._chat, self._shortest = talk.chat, talk.shortest
        self._request, self._requests, self._sampling, self._stops = request, requests, sampling, stops
        self._num_requests = 0
        self.num_endpoints = 0

    def conversation(self) -> Conversation:
        """Return a new conversation that begins with the problem's prompt."""
        return Conversation(self, self._request.prompt.tokens, self._sampling.max_response_length)

    def endpoint(self, max_turns: int = 64) -> Endpoint:
        """Return an address, for ``async with``, where programs that speak OpenAI's chat hold a new conversation."""
        if self._chat is None:
            raise RolloutError("endpoint: there is no chat template; set data.prompt.chat_template to the path of one")
        from megatron_rl.rollout.endpoint import Endpoint  # needs aiohttp, which comes with vLLM

        self.num_endpoints += 1
        return Endpoint(self.conversation(), self._chat, self.encode, self.decode, max_turns)

    def token_ids(self, given: Sequence[int], what: str) -> list[int]:
        """Return ``given`` as a list. Raises `RolloutError` for what is no sequence of the model's tokens."""
        if isinstance(given, str | bytes):
            raise RolloutError(
                f"{what}: {shown(given, 60)} is text, and tokens are wanted; write client.encode(text) in its place"
            )
        try:
            tokens = [operator.index(token) for token in given]
        except TypeError as error:
            raise RolloutError(f"{what}: {shown(given, 60)} is no sequence of token ids: {error}") from error
        if wrong := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise RolloutError(f"{what}: {wrong[:3]} are not tokens of the model (0 … {self.vocab_size - 1})")
        return tokens

    async def generate(
        self, tokens: Sequence[int], max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Turn:
        """Sample what follows ``tokens``, up to and with a stop token.

        ``max_tokens``: at most so many; None, or more than there is room for: as many as there is room for, which is
        the prompt and `rollout.max_response_length` together. ``stop_token_ids``: beside the recipe's.
        """
        return await self.sample(tokens, max_tokens, stop_token_ids)

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, stop_token_ids: Sequence[int], first_row: int = 0
    ) -> Turn:
        """Sample as `generate`, with routes of tokens from ``first_row`` on."""
        tokens, stops = self.token_ids(tokens, "generate"), self.token_ids(stop_token_ids, "generate: stop_token_ids")
        room = len(self._request.prompt.tokens) + self._sampling.max_response_length - len(tokens)
        if not tokens or room < 1:
            raise RolloutError(
                f"generate: {len(tokens)} tokens leave no room to sample one; prompt and "
                f"rollout.max_response_length make {len(tokens) + room}"
            )
        if len(tokens) < self._shortest:
            raise RolloutError(f"generate: {len(tokens)} token; {TOO_SHORT}")
        if max_tokens is not None and max_tokens < 1:
            raise RolloutError(f"generate: max_tokens is {max_tokens}; use 1 or more")
        seed = turn_seed(self._request.seed, self._num_requests)
        self._num_requests += 1
        fields = sampling_fields(self._sampling, seed, sorted({*self._stops, *stops}))
        fields["max_tokens"] = room if max_tokens is None else min(max_tokens, room)
        return await self._requests.answer(tokens, fields, first_row)


async def converse(talk: Talk, client: Client, request: Request) -> Conversation:
    """Return the conversation that ``talk`` holds for ``request``. Raises `RolloutError` that names function, prompt
    and sample, whatever the function raised."""
    try:
        conversation = await talk.function(client, request.prompt)
        if not isinstance(conversation, Conversation):
            raise RolloutError(f"it returned a {type(conversation).__name__}, not its conversation")
        conversation.check(client)
    except (Exception, asyncio.CancelledError) as error:
        kind = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
        where = f"prompt {request.prompt.id!r}, sample {request.sample}"
        message = " ".join(str(error).split())[:500]
        raise RolloutError(f"rollout.function {talk.name}, {where}: {kind}{message}") from error
    return conversation


class TurnEngine(Protocol):
    """An engine that is stepped, and can be given requests between two steps."""

    def submit(self, tokens: list[int], fields: dict[str, Any]) -> str:
        """Begin to sample after ``tokens`` (``fields``: `generator.sampling_fields`), and return the request's name."""
        ...

    def step(self) -> list[tuple[str, Any]]:
        """Sample one token of each running request; return name and output of those that are complete."""
        ...

    def to_turn(self, tokens: list[int], output: Any) -> Turn: ...

    def abort(self, names: list[str]) -> None: ...


class Requests:
    """The requests that are under way, each with the future that its conversation waits for."""

    def __init__(self, engine: TurnEngine) -> None:
        self._engine = engine
        self._open: dict[str, tuple[asyncio.Future[Turn], list[int]]] = {}
        self.came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        name = self._engine.submit(tokens, fields)
        self._open[name] = future, tokens
        self.came.set()
        try:
            return await future
        except asyncio.CancelledError:  # the conversation gave the turn up
            if self._open.pop(name, None) is not None:
                self._engine.abort([name])
            raise

    def step(self) -> None:
        for name, output in self._engine.step():
            future, tokens = self._open.pop(name)
            if not future.done():  # its conversation may have given it up
                future.set_result(self._engine.to_turn(tokens, output))

    def abort(self) -> None:
        if self._open:
            self._engine.abort(list(self._open))
        self._open.clear()


PASSES = 16
"""How often conversations get to run between two steps of the engine. It is a fixed number, so that which requests run
together is the same each time if the functions wait for nothing but the engine."""
PATIENCE_S = 0.5  # between looks at the deadline while no request is under way


async def hold(conversations: Sequence[Callable[[], Awaitable[None]]], requests: Requests, deadline: float) -> int:
    """Run all ``conversations`` at once and step the engine until they end; return the number of steps.

    ``deadline``: of `time.monotonic`. Raises `TimeoutError` where it passes, else what a conversation raises first. The
    others are then cancelled, and no request is left in the engine.
    """
    tasks = [asyncio.ensure_future(conversation()) for conversation in conversations]
    num_steps = 0
    try:
        while True:
            for _ in range(PASSES):
                await asyncio.sleep(0)
            for task in tasks:
                if task.done():
                    task.result()
            left = [task for task in tasks if not task.done()]
            if not left:
                return num_steps
            if time.monotonic() > deadline:
                raise TimeoutError
            if len(requests):
                requests.step()
                num_steps += 1
            else:  # all wait for tools
                requests.came.clear()
                news = asyncio.ensure_future(requests.came.wait())
                try:
                    await asyncio.wait([*left, news], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        requests.abort()
