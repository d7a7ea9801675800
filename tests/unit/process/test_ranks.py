"""Collectives in a job of one process, which has no process group. Between ranks: tests/parallel."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.errors import Fault, InputError
from megatron_rl.process import ranks


class EngineFault(Fault):
    pass


def failing(error: Exception):
    def action() -> None:
        raise error

    return action


def test_one_process_is_all_ranks():
    item = object()
    assert (ranks.world_rank(), ranks.world_size()) == (0, 1)
    assert ranks.gather_objects(item) == ranks.gather_to_main(item) == [item]
    assert ranks.broadcast_object(item) is item
    assert ranks.on_main_rank(lambda: item) is item
    assert [ranks.any_rank(flag) for flag in (True, False)] == [True, False]


def test_rows_are_those_of_this_rank():
    rows = ranks.gather_rows([[1.0, 2.0], [3.0, 2.0**53]], [0, 0], width=2)
    assert rows.tolist() == [[1.0, 2.0], [3.0, 2.0**53]]
    assert ranks.gather_rows([], [], width=3).shape == (0, 3)
    with pytest.raises(AssertionError, match="a row for each item of this rank"):
        ranks.gather_rows([[1.0]], [0, 0], width=1)


def test_what_a_rank_has_is_not_sent_to_it():
    held = {3: np.arange(4, dtype=np.int32)}
    assert ranks.send(held, {3: (4,)}, np.dtype(np.int32), [(3, 0, 0)]) == {}
    assert ranks.hand_on(held, {3: (4,)}, np.dtype(np.int32), [3], None, 0)[3] is held[3]


def test_an_action_that_succeeds_gives_its_result():
    assert ranks.together("the engine", lambda: 7) == 7


def test_bad_input_stays_bad_input_and_anything_else_is_a_fault_that_says_what():
    with pytest.raises(InputError, match=r"^no such file$"):
        ranks.together("the engine", failing(InputError("no such file")))
    with pytest.raises(EngineFault, match=r"^the engine: ZeroDivisionError: by 0$") as raised:
        ranks.together("the engine", failing(ZeroDivisionError("by 0")), fault=EngineFault)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(Fault, match=r"^the engine: told by hand$"):
        ranks.together("the engine", failing(OSError()), describe=lambda error: "told by hand")
    with pytest.raises(InputError, match=r"^no such key$"):
        ranks.on_main_rank(failing(InputError("no such key")))
