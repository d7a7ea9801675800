"""The record in a patched tree says which patches it has and leads back to upstream's files."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.patching import record, series
from megatron_rl.patching.record import Record
from megatron_rl.patching.series import PatchError

TEXTS = st.none() | st.lists(st.sampled_from([b"a\n", b"b\n", b"\n", b"diff --git a/x b/x\n", b"index 1..2\n"])).map(
    b"".join
)


@settings(max_examples=25, deadline=None)
@given(TEXTS, TEXTS, TEXTS)
def test_what_is_written_is_read(small_text, old, new):
    before = {"top/a.py": old, "top/b.py": small_text}
    after = {"top/a.py": new, "top/b.py": small_text}
    made = Record.read(
        b"What `megatron-rl patch` changed\nPatch: a.patch 12ab\nUpstream: 34\n\n" + series.diff(before, after),
        Path("x"),
    )
    assert (made.digests, made.upstream) == ({"a.patch": "12ab"}, "34")
    assert set(made.blobs) == {path for path in before if before[path] != after[path]}
    for path in made.blobs:
        assert record.matches(made, path, after[path]) == "after"
        assert record.matches(made, path, before[path]) == "before"
        assert record.matches(made, path, b"edited") is None
    assert made.reverted(after, list(made.blobs)) == before


def test_another_file_of_that_name_is_refused(tmp_path):
    with pytest.raises(PatchError, match=r"patches\.diff: is no record of patches; nothing was changed"):
        Record.read(b"mine", tmp_path / "patches.diff")
