"""How full generation is: sequences and cache pages, counted once in every turn."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.process.ranks import gather_objects


@dataclass
class Counts:
    """Sums over the turns of one replica."""

    turns: int = 0
    running: int = 0  # sequences with a row
    waiting: int = 0  # sequences without one, that have not ended
    pages: int = 0  # in use
    most_pages: int = 0  # in use in one turn

    def add(self, running: int, waiting: int, pages: int) -> None:
        self.turns += 1
        self.running += running
        self.waiting += waiting
        self.pages += pages
        self.most_pages = max(self.most_pages, pages)

    def metrics(self, preempted: int, num_pages: int | None, num_replicas: int) -> dict[str, float]:
        """`perf/rollout_*` of all replicas, the same on every rank. Collective.

        ``preempted``: times that a sequence of this replica gave up its pages. ``num_pages``: that its cache has for
        sequences; None without one. Replicas take the same number of turns, and ranks of a replica count the same.
        """
        of_ranks = gather_objects((preempted, self.running, self.waiting, self.pages, self.most_pages))
        columns = list(zip(*of_ranks, strict=True))
        preempted, running, waiting, pages = (sum(column) for column in columns[:4])
        taken = max(1, self.turns) * len(of_ranks)
        found = {
            "perf/rollout_preempted": preempted * num_replicas / len(of_ranks),
            "perf/rollout_running": running / taken,
            "perf/rollout_waiting": waiting / taken,
        }
        if num_pages is None:
            return found
        return found | {
            "perf/rollout_pages": pages / taken,
            "perf/rollout_pages_max": float(max(columns[4])),
            "perf/rollout_pages_there": float(num_pages),
        }
