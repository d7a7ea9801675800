"""Which server a request goes to: the one that has computed its prompt, unless others are far less busy.

A server's queue is what is under way there, from all ranks: this rank knows its own requests, and every answer says how
many the server had. The samples of one prompt go to one server, whose prefix cache then holds the prompt, as long as
its queue is at most ``slack`` longer than the shortest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_rl.rollout.servers.members import Member


class Balance:
    """Of one call. ``prompts``: what each request begins with; equal ones share their keys and values."""

    def __init__(self, prompts: Sequence[Hashable], slack: int) -> None:
        self._prompts, self._slack = prompts, slack
        self._home: dict[Hashable, int] = {}  # the server that a prompt went to last
        self.num_at_home = 0  # requests that found their prompt's server

    def choose(self, free: Sequence[Member], index: int) -> Member:
        """The one of ``free`` that request ``index`` goes to."""
        prompt, shortest = self._prompts[index], min(free, key=lambda member: member.queue)
        home = next((member for member in free if member.number == self._home.get(prompt)), None)
        if home is not None and home.queue <= shortest.queue + self._slack:
            self.num_at_home += 1
            return home
        self._home[prompt] = shortest.number
        return shortest
