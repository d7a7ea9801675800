"""Sends the requests of one call to the servers that are ready, so that each request is answered exactly once.

A request waits in the queue, is with one server, is answered, or is given up; it is never in two of these states.
Requests that a dead, hanging or outdated server has not answered go back to the front of the queue. An answer to a
request that was taken back is dropped with its task. Several calls may be under way (`rollout.in_flight`). Room on a
server goes to the call that is first in `Line`.

`Balance` chooses the server. The samples of one prompt go to one server, whose prefix cache then holds the prompt, as
long as its queue is at most ``slack`` longer than the shortest. A server's queue counts requests of all ranks: this
rank knows its own, and every answer says how many the server had.

`Legs` is a response that weight updates cut (`rollout.in_flight.mode: abort_and_resume`). Every leg is a request of its
own: its prompt is the prompt and all tokens so far, which the new weights read from the start. Its log-probs and
versions are those of the policy that sampled it. It has a seed of its own: with the response's seed it would draw the
first leg's random numbers again. A position's routes are those of the leg that sampled the token after it. The learner
thus replays for every token the experts that its distribution came from. Keys and values of earlier legs' tokens were
computed anew, with routes that are not replayed.

`Conversations` are those of a user's `rollout.function`: every turn is one more request of the batch's `Dispatch`.
Functions run in an event loop and a thread of their own, so that one which computes or blocks does not keep the rank
from looking after its servers. A turn asks for the routes from the last row on that the conversation has, so that no
row is sent twice. A server seals the routes of each turn for the response's id and place, and the seals of all turns
add up to those of the whole (`routing.payload`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.rollout.conversation import Client, Conversation, Talk, Turn, converse
from megatron_rl.rollout.generator import LegCounts, RolloutError, Sampling
from megatron_rl.rollout.requests import Request, leg_seed
from megatron_rl.rollout.servers.client import RequestRefused, ServerError, ServerLost, StaleServer
from megatron_rl.rollout.servers.pool import Member, Members
from megatron_rl.routing import joined_checksums
from megatron_rl.types import Rollout


class Balance:
    """Which server gets which request of one call. ``prompts``: what each request begins with; equal ones share their
    keys and values."""

    def __init__(self, prompts: Sequence[Hashable], slack: int) -> None:
        self._prompts, self._slack = list(prompts), slack
        self._home: dict[Hashable, int] = {}  # the server that a prompt went to last

    def add(self, prompt: Hashable) -> None:
        """One more request comes, which begins with ``prompt``."""
        self._prompts.append(prompt)

    def choose(self, free: Sequence[Member], index: int) -> Member:
        """The one of ``free`` that request ``index`` goes to."""
        prompt, shortest = self._prompts[index], min(free, key=lambda member: member.queue)
        home = next((member for member in free if member.number == self._home.get(prompt)), None)
        if home is not None and home.queue <= shortest.queue + self._slack:
            return home
        self._home[prompt] = shortest.number
        return shortest


@dataclass
class Legs:
    """What is there of one response. ``body``: the request for all of it."""

    body: dict[str, Any]
    answers: list[Rollout] = field(default_factory=list)
    num_recomputed: int = 0  # response tokens that later legs read

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def request(self) -> dict[str, Any]:
        """The body of the request for what is missing."""
        if not self.answers:
            return self.body
        tokens = np.concatenate([answer.tokens for answer in self.answers])
        prompt, fields = self.body["token_ids"], self.body["sampling_params"]
        return {
            **self.body,
            "token_ids": [*prompt, *tokens.tolist()],
            "first_route": len(prompt) + len(tokens) - 1,
            "sampling_params": {
                **fields,
                "max_tokens": fields["max_tokens"] - len(tokens),
                "seed": leg_seed(fields["seed"], len(self.answers)),
            },
        }

    def add(self, answer: Rollout) -> bool:
        """Take the answer to `request`. True where the response is complete with it."""
        if len(answer.tokens):
            self.num_recomputed += self.num_tokens
            self.answers.append(answer)
        return answer.finish_reason != "abort"

    def counts(self, num_versions: int) -> LegCounts:
        """Return the counts of the complete response, which ``num_versions`` policies sampled."""
        return LegCounts(len(self.answers), num_versions, self.num_recomputed)

    def whole(self) -> Rollout:
        """The response, when it is complete."""
        if len(self.answers) == 1:
            return self.answers[0]
        columns = {
            name: np.concatenate([getattr(answer, name) for answer in self.answers])
            for name in ("tokens", "inference_logprobs", "policy_versions", "head_tokens", "head_logprobs")
            if getattr(self.answers[0], name) is not None
        }
        if self.answers[0].routed_experts is not None:
            columns["routed_experts"] = np.concatenate([answer.routed_experts for answer in self.answers])
            seals = [answer.route_checksums for answer in self.answers]
            columns["route_checksums"] = joined_checksums(seals, columns["routed_experts"].shape[1])
        return Rollout("", (), finish_reason=self.answers[-1].finish_reason, **columns)


RETRIES = 3  # of one response that failed, before the run ends


class Line:
    """The calls of one rank that have requests to make, in the order in which they are served."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Dispatch]] = []

    def join(self, place: int, call: Dispatch) -> None:
        self._calls.append((place, call))
        self._calls.sort(key=lambda entry: entry[0])

    def leave(self, call: Dispatch) -> None:
        self._calls = [entry for entry in self._calls if entry[1] is not call]

    def first(self) -> Dispatch | None:
        """The first call with a request that waits."""
        return next((call for _, call in self._calls if call.is_waiting), None)


class Dispatch:
    """One call's requests of one rank. ``names`` say in errors which request it was.

    ``concurrency``: most requests in flight to one server. ``retries``: of one that failed. ``share`` (i, n): this
    rank is number i of n that ask the same servers. Each has its part of every server's ``concurrency``, so that
    together they do not pass it. ``line``: of the rank's calls; this one's ``place`` in it, low ones first.
    ``is_open``: requests are added while it runs (`add`), and it ends when this is set to False.
    """

    def __init__(
        self,
        members: Members,
        bodies: Sequence[dict[str, Any]],
        names: Sequence[str],
        concurrency: int,
        retries: int = RETRIES,
        share: tuple[int, int] = (0, 1),
        balance: Balance | None = None,
        line: Line | None = None,
        place: int = 0,
        is_open: bool = False,
    ) -> None:
        assert share[1] <= concurrency, "a rank without a part of a server's room would wait for ever"
        self._members, self._names, self.is_open = members, list(names), is_open
        self.legs = [Legs(body) for body in bodies]
        self._line, self._place = line or Line(), place
        self._concurrency, self._retries, self._share = concurrency, retries, share
        self._balance = balance or Balance(range(len(bodies)), slack=0)
        self._waiting = deque(range(len(bodies)))
        self._asked: dict[int, tuple[asyncio.Task, Member, int]] = {}  # the version that was asked for
        self._left = set(range(len(bodies)))  # neither answered nor given up
        self._failures: dict[int, list[str]] = {}  # of each request, on which server and why
        self._overtaken: dict[int, set[tuple[int, int]]] = {}  # servers and versions that an update was quicker than
        self._ended: asyncio.Queue[asyncio.Task | None] = asyncio.Queue()  # tasks that are done; None: look again
        self._index_of: dict[asyncio.Task, int] = {}
        self.num_requeued = 0

    def add(self, body: dict[str, Any], name: str, prompt: Hashable) -> int:
        """Ask for one more response, and return the request's number. ``prompt``: as in `Balance`."""
        number = len(self.legs)
        self.legs.append(Legs(body))
        self._names.append(name)
        self._balance.add(prompt)
        self._left.add(number)
        self._waiting.append(number)
        self._ended.put_nowait(None)
        return number

    async def run(self) -> list[Rollout]:
        """All answers, in the order of the requests; see `completions`."""
        answers = {index: answer async for index, answer in self.completions()}
        return [answers[index] for index in range(len(self.legs))]

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    async def completions(self) -> AsyncIterator[tuple[int, Rollout]]:
        """Number and answer of each request as they come, until each was answered or given up.

        Raises `RolloutError` where a request failed more than ``retries`` times or was refused, or where no server is
        left and none comes back in time.
        """
        self._line.join(self._place, self)
        try:
            while self._left or self.is_open:
                seen = self._members.changes
                self._ask()
                if self._waiting and not self._asked:
                    await self._wait_to_ask()
                    continue
                task = await self._next_end(seen)
                if task in self._index_of:
                    index, answer = await self._settle(task)
                    if answer is not None:
                        yield index, answer
        finally:
            self.give_up_all()
            self._line.leave(self)

    async def _wait_to_ask(self) -> None:
        """Until a server can be asked. The time limit is for servers that are away, not for earlier calls' turn."""
        what = f"a server to sample from ({len(self._waiting)} of {len(self.legs)} responses are not there yet)"
        await self._members.wait_for(lambda: bool(self._members.ready) or not self._left, what)
        is_next = lambda: self._line.first() is self and bool(self._free())  # noqa: E731
        await self._members.until(lambda: is_next() or not self._members.ready or not self._left, what)

    def give_up(self, indices: Iterable[int]) -> None:
        """Ask for these no more. A server that is at one is told so; one that is answered stays so."""
        given_up = self._left.intersection(indices)
        self._left -= given_up
        self._waiting = deque(index for index in self._waiting if index not in given_up)
        for index in given_up & self._asked.keys():
            task, member, _ = self._asked.pop(index)
            del self._index_of[task]
            task.cancel()
            member.in_flight -= 1
        self._ended.put_nowait(None)
        self._members.note()

    def give_up_all(self) -> None:
        """Ask for nothing more."""
        self.is_open = False
        self.give_up(self._left)

    def _room(self, member: Member) -> int:
        """Most requests of this rank to ``member``: its part, and of what does not divide evenly one in turn."""
        own, ranks = self._share
        return self._concurrency // ranks + ((own + member.number) % ranks < self._concurrency % ranks)

    def _free(self) -> list[Member]:
        return [member for member in self._members.ready if member.in_flight < self._room(member)]

    def _ask(self) -> None:
        """Hand waiting requests to servers that have room, unless calls before this one have some."""
        while self._line.first() is self:
            if not (free := self._free()):
                return
            index = self._waiting.popleft()
            member = self._balance.choose(free, index)
            member.in_flight += 1
            task = asyncio.create_task(member.client.generate(self.legs[index].request(), member.version))
            self._asked[index], self._index_of[task] = (task, member, member.version), index
            task.add_done_callback(self._ended.put_nowait)
            if not self._waiting and self._line.first() is not None:
                self._members.note()  # the next call may ask now

    def _is_new_to(self, index: int, member: Member, version: int) -> bool:
        """Whether this is the first time that request ``index`` meets an update of ``member`` from ``version`` on."""
        overtaken = self._overtaken.setdefault(index, set())
        is_new = (member.number, version) not in overtaken
        overtaken.add((member.number, version))
        return is_new

    async def _next_end(self, seen: int) -> asyncio.Task | None:
        """The next request to end; None where a change of the members may give room for more."""
        ended, changed = asyncio.create_task(self._ended.get()), asyncio.create_task(self._members.change(seen))
        try:
            await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            changed.cancel()
            ended.cancel()

    async def _settle(self, task: asyncio.Task) -> tuple[int, Rollout | None]:
        """What became of a request: its answer, or None and it waits again."""
        index = self._index_of.pop(task)
        _, member, version = self._asked.pop(index)
        member.in_flight -= 1
        if self._line.first() not in (self, None):
            self._members.note()  # the room is another call's
        try:
            answer = task.result()
            if index not in self._left:  # given up meanwhile
                return index, None
            if self.legs[index].add(answer):
                self._left.discard(index)
                return index, self.legs[index].whole()
            is_update = member.version != version or len(answer.tokens) > 0
            self._members.mark_stale(member, version)
            if is_update or self._is_new_to(index, member, version):
                self._waiting.appendleft(index)
                return index, None
            failure, counts = ServerLost("it cuts responses off, though their weights are due"), True
        except RequestRefused as error:
            raise RolloutError(f"{self._names[index]}: {member.address.name} refused it: {error}") from error
        except StaleServer as error:
            self._members.mark_stale(member, version)
            failure: ServerError = error
            # An update that was quicker than the request is no failure of it; it may be so at every server once.
            counts = not self._is_new_to(index, member, version)
        except ServerLost as error:
            failure, counts = error, True
        self._waiting.appendleft(index)
        self.num_requeued += 1
        failures = self._failures.setdefault(index, [])
        if counts:
            failures.append(f"{member.address.name}: {failure}")
        if isinstance(failure, ServerLost):
            await self._members.suspect(member, failure)
        if len(failures) > self._retries and index in self._left:
            raise RolloutError(
                f"{self._names[index]}: failed {len(failures)} times, last on "
                f"{failures[-1]}; before on {', '.join(failures[:-1]) or 'none'}"
            )
        return index, None


CLOSE_S = 5.0  # for functions to notice that they are cancelled; one that blocks ends with the process


class TalkLoop:
    """The event loop of the functions. It lasts as long as the run, so that they can keep connections open."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="conversations", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what still runs and end the thread. May be called twice."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self._end)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self.loop.close()

    def _end(self) -> None:
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            asyncio.gather(*left, return_exceptions=True).add_done_callback(lambda _: self.loop.stop())
        else:
            self.loop.stop()


class Conversations:
    """The conversations of one batch on one rank. Lives in the event loop of the servers.

    ``dispatch``: of the batch, open for requests. ``stop_token_ids``: the recipe's. ``deadline_s``: how long all may
    wait for tools; None: without limit.
    """

    def __init__(
        self,
        talk: Talk,
        loop: asyncio.AbstractEventLoop,
        dispatch: Dispatch,
        requests: Sequence[Request],
        sampling: Sampling,
        stop_token_ids: list[int],
        vocab_size: int,
        deadline_s: float | None,
    ) -> None:
        self._talk, self._loop, self._dispatch, self._requests = talk, loop, dispatch, requests
        self._sampling, self._stop_token_ids, self._vocab_size = sampling, stop_token_ids, vocab_size
        self._deadline_s = deadline_s
        self._turns: dict[int, asyncio.Future[Rollout]] = {}  # under way, by their number in the dispatch
        self._moved = time.monotonic()  # when a turn last began or ended
        self._home: asyncio.AbstractEventLoop  # of the servers; set by `completions`

    async def completions(self) -> AsyncIterator[tuple[int, Conversation]]:
        """Yield the number of a request and its conversation as conversations end; fewer where the batch is given up.

        Raises `RolloutError` where a function fails, where all wait for tools for ``deadline_s``, and what `Dispatch`
        raises. The other conversations are then cancelled.
        """
        self._home, ended = asyncio.get_running_loop(), asyncio.Queue[tuple[int, concurrent.futures.Future] | None]()
        pump = asyncio.create_task(self._pump())
        pump.add_done_callback(lambda _: ended.put_nowait(None))
        begun = [asyncio.run_coroutine_threadsafe(self._hold(request), self._loop) for request in self._requests]
        for index, future in enumerate(begun):

            def tell(future: concurrent.futures.Future, index: int = index) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._home.call_soon_threadsafe(ended.put_nowait, (index, future))

            future.add_done_callback(tell)
        try:
            for _ in begun:
                news = await self._next(ended)
                if news is None:
                    pump.result()  # raises what ended it; else the batch was given up
                    return
                index, future = news
                yield index, future.result()
        finally:
            for future in begun:
                future.cancel()
            self._dispatch.is_open = False
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _next(self, ended: asyncio.Queue) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._deadline_s):
                    return await ended.get()
            if not self._turns and time.monotonic() - self._moved >= self._deadline_s:
                raise RolloutError(
                    f"rollout.function {self._talk.name}: no conversation went on for rollout.deadline_s "
                    f"({self._deadline_s} s); give its tools a time-out of their own"
                )

    async def _pump(self) -> None:
        async with contextlib.aclosing(self._dispatch.completions()) as completions:
            async for number, answer in completions:
                if (future := self._turns.get(number)) is not None and not future.done():
                    future.set_result(answer)

    async def _ask(self, body: dict[str, Any], name: str, row: int) -> tuple[Rollout, int]:
        """In the servers' loop: the answer to one turn, and its number in the dispatch."""
        number, self._moved = self._dispatch.add(body, name, row), time.monotonic()
        future = self._turns[number] = asyncio.get_running_loop().create_future()
        try:
            return await future, number
        except asyncio.CancelledError:  # the function gave the turn up
            self._dispatch.give_up([number])
            raise
        finally:
            del self._turns[number]
            self._moved = time.monotonic()

    # ---------------------------------------------------------------- in the functions' loop

    async def _hold(self, request: Request) -> Conversation:
        turns = _TurnsOf(request, self)
        client = Client(self._talk, request, turns, self._sampling, self._stop_token_ids, self._vocab_size)
        try:
            return await converse(self._talk, client, request)
        except RolloutError:
            if asyncio.current_task().cancelling():  # by `completions`: nobody asks why it failed
                raise asyncio.CancelledError from None
            raise

    async def sample(self, request: Request, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        """Return the turn of ``request`` after ``tokens``."""
        body = {
            "id": request.sequence_id,
            "token_ids": tokens,
            "sampling_params": fields,
            "wants_routes": self._sampling.wants_routes,
            "first_route": first_row,
        }
        name = f"prompt {request.prompt.id!r}, sample {request.sample}"
        asked = asyncio.run_coroutine_threadsafe(self._ask(body, name, request.row), self._home)
        answer, number = await asyncio.wrap_future(asked)
        return Turn(
            tokens,
            answer.tokens.tolist(),
            answer.inference_logprobs.tolist(),
            answer.finish_reason,
            answer.routed_experts,
            first_row,
            answer.route_checksums,
            answer.policy_versions,
            self._dispatch.legs[number].counts(0),
        )


class _TurnsOf:
    """`TurnSource` of one of the conversations."""

    def __init__(self, request: Request, conversations: Conversations) -> None:
        self._request, self._conversations = request, conversations

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        return await self._conversations.sample(self._request, tokens, fields, first_row)
