"""git applies a patch exactly, whatever the user's settings are and wherever the files stand."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.patching import releases, states
from megatron_rl.patching import series as git
from megatron_rl.patching.series import GitMissing, PatchError
from tests.support.series import megatron_core

PATH = "top/file.py"
LINES = [b"line %d\n" % number for number in range(40)]


def edited(*numbers: int) -> bytes:
    return b"".join(b"edited\n" if number in numbers else line for number, line in enumerate(LINES))


def diff(old: bytes | None, new: bytes | None) -> bytes:
    """A git diff of one file (None: no file)."""
    return b"\n" + git.diff({PATH: old}, {PATH: new})


def apply(content: bytes | None, change: bytes, reverse: bool = False) -> bytes | None:
    return git.apply(change, {PATH: content}, [PATH], "my.patch", reverse)[PATH]


# Few different lines, so that repetitions are common; \r, spaces at line ends and a missing last newline occur.
texts = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"-- x\n", b"++ y\n", b"\\ z \n"]), max_size=30
).flatmap(lambda lines: st.sampled_from([b"".join(lines), b"".join(lines) + b"end"]))


@settings(max_examples=25, deadline=None)
@given(texts, texts)
def test_a_diff_leads_there_and_back(old, new):
    if old == new:
        return
    change = diff(old, new)
    assert apply(old, change) == new
    assert apply(new, change, reverse=True) == old


@pytest.mark.parametrize("content", [b"one\n", b"one\r\ntwo", edited()])
def test_files_are_created_and_deleted(content):
    created, deleted = diff(None, content), diff(content, None)
    assert apply(None, created) == content
    assert apply(content, deleted) is None
    assert apply(content, created, reverse=True) is None
    with pytest.raises(PatchError, match=r"^my\.patch: top/file\.py: already exists"):
        apply(content, created)
    with pytest.raises(PatchError, match=r"^my\.patch: top/file\.py: No such file"):
        apply(None, deleted)
    with pytest.raises(PatchError, match=r"^my\.patch: (patch failed: top/file\.py:1|removal patch leaves)"):
        apply(content + b"\nmore", deleted)


def test_only_the_files_that_are_named_are_changed():
    both = {PATH: edited(), "top/other.py": edited()}
    change = b"\n" + git.diff(both, {PATH: edited(3), "top/other.py": edited(4)})
    assert git.apply(change, both, [PATH], "p") == {PATH: edited(3), "top/other.py": edited()}


@pytest.mark.parametrize("setting", ["core.autocrlf", "apply.whitespace", "apply.ignoreWhitespace"])
def test_settings_of_the_user_change_nothing(setting, tmp_path, monkeypatch):
    value = {"core.autocrlf": "true", "apply.whitespace": "fix", "apply.ignoreWhitespace": "change"}[setting]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    subprocess.run(["git", "config", "--global", setting, value], check=True)
    new = edited().replace(b"line 9\n", b"edited  \n")
    change = diff(edited(), new)
    assert apply(edited(), change) == new
    with pytest.raises(PatchError, match="patch failed"):
        apply(edited().replace(b"line 8\n", b"line  8\n"), change)


def test_a_repository_around_the_files_changes_nothing(tmp_path, monkeypatch):
    """Inside a repository, git would skip files of a patch that are not below its folder, and say nothing."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook
    assert apply(edited(), diff(edited(), edited(3))) == edited(3)


def test_without_git_the_error_says_what_to_install(monkeypatch):
    change = diff(edited(), edited(3))
    monkeypatch.setenv("PATH", str(Path(__file__).parent))
    with pytest.raises(GitMissing, match=r"applied by git, which is not installed \(apt-get install git\)"):
        apply(edited(), change)


def test_what_is_applied_is_known_without_git(tmp_path, monkeypatch):
    """By the record's hashes, so a run on a node without git notes it, too."""
    series = megatron_core()
    where = releases.find_target(series, None, allow_global=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states.report(series, where)["state"] == states.APPLIED
    with pytest.raises(GitMissing, match=r"^patches are read .* git, which is not installed \S+ install git\)$"):
        states.apply_or_revert(series, where, revert=True)
