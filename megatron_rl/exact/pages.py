"""Pages of the key/value cache: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

import numpy as np

from megatron_rl.learner.layers.exact_attention import PagedCache


class Pages:
    """``num_pages`` of them, without the one for rows of padding; a page is free when nobody holds it."""

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
