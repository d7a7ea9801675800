"""A mutation finds its line in trees of other commits, where files had other names."""

import pytest

from tools.dev.mutate import Mutation, place

LINE = "    return a < b"


@pytest.mark.parametrize(
    ("files", "place_now"),
    [
        ({"room/sort.py": LINE, "other/sort.py": LINE}, "room/sort.py"),  # the file that it names
        ({"room/sort.py": "", "old/sort.py": LINE, "room/merge.py": LINE}, "old/sort.py"),  # moved
        ({"room/order.py": LINE, "room/unlike.py": LINE + " + 1"}, "room/order.py"),  # renamed or merged
        ({"room/order.py": LINE, "room/merge.py": LINE}, None),  # which of them?
        ({"room/sort.py": LINE + " + 1"}, None),
    ],
)
def test_a_line_is_found_where_it_moved(tmp_path, files, place_now):
    for name, text in files.items():
        (tmp_path / "megatron_rl" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "megatron_rl" / name).write_text(f"def f(a, b):\n{text}\n")
    mutation = Mutation("megatron_rl/room/sort.py", LINE, 0, "    return (a <= b)")
    assert place(tmp_path, mutation) == (tmp_path / "megatron_rl" / place_now if place_now else None)


def test_the_second_of_two_equal_lines_is_changed():
    mutation = Mutation("megatron_rl/room/sort.py", LINE, 1, "    return (a <= b)")
    assert mutation.applied(f"{LINE}\n{LINE}\n{LINE}") == f"{LINE}\n    return (a <= b)\n{LINE}"
    assert mutation.applied(LINE) is None
