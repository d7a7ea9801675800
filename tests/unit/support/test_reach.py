"""Every line that is for CUDA runs in the tests that its file names, with the device replaced. They run once more for
that, and their lines are noted."""

import json

import pytest

from tests.support import reach
from tests.support.reach import REACHED
from tests.support.zygote import zygote


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> dict[str, reach.Seen]:
    """What each test ran."""
    folder = tmp_path_factory.mktemp("reach")
    tests = sorted({test for file in REACHED for test in reach.tests_of(file)})
    arguments = {"files": list(REACHED), "tests": tests, "folder": str(folder)}
    child = zygote().start("tests.unit.support.programs.reach", "run", arguments, log=folder / "log")
    assert child.wait() == 0, child.output
    printed = json.loads((folder / "lines.json").read_text())
    return {test: {(file, line) for file, line in ran} for test, ran in printed.items()}


@pytest.mark.slow
@pytest.mark.parametrize("file", REACHED)
def test_its_tests_run_every_line_for_cuda(lines, file):
    assert reach.cuda_lines(file), "names cuda for readers alone"
    ran = set().union(
        *(lines_of_test for test, lines_of_test in lines.items() if test.startswith(reach.tests_of(file)))
    )
    assert reach.missing(file, ran) == []
