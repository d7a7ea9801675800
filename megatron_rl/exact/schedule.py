"""Who runs when: continuous batching over a paged cache, for one replica, without a model.

A turn is what runs between two looks at what was sampled: whole prompts of sequences that begin, and then some steps of
every running sequence. A sequence that ends gives its row and its pages to the next one. Samples of one prompt that
follow each other share the pages that the prompt fills; only the first of them computes it.

Where pages run out, the sequence that began last gives up its own and waits; it goes on with a pass over all of its
tokens, prompt and response. In exact mode that changes no bit.

Shapes: m sequences, R rows.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.exact.invariant import KEY_BLOCK
from megatron_rl.exact.layers import PagedCache

# Pages of the key/value cache: which are free, and how many sequences hold each of the others.


class Pages:
    """Pages of the cache: ``num_pages``, and one more for rows of padding. A page is free when nobody holds it."""

    def __init__(self, num_pages: int):
        self._free = [page for page in reversed(range(num_pages)) if page != PagedCache.SCRATCH]
        self._holders = np.zeros(num_pages, np.int64)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._holders) - 1 - len(self._free)

    def take(self, number: int) -> list[int]:
        """Free pages, each held once from now on. Ask only for what is free."""
        taken = [self._free.pop() for _ in range(number)]
        self._holders[taken] = 1
        return taken

    def hold(self, pages: list[int]) -> None:
        """Held by one more."""
        self._holders[pages] += 1

    def drop(self, pages: list[int]) -> None:
        """Held by one less; free where that was the last."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, page
            if not self._holders[page]:
                self._free.append(page)


@dataclass(eq=False)
class Whole:
    """A pass over all tokens so far of some sequences that have them in common."""

    prompt: int  # which of the prompts, or -1: one sequence alone goes on
    length: int  # tokens
    pages: list[int]
    logits: Any = None  # after the last token; there where an earlier turn has computed them
    sequences: list[int] = field(default_factory=list)  # that begin a row in this turn
    copies: list[tuple[int, int]] = field(default_factory=list)  # page to page, once it is computed


class Schedule:
    """Which sequences run in which turn, and their pages.

    ``lengths`` and ``limits`` [m]: tokens of each prompt, and most tokens of each response. ``prompts`` [m]: number
    of each sequence's prompt, equal where prompts are. ``ahead``: steps of a turn."""

    def __init__(
        self, lengths: np.ndarray, limits: np.ndarray, prompts: list[int], pages: Pages, max_rows: int, ahead: int
    ):
        self._prompt_lengths, self.limits, self._prompts = lengths, limits, prompts
        self._pages, self._ahead, self._max_rows = pages, ahead, max_rows
        self.made = np.zeros(len(lengths), np.int64)  # tokens of each response
        self._waiting = deque(range(len(lengths)))
        self._left = Counter(prompts)  # sequences of each prompt that have not begun
        self.rows: list[int] = []  # sequence of each row
        self._begun: list[int] = []  # of each row: how many rows began before it
        self._num_begun = 0
        self._num_held = np.zeros(max_rows, np.int64)  # pages of each row
        longest = int((lengths + limits).max(initial=1))
        self.tables = np.full((max_rows, num_pages(longest)), PagedCache.SCRATCH)  # [R, P], pages of each row
        self._open: dict[int, Whole] = {}  # prompts that more sequences will begin with
        self.num_preempted = 0

    def turn(self) -> list[Whole]:
        """Make room for the next turn's tokens, and let sequences begin where there is more: what they begin with.

        What has no logits yet is to be computed; `Whole.logits` is kept for those that begin later."""
        for whole in self._open.values():
            whole.sequences, whole.copies = [], []
        return [] if self._grow() else self._begin()

    @property
    def steps(self) -> int:
        """Number of steps that the next turn needs: 0 if no sequence runs."""
        return min(self._ahead, int((self.limits[self.rows] - self.made[self.rows]).max(initial=0)))

    @property
    def num_waiting(self) -> int:
        """Sequences without a row that have not ended."""
        return len(self._waiting)

    @property
    def num_pages_held(self) -> int:
        return self._pages.num_held

    @property
    def num_tokens(self) -> np.ndarray:
        """[rows] so far, prompt and response."""
        return self._prompt_lengths[self.rows] + self.made[self.rows]

    @property
    def width(self) -> int:
        """Pages of the longest row."""
        return int(self._num_held[: len(self.rows)].max(initial=1))

    def end(self, rows: list[int]) -> None:
        """The sequences of ``rows`` have their last token."""
        for row in sorted(rows, reverse=True):
            self._leave(row)

    # -- within

    def _needed(self, sequences: list[int] | int) -> np.ndarray:
        """Pages for the tokens whose keys are written until the end of the next turn."""
        length, limit = self._prompt_lengths[sequences], self.limits[sequences]
        return num_pages(length + np.minimum(self.made[sequences] + self._ahead, limit))

    def _grow(self) -> bool:
        """Pages for every row, the longest there first; true where a row had to leave for others."""
        missing = self._needed(self.rows) - self._num_held[: len(self.rows)]
        left = False
        for sequence in [self.rows[row] for row in sorted(np.flatnonzero(missing > 0), key=self._begun.__getitem__)]:
            while sequence in self.rows:
                row = self.rows.index(sequence)
                lacking = int(self._needed(sequence) - self._num_held[row])
                if lacking <= self._pages.num_free:
                    self._add(row, self._pages.take(lacking))
                    break
                if not self._close_one():
                    self._preempt()
                    left = True
        return left

    def _preempt(self) -> None:
        row = max(range(len(self.rows)), key=self._begun.__getitem__)
        self._waiting.appendleft(self.rows[row])
        self._leave(row)
        self.num_preempted += 1

    def _close_one(self) -> bool:
        """Forget a prompt that others would have shared; they compute it again."""
        if not self._open:
            return False
        self._pages.drop(self._open.popitem()[1].pages)
        return True

    def _begin(self) -> list[Whole]:
        begun: list[Whole] = []
        while self._waiting and len(self.rows) < self._max_rows:
            sequence = self._waiting[0]
            whole = self._whole(sequence)
            if whole is None and not self.rows and self._close_one():
                continue
            if whole is None:
                break
            self._waiting.popleft()
            if not any(whole is known for known in begun):
                begun.append(whole)
            self._seat(sequence, whole)
        assert self.rows or not self._waiting, "the cache cannot hold a sequence: see Decoder"
        return begun

    def _whole(self, sequence: int) -> Whole | None:
        """What ``sequence`` begins with, its pages taken; None where there is no room. A page for each running row
        stays free, which is what they need next."""
        is_new = not self.made[sequence]
        prompt, length = self._prompts[sequence], int(self._prompt_lengths[sequence] + self.made[sequence])
        shared = self._open.get(prompt) if is_new else None
        needed = int(self._needed(sequence)) + len(self.rows)
        if shared is not None:
            return shared if self._pages.num_free >= needed - length // KEY_BLOCK else None
        is_shared = is_new and self._left[prompt] > 1
        if self._pages.num_free < needed + is_shared:
            return None
        whole = Whole(prompt if is_new else -1, length, self._pages.take(num_pages(length)))
        if is_shared:
            self._open[prompt] = whole
        return whole

    def _seat(self, sequence: int, whole: Whole) -> None:
        """Give ``sequence`` a row; its pages are those of ``whole``, and its own."""
        whole.sequences.append(sequence)
        self._left[whole.prompt] -= whole.prompt >= 0
        held, full = list(whole.pages), whole.length // KEY_BLOCK
        if whole.prompt >= 0 and self._left[whole.prompt]:
            held = held[:full]
            self._pages.hold(held)
            if whole.length % KEY_BLOCK:
                (copy,) = self._pages.take(1)
                whole.copies.append((whole.pages[full], copy))
                held.append(copy)
        else:  # nobody follows, and the prompt's hold on its pages becomes the sequence's
            self._open.pop(whole.prompt, None)
        row = len(self.rows)
        self.rows.append(sequence)
        self._begun.append(self._num_begun)
        self._num_begun += 1
        self._num_held[row] = 0
        self._add(row, held)
        self._add(row, self._pages.take(int(self._needed(sequence)) - len(held)))

    def _add(self, row: int, pages: list[int]) -> None:
        held = self._num_held[row]
        self.tables[row, held : held + len(pages)] = pages
        self._num_held[row] += len(pages)

    def _leave(self, row: int) -> None:
        """The last row takes the place of one that leaves."""
        self._pages.drop(self.tables[row, : self._num_held[row]].tolist())
        for column in (self.rows, self._begun):
            column[row] = column[-1]
            column.pop()
        last = len(self.rows)
        self.tables[row], self._num_held[row] = self.tables[last], self._num_held[last]
        self.tables[last], self._num_held[last] = PagedCache.SCRATCH, 0


def num_pages(num_tokens: Any) -> Any:
    """Pages of a number of tokens, or of an array of them."""
    return -(-num_tokens // KEY_BLOCK)
