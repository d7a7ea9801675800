"""Only the files that a patch names are changed, all or none, whoever owns, links or writes files beside them."""

import os
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.patching import replace, states
from megatron_rl.patching.releases import Target
from megatron_rl.patching.series import PatchError, Series, diff
from tests.support import kill

UPSTREAM: dict[str, bytes | None] = {
    f"top/{name}.py": "".join(f"{name}{number} = {number}\n" for number in range(60)).encode() for name in "abc"
}
UPSTREAM["top/new.py"] = None
CHANGES = {  # lines of each file, by patch
    "first": {"top/a.py": (5, 40), "top/b.py": (20,)},
    "second": {"top/b.py": (45,), "top/c.py": (10, 30)},
}
HEAD = """From 0
Subject: [PATCH] The {name} one

Because.

Origin: ours
Forwarded: not-needed
Drop-When: never
Test: tests/patches/test_replace.py
---
"""


def changed(files: dict[str, bytes | None], name: str) -> dict[str, bytes | None]:
    files = dict(files)
    for path, numbers in CHANGES[name].items():
        lines = files[path].splitlines(keepends=True)
        for number in numbers:
            lines[number] = b"%s_%d = 1\nmore_%d = 2\n" % (name.encode(), number, number)
        files[path] = b"".join(lines)
    return files | ({"top/new.py": b"new = 1\n"} if name == "second" else {})


def make(folder: Path) -> tuple[Series, Target]:
    """A series of two patches in two series, and a tree for it."""
    own = folder / "patches" / "small"
    own.mkdir(parents=True)
    pins = {"Project": "small", "Version": "1.0", "Source": "nowhere", "Package": "small==1.0", "Root": "top"}
    (own / "UPSTREAM").write_text("".join(f"{key}: {value}\n" for key, value in (pins | {"Tree-Before": "-"}).items()))
    (own / "series").write_text("routing/first.patch\nfixes/second.patch\n")
    state = dict(UPSTREAM)
    for purpose, name in (("routing", "first"), ("fixes", "second")):
        after = changed(state, name)
        path = folder / "patches" / "megatron" / purpose / f"{name}.patch"
        path.parent.mkdir(parents=True)
        path.write_bytes(HEAD.format(name=name).encode() + diff(state, after))
        state = after
    root = folder / "tree"
    write(root, UPSTREAM | {"top/mine.py": b"mine = 1\n"})
    return Series.read(own), Target(root, None)


def write(root: Path, files: dict[str, bytes | None]) -> None:
    for path, content in files.items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)


def content_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def small(tmp_path) -> tuple[Series, Target]:
    return make(tmp_path)


def test_owner_mode_and_folders_stay(small):
    series, where = small
    a, top = where.root / "top" / "a.py", where.root / "top"
    if os.geteuid() == 0:  # as in a container, over a user's checkout
        for path in (where.root, *where.root.rglob("*")):
            os.chown(path, 1234, 2345)
    a.chmod(0o640)
    before = {path: (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode) for path in where.root.rglob("*")}
    folder = top.stat().st_ino
    owner = top.stat().st_uid, top.stat().st_gid
    states.apply_or_revert(series, where, False)
    for path in where.root.rglob("*"):
        mode = path.stat().st_mode
        assert (path.stat().st_uid, path.stat().st_gid, mode) == before.get(path, (*owner, 0o100644)), path
    states.apply_or_revert(series, where, True)
    now = {path: (path.stat().st_uid, path.stat().st_gid, path.stat().st_mode) for path in where.root.rglob("*")}
    assert (now, top.stat().st_ino) == (before, folder)


def test_links_within_the_tree_stay_and_lead_to_what_is_changed(small):
    series, where = small
    (where.root / "top" / "a.py").rename(where.root / "real.py")
    (where.root / "top" / "a.py").symlink_to("../real.py")
    before = content_of(where.root)
    states.apply_or_revert(series, where, False)
    assert os.readlink(where.root / "top" / "a.py") == "../real.py"
    assert (where.root / "real.py").read_bytes() == changed(UPSTREAM, "first")["top/a.py"]
    states.apply_or_revert(series, where, True)
    assert os.readlink(where.root / "top" / "a.py") == "../real.py"
    assert content_of(where.root) == before


@pytest.mark.parametrize("link", ["a file", "a folder", "one file twice"])
def test_links_that_others_may_share_are_refused_by_name(small, link, tmp_path):
    series, where = small
    top, outside = where.root / "top", tmp_path / "outside"
    if link == "a folder":
        top.rename(outside)
        top.symlink_to(outside)
    elif link == "a file":
        (top / "b.py").rename(outside)
        (top / "b.py").symlink_to(outside)
    else:
        (top / "a.py").unlink()
        (top / "a.py").symlink_to("b.py")
        (top / "b.py").write_bytes(b"".join(map(bytes, UPSTREAM["top/b.py"].splitlines(keepends=True))))
    before = content_of(where.root)
    if link == "one file twice":
        with pytest.raises(PatchError, match=r"top/a\.py, top/b\.py are one file, by links; nothing was changed"):
            replace.replace_files(where.root, before | {"top/a.py": b"x"}, before | {"top/a.py": b"", "top/b.py": b""})
    else:
        with pytest.raises(PatchError, match=r"top/\S+: a symbolic link leads to \S*/outside\S*, outside of the tree"):
            states.apply_or_revert(series, where, False)
    assert content_of(where.root) == before


def test_hard_links_to_other_environments_are_left_alone(small, tmp_path):
    series, where = small
    os.link(where.root / "top" / "a.py", tmp_path / "shared.py")
    states.apply_or_revert(series, where, False)
    assert (tmp_path / "shared.py").read_bytes() == UPSTREAM["top/a.py"]


@pytest.mark.parametrize("path", ["top/a.py", "top/c.py"])
def test_a_file_that_another_process_changes_meanwhile_is_not_overwritten(small, path, monkeypatch):
    """All the others are as they were."""
    series, where = small
    before = content_of(where.root)
    stage, edit = replace._stage, b"edited = 1\n"

    def stage_and_edit(place: Path, content: bytes) -> Path:
        if place.name == "c.py" and (where.root / path).read_bytes() == before[path]:  # the last that is written
            (where.root / path).write_bytes(edit)
        return stage(place, content)

    monkeypatch.setattr(replace, "_stage", stage_and_edit)
    with pytest.raises(PatchError, match=f"{path}: another process has changed it meanwhile; nothing was changed"):
        states.apply_or_revert(series, where, False)
    assert content_of(where.root) == before | {path: edit}


@pytest.mark.parametrize("failing", range(1, 6))
def test_an_error_halfway_restores_every_file(small, failing, monkeypatch):
    series, where = small
    before, rename, calls = content_of(where.root), os.replace, []

    def replace_or_fail(source, destination):
        calls.append(destination)
        if len(calls) == failing:
            raise KeyboardInterrupt
        rename(source, destination)

    monkeypatch.setattr(os, "replace", replace_or_fail)
    with pytest.raises(KeyboardInterrupt):
        states.apply_or_revert(series, where, False)
    monkeypatch.setattr(os, "replace", rename)
    assert content_of(where.root) == before


EDITS = st.tuples(
    st.sampled_from(sorted(path for path in UPSTREAM if path != "top/new.py")),
    st.integers(0, 62),
    st.sampled_from(["insert", "replace", "delete"]),
)


def edited(content: bytes, number: int, kind: str) -> bytes:
    lines = content.splitlines(keepends=True)
    number = min(number, len(lines) - 1)
    lines[number : number + (kind != "insert")] = [] if kind == "delete" else [b"edited = 1\n"]
    return b"".join(lines)


@settings(max_examples=60, deadline=None)
@given(st.lists(EDITS, min_size=1, max_size=2, unique_by=lambda edit: edit[0]), st.sampled_from([None, ["fixes"]]))
def test_an_edit_of_a_patched_tree_is_kept_or_refused(edits, purposes):
    """`revert` gives upstream's files with the edits, or names the edited file and changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        series, where = make(Path(folder))
        states.apply_or_revert(series, where, False)
        patched = content_of(where.root)
        write(where.root, {path: edited(patched[path], number, kind) for path, number, kind in edits})
        before = content_of(where.root)
        assume(before != patched)
        inside = [edit for edit in edits if is_inside(patched, before, edit[0])]
        try:
            told = states.apply_or_revert(series, where, True, purposes)
        except PatchError as error:
            told, is_refused = str(error), True
        else:
            is_refused = False
        if is_refused:
            assert any(path in told for path, _, _ in edits), told
            assert content_of(where.root) == before
            return
        assert not inside, f"{told}: {inside}"
        wanted = changed(UPSTREAM, "first") if purposes else UPSTREAM
        after = content_of(where.root)
        for path in ("top/a.py", "top/b.py", "top/c.py"):
            of_user = diff({path: patched[path]}, {path: before[path]})
            of_tree = diff({path: wanted[path]}, {path: after[path]})
            assert changed_lines(of_user) == changed_lines(of_tree), path
        states.apply_or_revert(series, where, False)
        assert {path: text for path, text in content_of(where.root).items() if "patches.diff" not in path} == {
            path: text for path, text in before.items() if "patches.diff" not in path
        }


def is_inside(patched: dict[str, bytes], before: dict[str, bytes], path: str) -> bool:
    """Whether a line that a patch added is gone."""
    added = {line for line in patched[path].splitlines() if b"_" in line}
    return not added <= set(before[path].splitlines())


def changed_lines(change: bytes) -> list[bytes]:
    lines = change.splitlines()
    return [line for line in lines if line[:1] in (b"+", b"-") and line[:3] not in (b"+++", b"---")]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from([None, ["routing"], ["fixes"]])), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_commands_that_are_killed_lose_nothing(commands, seed):
    """After any number of them, one that comes to its end leaves the tree as if they had been whole or not at all."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        series, where = make(Path(folder))
        original = content_of(where.root)
        for number, (revert, purposes) in enumerate(commands):
            moment = random.Random(seed + number).randrange(1, 120)
            kill.is_killed(partial(states.apply_or_revert, series, where, revert, purposes), moment)
            names = {path for path in content_of(where.root) if ".patches-" not in path and "patches.diff" not in path}
            assert names - {"top/new.py"} == set(original)
        states.apply_or_revert(series, where, False)
        complete = changed(changed(UPSTREAM, "first"), "second") | {"top/mine.py": b"mine = 1\n"}
        assert {k: v for k, v in content_of(where.root).items() if k != "top/patches.diff"} == complete
        states.apply_or_revert(series, where, True)
        assert content_of(where.root) == original
