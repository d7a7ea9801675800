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


def test_a_line_for_cuda_that_did_not_run_is_missing(tmp_path, monkeypatch):
    source = (
        'DEVICE = "cuda"\n\n\n'
        "def f(device: str) -> int:\n"
        '    """What cuda does."""\n'
        '    if device == "cuda":\n'
        "        return 1\n"
        '    if device == "cpu":  # not cuda\n'
        "        return 2\n"
        "    else:\n"
        "        return 3\n"
    )
    (tmp_path / "some.py").write_text(source)
    monkeypatch.setattr(reach, "REPOSITORY", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import some

    assert reach.cuda_lines("some.py") == [6, 7, 11]
    with reach.watching("some.py") as seen:
        some.f("cpu")
    assert reach.missing("some.py", seen) == ["7: return 1", "11: return 3"]
    with reach.watching("some.py") as seen:
        some.f("cuda")
        some.f("xpu")
    assert reach.missing("some.py", seen) == []
