"""What is run under each release of Megatron-Core, and how outcomes are counted."""

import pytest

from tests.support.tiny import REPOSITORY
from tools.dev import release_tests

SERIES = {series.pins["Version"]: series for series in release_tests.known_releases(True)}

REPORT = """<testsuites><testsuite>
<testcase classname="tests.parallel.test_a" name="one"/>
<testcase classname="tests.parallel.test_a.TestMore" name="two"><skipped/></testcase>
<testcase classname="tests.parallel.test_a.TestMore" name="three"><failure/></testcase>
<testcase classname="tests.parallel.test_b" name="four"><error/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("version", SERIES)
def test_each_series_of_a_release_has_tests_that_exist(version):
    for purpose in SERIES[version].purposes:
        files = release_tests.tests_of(SERIES[version], purpose)
        assert files
        assert all((REPOSITORY / file).is_file() for file in files)
    assert release_tests.OF_THE_ENVIRONMENT.split("::")[0] in release_tests.tests_of(SERIES[version], "schedule")
    learners = release_tests.BESIDE_TRAILERS["precision"][0]
    assert (learners in release_tests.tests_of(SERIES[version], "precision")) == (version != "0.15.3")


def test_outcomes_are_counted_by_file(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    outcomes = release_tests.outcomes_of(tmp_path / "report.xml")
    assert list(outcomes.values()) == ["passed", "skipped", "failed", "failed"]
    assert release_tests.cell(outcomes, {"tests/parallel/test_a.py"}) == "1 of 2"
    assert release_tests.cell(outcomes, {"tests/parallel/test_a.py", "tests/parallel/test_b.py"}) == "1 of 3"
    assert release_tests.cell({"tests.test_c::one": "passed"}, {"tests/test_c.py"}) == "1"
