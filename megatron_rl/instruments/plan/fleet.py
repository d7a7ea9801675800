"""Simulates servers by events, without a loop over tokens.

All responses of a server advance by one token per decoding step. A server therefore has one clock of tokens, ``v``: a
response that begins at v₀ with l tokens to go ends at v₀ + l, and a heap of these ends gives the next event. Between
two events the number n of running responses is constant. Δ decoding steps take
Δ · (overhead + max(read[n] + read_token · (C + n Δ / 2), compute · n)) seconds, with C tokens of context at their
beginning: the longer of memory traffic and computation. Prefill and weight updates stop that clock.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

SAME = 1e-6  # of a token: ends closer than this are one event

_numbers = itertools.count()


@dataclass(frozen=True)
class ServerCosts:
    """Unit costs of one server in seconds, and its capacity."""

    slots: int  # most running responses: rollout.max_num_seqs
    overhead: float  # seconds per decoding step
    read: Sequence[float]  # reading weights in a step, by number of running responses 0 … slots
    read_token: float = 0.0  # reading keys and values in a step, per token of context
    compute: float = 0.0  # per step and running response
    request: float = 0.0  # per request
    prefill: tuple[float, float] = (0.0, 0.0)  # per token of a prompt, and per square of its length
    capacity: float = math.inf  # tokens of its cache

    def seconds(self, running: int, context: float, tokens: float) -> float:
        """Return the seconds of ``tokens`` decoding steps. ``context``: tokens of all running responses before them."""
        read = self.read[running] + self.read_token * (context + running * tokens / 2)
        return tokens * (self.overhead + max(read, self.compute * running))

    def tokens(self, running: int, context: float, seconds: float) -> float:
        """Return the decoding steps in ``seconds``, the inverse of `seconds` (the larger of two rising functions)."""
        square = self.read_token * running / 2
        linear = self.overhead + self.read[running] + self.read_token * context
        by_compute = self.overhead + self.compute * running
        by_flops = seconds / by_compute if by_compute else math.inf
        if square:
            # This form of the positive root keeps its digits if ``square`` is small.
            return min(by_flops, 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))
        return min(by_flops, seconds / linear) if linear else by_flops

    def prefill_seconds(self, tokens: float) -> float:
        return tokens * (self.prefill[0] + self.prefill[1] * tokens)


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt and the responses to it."""

    tokens: float
    left: int  # responses that are not complete
    cached: int = -1  # version of the weights whose cache has this prompt
    place: int = -1  # place in the order of completion; -1: not complete
    sampled: dict[int, float] = field(default_factory=dict)  # version of weights → response tokens
    responses: list[Response] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.place >= 0


@dataclass(eq=False, slots=True)
class Response:
    prompt: Prompt
    length: float
    done: float = 0.0  # tokens decoded so far
    begun: float = 0.0  # the server's v when decoding of further tokens began
    entry: int = -1  # number of its end in the server's heap while it runs

    @property
    def context(self) -> float:
        return self.prompt.tokens + self.done


class Server:
    """One server between events. ``now``: time of its clock of tokens; later than the fleet's time while it prefills or
    takes weights."""

    def __init__(self, costs: ServerCosts) -> None:
        self.costs, self.now, self.v, self.version = costs, 0.0, 0.0, 0
        self.running: dict[Response, None] = {}  # in order of admission
        self.queue: deque[Response] = deque()
        self.ends: list[tuple[float, int, Response]] = []
        self.context, self.stamp = 0.0, 0
        self.idle = self.paused = self.prefilling = self.slot_seconds = self.recomputed = 0.0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.queue)

    def next_event(self) -> float:
        """Return the time when a response ends or the cache is full; infinite if nothing runs."""
        if not self.running:
            return math.inf
        return self.now + self.costs.seconds(len(self.running), self.context, self._steps_to_event())

    def _steps_to_event(self) -> float:
        while self.ends[0][1] != self.ends[0][2].entry:
            heappop(self.ends)
        to_full = (self.costs.capacity - self.context) / len(self.running) if len(self.running) > 1 else math.inf
        return max(0.0, min(self.ends[0][0] - self.v, to_full))

    def advance(self, until: float) -> None:
        """Advance to a time before the next event."""
        if until <= self.now:
            return
        running = len(self.running)
        if running:
            self._decode(self.costs.tokens(running, self.context, until - self.now), until)
        else:
            self.idle += until - self.now
            self.now = until

    def take_event(self) -> list[Response]:
        """Advance to the next event and return the responses that end there."""
        at = self.next_event()
        self._decode(self._steps_to_event(), at)
        ended = []
        while self.ends and self.ends[0][0] <= self.v + SAME:
            _, number, response = heappop(self.ends)
            if number == response.entry:
                self.leave(response)
                ended.append(response)
        if not ended and len(self.running) > 1 and self.context >= self.costs.capacity - SAME:
            last = next(reversed(self.running))  # vLLM preempts the response that it admitted last
            self.leave(last)
            self.queue.appendleft(last)
        return ended

    def _decode(self, steps: float, until: float) -> None:
        running = len(self.running)
        self.v += steps
        self.context += running * steps
        self.slot_seconds += running * (until - self.now)
        self.now = until

    def pause(self, until: float) -> None:
        """Stop decoding until that time, for a weight update."""
        self.paused += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def leave(self, response: Response) -> None:
        """Remove the response from the running ones; it keeps its tokens."""
        del self.running[response]
        self.context -= response.context + self.v - response.begun
        self.settle(response)
        response.entry = -1

    def settle(self, response: Response) -> None:
        """Count the tokens since ``begun`` as sampled by the server's current weights."""
        tokens = self.v - response.begun
        response.done, response.begun = response.done + tokens, self.v
        sampled = response.prompt.sampled
        sampled[self.version] = sampled.get(self.version, 0.0) + tokens

    def admit(self) -> None:
        """Start waiting responses while there are slots and cache for them."""
        while self.queue and len(self.running) < self.costs.slots:
            response = self.queue[0]
            room = self.costs.capacity - self.context - len(self.running)
            if self.running and response.context + 1 > room:
                return
            self.queue.popleft()
            self._prefill(response)
            response.begun, response.entry = self.v, next(_numbers)
            self.running[response] = None
            self.context += response.context
            heappush(self.ends, (self.v + response.length - response.done, response.entry, response))

    def _prefill(self, response: Response) -> None:
        prompt, seconds = response.prompt, self.costs.request
        if prompt.cached != self.version:
            prompt.cached = self.version
            seconds += self.costs.prefill_seconds(prompt.tokens)
        if response.done:
            self.recomputed += response.done
            both = self.costs.prefill_seconds(response.context)
            seconds += both - self.costs.prefill_seconds(prompt.tokens)
        self.prefilling += seconds
        self.now += seconds


class Fleet:
    """Servers behind one queue; the server with the fewest responses in flight gets the next one.

    ``mode``: `rollout.in_flight.mode`. With `finish`, batches and weight updates are processed strictly in the order of
    their requests; with the other modes at once.
    """

    def __init__(self, costs: ServerCosts, num_servers: int, mode: str, concurrency: int | None = None) -> None:
        self.servers = [Server(costs) for _ in range(num_servers)]
        self.time, self.num_complete = 0.0, 0
        self.pushed: dict[int, float] = {}  # version → time when the servers have it
        self._mode, self._concurrency = mode, concurrency or costs.slots
        self._waiting: deque[Response] = deque()
        self._jobs: deque[list[Prompt] | tuple[int, float]] = (
            deque()
        )  # queue of `finish`: batches and (version, seconds)
        self._at_hand: set[Prompt] = set()  # prompts of the current batch
        self._events: list[tuple[float, int, int]] = []  # time, server, the server's stamp

    def ask(self, batch: list[Prompt]) -> None:
        """Request all responses to these prompts now."""
        if self._mode == "finish":
            self._jobs.append(batch)
            self._next_job()
        else:
            self._hand_out(batch)

    def push(self, version: int, seconds: float) -> None:
        """Send weights to all servers, which stop answering for ``seconds``."""
        if self._mode == "finish":
            self._jobs.append((version, seconds))
            self._next_job()
        else:
            self._update(version, seconds)

    def drop(self, prompts: Iterable[Prompt]) -> None:
        """Drop all incomplete responses to these prompts."""
        given_up = {response for prompt in prompts for response in prompt.responses}
        self._waiting = deque(response for response in self._waiting if response not in given_up)
        for server in self.servers:
            server.advance(self.time)
            for response in [response for response in server.running if response in given_up]:
                server.leave(response)
            server.queue = deque(response for response in server.queue if response not in given_up)
        self._at_hand.difference_update(prompts)
        self._refill_all()
        self._next_job()

    def run(self, until: float = math.inf, stop: Callable[[], bool] = lambda: False) -> float:
        """Run until that time or until ``stop`` holds, and return the time."""
        while not stop():
            if not self._events or self._events[0][0] > until:
                assert until < math.inf, "the servers are idle, but the awaited responses have not come"
                self.time = max(self.time, until)
                break
            at, number, stamp = heappop(self._events)
            if stamp == self.servers[number].stamp:
                self.time = max(self.time, at)
                self._take_event(number)
        return self.time

    def _take_event(self, number: int) -> None:
        server, is_turn_over = self.servers[number], False
        for response in server.take_event():
            prompt = response.prompt
            prompt.left -= 1
            if not prompt.left:
                prompt.place, self.num_complete = self.num_complete, self.num_complete + 1
                self._at_hand.discard(prompt)
                is_turn_over = not self._at_hand
        while self._waiting and server.in_flight < self._concurrency:  # the load of the other servers has not changed
            server.queue.append(self._waiting.popleft())
        server.admit()
        self._expect(number)
        if is_turn_over:
            self._next_job()

    def _next_job(self) -> None:
        while self._jobs and not self._at_hand:
            job = self._jobs.popleft()
            if isinstance(job, list):
                self._at_hand = set(job)
                self._hand_out(job)
            else:
                self._update(*job)

    def _hand_out(self, batch: list[Prompt]) -> None:
        self._waiting.extend(response for prompt in batch for response in prompt.responses)
        self._refill_all()

    def _update(self, version: int, seconds: float) -> None:
        cut: list[Response] = []
        for server in self.servers:
            server.advance(self.time)
            if self._mode == "abort_and_resume":
                cut += [*server.running, *server.queue]
                for response in list(server.running):
                    server.leave(response)
                server.queue.clear()
            for response in server.running:
                server.settle(response)
            server.version = version
            server.pause(self.time + seconds)
        self._waiting.extendleft(reversed(cut))
        self.pushed[version] = self.time + seconds
        self._refill_all()

    def _refill_all(self) -> None:
        free = [(server.in_flight, number) for number, server in enumerate(self.servers)]
        heapify(free)
        while self._waiting and free[0][0] < self._concurrency:
            in_flight, number = free[0]
            self.servers[number].queue.append(self._waiting.popleft())
            heapreplace(free, (in_flight + 1, number))
        for number, server in enumerate(self.servers):
            server.advance(self.time)
            server.admit()
            self._expect(number)

    def _expect(self, number: int) -> None:
        server = self.servers[number]
        server.stamp += 1
        at = server.next_event()
        if at < math.inf:
            heappush(self._events, (at, number, server.stamp))
