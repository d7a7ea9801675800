"""Every file with lines for CUDA has tests that run them, or is named in docs/limits.md."""

import re

from tests.support import reach


def test_no_file_is_left_out():
    files = {str(path.relative_to(reach.REPOSITORY)) for path in (reach.REPOSITORY / "megatron_rl").rglob("*.py")}
    with_lines = {file for file in files if reach.cuda_lines(file)}
    limits = (reach.REPOSITORY / "docs" / "limits.md").read_text()
    (text,) = re.findall(r"No test reaches what is for CUDA in ([^;]+);", limits) or [""]
    named = set(re.findall(r"`([^`]+)`", text))
    assert with_lines == reach.REACHED.keys() | named
    assert not reach.REACHED.keys() & named
    tests = [test for file in reach.REACHED for test in reach.tests_of(file)]
    assert all((reach.REPOSITORY / test.partition("::")[0]).is_file() for test in tests)
