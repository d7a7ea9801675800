"""Patches as pull requests."""

import re
from pathlib import Path

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.series import Patch, Series

PATCHES = Path(__file__).parents[2] / "patches"
# Headers: what a pull request would say
HEADED = sorted(PATCHES.glob("megatron/*/*.patch"))
SINCE = dict(
    note.split(" since ") for name in releases.names(PATCHES) for note in Series.read(PATCHES / name).superseded
)  # patch → the release that has it


@pytest.mark.parametrize("path", HEADED, ids=lambda path: path.name)
def test_a_header_says_what_a_pull_request_would(path):
    """Title, problem, where it was or would be sent, and the smallest test; or why it is not for upstream."""
    head = path.read_text().partition("\n---\n")[0]
    title, _, text = head.partition("Subject: [PATCH] ")[2].partition("\n\n")
    *problem, last = text.strip().split("\n\n")
    trailers = dict(line.split(": ", 1) for line in last.splitlines())
    assert not re.search(r"megatron_rl|\b[Ww]e\b|\b[Oo]ur\b", head.partition("Subject: ")[2])
    backport = trailers["Origin"].startswith("backport")
    assert (trailers["Forwarded"] == "not-needed") == backport == (Patch.read(path).path in SINCE)
    assert 10 < len(title.replace("\n", "")) <= 90
    assert sum(len(paragraph.split()) for paragraph in problem) >= 15
    if backport:
        release = SINCE[Patch.read(path).path]
        assert trailers["Drop-When"] == f"the pinned megatron-core is {release} or later"
        assert trailers["Origin"].endswith(f"megatron-core {release}")
        return
    upstream = r"https://github\.com/NVIDIA/Megatron-LM"
    where = rf"({upstream}/pull/\d+|no; for the main branch of {upstream}, .+)"
    assert re.fullmatch(where, trailers["Forwarded"])
    assert re.fullmatch(r"tests/unit_tests/[\w/]+\.py: .{10,}", trailers["Upstream-Test"])
