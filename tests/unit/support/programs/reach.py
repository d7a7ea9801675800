"""Runs tests, and writes which lines of some files each of them ran."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import reach


class Notes:
    """A plugin of pytest: the lines of ``files`` by the test that ran them."""

    def __init__(self, files: list[str]):
        self._files = files
        self.lines: dict[str, reach.Seen] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with reach.watching(*self._files) as seen:
            result = yield
        self.lines[item.nodeid] = seen
        return result


def run(files: list[str], tests: list[str], folder: str) -> int:
    """Nonzero where ``tests`` cannot be run; whether they pass is theirs to say."""
    notes = Notes(files)
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[notes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(status)
    Path(folder, "lines.json").write_text(json.dumps({test: sorted(lines) for test, lines in notes.lines.items()}))
    return 0
