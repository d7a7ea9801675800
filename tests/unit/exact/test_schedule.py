"""Continuous batching on paper: every row finds its own tokens in its pages, whatever runs beside it and however small
the cache is."""

import numpy as np
import pytest

from megatron_rl.exact.invariant import KEY_BLOCK
from megatron_rl.exact.layers import PagedCache
from megatron_rl.exact.schedule import Pages, Schedule, num_pages


class Paper:
    """A cache whose keys are (prompt, place) for tokens of prompts, and (sequence, place) for those of responses."""

    def __init__(
        self, prompts: list[int], lengths: list[int], responses: list[int], cache_pages: int, rows: int, ahead: int
    ):
        self.prompts, self.lengths, self.responses = prompts, lengths, responses
        self.cache = np.full((cache_pages, KEY_BLOCK), None, object)
        self.pages, self.ahead = Pages(cache_pages), ahead
        limits = np.asarray(responses) + 3  # a response ends before its limit
        self.schedule = Schedule(np.asarray(lengths), limits, prompts, self.pages, rows, ahead)
        self.computed, self.most_rows = [], 0

    def key(self, sequence: int, place: int) -> tuple[str, int, int]:
        if place < self.lengths[sequence]:
            return ("prompt", self.prompts[sequence], place)
        return ("response", sequence, place)

    def write(self, pages: list[int], sequence: int, place: int) -> None:
        page = pages[place // KEY_BLOCK]
        assert page != PagedCache.SCRATCH
        self.cache[page, place % KEY_BLOCK] = self.key(sequence, place)

    def run(self) -> None:
        for _ in range(100_000):
            begun = self.schedule.turn()
            for whole in begun:
                if whole.logits is None:
                    self.computed.append(whole.prompt)
                    for place in range(whole.length):
                        self.write(whole.pages, whole.sequences[0], place)
                    whole.logits = "computed"
                for source, target in whole.copies:
                    self.cache[target] = self.cache[source]
                self.schedule.made[whole.sequences] += 1
            self.check_counts()
            if not self.schedule.rows and not begun:
                return
            self.step()
        pytest.fail("no end")

    def check_counts(self) -> None:
        """Every sequence runs, waits or has ended; pages in use are those of rows and of prompts kept for others."""
        ended = int((self.schedule.made == self.responses).sum()) - sum(
            int(self.schedule.made[i] == self.responses[i]) for i in self.schedule.rows
        )
        assert len(self.schedule.rows) + self.schedule.num_waiting + ended == len(self.responses)
        of_rows = set(self.schedule.tables[: len(self.schedule.rows)].flatten().tolist()) - {PagedCache.SCRATCH}
        of_prompts = {page for whole in self.schedule._open.values() for page in whole.pages}
        assert self.schedule.num_pages_held == len(of_rows | of_prompts)

    def step(self) -> None:
        ended = []
        self.most_rows = max(self.most_rows, len(self.schedule.rows))
        for row, sequence in enumerate(self.schedule.rows):
            table = self.schedule.tables[row].tolist()
            for _ in range(self.ahead):
                if self.schedule.made[sequence] == self.responses[sequence]:
                    break
                last = self.lengths[sequence] + int(self.schedule.made[sequence]) - 1
                self.write(table, sequence, last)
                self.schedule.made[sequence] += 1
            if self.schedule.made[sequence] == self.responses[sequence]:
                seen = self.cache[table].reshape(-1)[: self.lengths[sequence] + self.responses[sequence] - 1]
                assert seen.tolist() == [self.key(sequence, place) for place in range(len(seen))]
                ended.append(row)
        self.schedule.end(ended)


def random_work(seed: int) -> tuple[list[int], list[int], list[int]]:
    random = np.random.default_rng(seed)
    prompts, lengths, responses = [], [], []
    for prompt in range(6):
        length = int(random.integers(1, 80))
        for _ in range(int(random.integers(1, 6))):
            prompts.append(prompt)
            lengths.append(length)
            responses.append(int(random.integers(1, 70)))
    return prompts, lengths, responses


@pytest.mark.parametrize("room", ["just enough", "little", "plenty"])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_finds_its_own_tokens(seed, room):
    prompts, lengths, responses = random_work(seed)
    longest = num_pages(max(a + b + 3 for a, b in zip(lengths, responses, strict=True)))
    cache_pages = longest + 2 + {"just enough": 0, "little": 5, "plenty": 400}[room]
    paper = Paper(prompts, lengths, responses, cache_pages, rows=1 + seed, ahead=1 + seed % 4)
    paper.run()
    assert paper.schedule.made.tolist() == responses
    assert paper.pages.num_free == cache_pages - 1, "every page came back"
    if room == "plenty":
        assert paper.schedule.num_preempted == 0
        assert sorted(paper.computed) == sorted(set(prompts)), "each prompt is computed once"
        assert paper.most_rows == min(1 + seed, len(prompts))


def test_a_small_cache_preempts():
    prompts, lengths, responses = list(range(4)), [8] * 4, [90] * 4
    paper = Paper(prompts, lengths, responses, num_pages(101) + 5, rows=4, ahead=2)
    paper.run()
    assert paper.schedule.num_preempted > 0
    assert paper.schedule.made.tolist() == responses


def test_a_row_that_ends_is_taken_at_once():
    """Four rows, one long response: others pass through the other three while it runs."""
    responses = [40] + [4] * 27
    paper = Paper(list(range(28)), [8] * 28, responses, 400, rows=4, ahead=1)
    turns = 0
    turn = paper.schedule.turn

    def counted():
        nonlocal turns
        turns += 1
        return turn()

    paper.schedule.turn = counted
    paper.run()
    # A first token comes with the prompt: 39 further steps of the long one, and the turn that finds nobody.
    assert turns == 39 + 1
