"""Unified diffs: strict application, exact reversal."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.patching import unified
from megatron_rl.patching.errors import PatchError

# Few different lines, so that repetitions (and with them ambiguity) are common; \r and a missing last newline occur.
texts = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"-- x\n", b"++ y\n", b"\\ z\n"]), max_size=30
).flatmap(lambda lines: st.sampled_from([b"".join(lines), b"".join(lines) + b"end"]))


def diff(old: bytes | None, new: bytes | None) -> bytes:
    """A git diff of one file (None: no file)."""
    sides = [[] if text is None else text.replace(b"\n", b"\n\0").split(b"\0") for text in (old, new)]
    names = [
        b"/dev/null" if text is None else name for text, name in ((old, b"a/top/file.py"), (new, b"b/top/file.py"))
    ]
    lines = difflib.diff_bytes(difflib.unified_diff, *[[line for line in side if line] for side in sides], *names)
    ended = [line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines]
    return b"diff --git a/top/file.py b/top/file.py\n" + b"".join(ended)


def change(old: bytes | None, new: bytes | None) -> unified.FileChange:
    (result,) = unified.parse(diff(old, new), "test.patch")
    return result


@given(texts, texts)
def test_a_diff_leads_there_and_back(old, new):
    if old == new:
        return
    step = change(old, new)
    assert unified.apply(old, step, "p") == new
    assert unified.apply(new, step.reversed(), "p") == old


@given(texts)
def test_files_are_created_and_deleted(content):
    if not content:
        return
    created, deleted = change(None, content), change(content, None)
    assert unified.apply(None, created, "p") == content
    assert unified.apply(content, deleted, "p") is None
    assert unified.apply(content, created.reversed(), "p") is None
    with pytest.raises(PatchError, match=r"p: top/file.py must not exist"):
        unified.apply(content, created, "p")
    with pytest.raises(PatchError, match=r"p: top/file.py does not exist"):
        unified.apply(None, deleted, "p")
    with pytest.raises(PatchError, match=r"p: top/file.py: hunk 1 of 1|holds more"):
        unified.apply(content + b"\nmore", deleted, "p")


LINES = [b"line %d\n" % number for number in range(40)]


def edited(*numbers: int) -> bytes:
    return b"".join(b"edited\n" if number in numbers else line for number, line in enumerate(LINES))


def test_moved_text_is_found_if_there_is_one_place():
    step = change(b"".join(LINES), edited(10, 30))
    moved = b"new\n" * 7 + b"".join(LINES)
    assert unified.apply(moved, step, "p") == b"new\n" * 7 + edited(10, 30)


def test_text_that_could_be_in_two_places_is_an_error():
    step = change(b"".join(LINES), edited(10))
    with pytest.raises(PatchError, match="hunk 1 of 1"):
        unified.apply(b"new\n" + b"".join(LINES) * 2, step, "p")


@pytest.mark.parametrize("number", [27, 30, 33])
def test_changed_context_is_an_error_that_names_the_hunk(number):
    step = change(b"".join(LINES), edited(10, 30))
    damaged = b"".join(LINES).replace(b"line %d\n" % number, b"other\n")
    with pytest.raises(PatchError, match=r"^my.patch: top/file.py: hunk 2 of 2 \(line 28\) does not match$"):
        unified.apply(damaged, step, "my.patch")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text.replace(b"@@ -8,7 +8,7 @@", b"@@ -8,7 +8,9 @@"), "ends early"),
        (lambda text: text.replace(b"@@ -8,7 +8,7 @@", b"@@ nonsense @@"), "not a hunk header"),
        (lambda text: text.replace(b" line 9\n", b"*line 9\n"), "not part of a diff"),
        (lambda text: text.replace(b"top/file.py", b"../../etc/passwd"), "may not leave its tree"),
        (lambda text: text.replace(b"--- a/", b"old mode 100644\nnew mode 100755\n--- a/"), "only changes of text"),
        (lambda text: text + text, "changed twice"),
    ],
)
def test_damaged_diffs_are_refused(spoil, message):
    with pytest.raises(PatchError, match=message):
        unified.parse(spoil(diff(b"".join(LINES), edited(10))), "test.patch")
