"""Figures in docs/ that are cheap to make are made again: the text must say what the command prints."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest

from megatron_rl.config.learner import DetectorConfig
from megatron_rl.instruments.why.command import score_packed
from tests.support.tiny import REPOSITORY
from tools.dev.family_mismatch import table as table_of_families
from tools.dev.parity_faults import FAULTS
from tools.dev.rope_study import study as study_of_rope
from tools.dev.softmax_study import study, table
from tools.dev.tune_surge_detector import CASES, surge_step
from tools.dev.unstable_runs import judged
from tools.dev.unstable_runs import summary as summary_of_causes

DOCS = REPOSITORY / "docs"


def test_softmax_table_of_precision_md():
    """One seed of three; the others cost four seconds each."""
    text = (DOCS / "precision.md").read_text()
    head, paper, first = table([study(0)])
    block = [line for line in text.splitlines() if line.startswith("    ")]
    shown = [line.split() for line in block]
    for line in (head, paper, first):
        assert line.split() in shown, line


def test_rotary_embeddings_of_precision_md():
    words = " ".join((DOCS / "precision.md").read_text().split())
    normed, biased = study_of_rope(32768), study_of_rope(32768, bias=100.0)
    told = re.search(
        r"\(std ([\d.]+), positions up to 32768\) are ([\d.]+) from vLLM's with it and ([\d.]+) .* "
        r"biased by 100, which Qwen2.5 may have, they are ([\d.]+) and ([\d.]+) from it",
        words,
    )
    apart = [figures[f"{which} - vllm"] for figures in (normed, biased) for which in ("fused", "unfused")]
    assert told.groups() == (f"{normed['std of logits']:.2f}", *(f"{value:.4f}" for value in apart))


def surge_rows() -> dict[str, list[list[float]]]:
    """First cell → numbers of the other two, of the table in schedule-and-alarms.md."""
    text = (DOCS / "schedule-and-alarms.md").read_text()
    table = text[text.index("| curve | 2.0 (default) | 3.0 |") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: [[float(x) for x in re.findall(r"\d\.\d+", cell)] for cell in row[1:]] for row in cells}


@pytest.mark.parametrize(
    ("row", "cases"),
    [
        ("flat; growth", ("flat", "growth 20%/100 steps", "spikes x8", "decline 30%/100 steps")),
        ("threefold surge at step 250", ("surge x3 at 250",)),
        ("the paper's surge near step 110", ("paper 110, to 3000", "paper 110, to 3500", "paper 110, to 4000")),
    ],
)
def test_surge_table_of_schedule_and_alarms_md(row, cases):
    (told,) = [numbers for name, numbers in surge_rows().items() if name.startswith(row)]
    known = {name: (curve, outcome) for name, curve, outcome in CASES}
    for ratio, figures in zip((2.0, 3.0), told, strict=True):
        shares = [right_outcomes(DetectorConfig(surge_ratio=ratio), *known[case], noise=0.10) for case in cases]
        assert [round(share, 2) for share in (shares if len(figures) == len(shares) else {min(shares)})] == figures


def test_noise_at_which_the_detector_is_not_quiet():
    text = (DOCS / "schedule-and-alarms.md").read_text()
    flat, growth = re.search(r"At 25% noise the default is not quiet \(flat ([\d.]+), growth ([\d.]+)\)", text).groups()
    known = {name: (curve, outcome) for name, curve, outcome in CASES}
    for case, told in (("flat", flat), ("growth 20%/100 steps", growth)):
        assert round(right_outcomes(DetectorConfig(), *known[case], noise=0.25), 2) == float(told)


@pytest.mark.parametrize(
    ("page", "runs"), [("schedule-and-alarms.md", "lab/runs/*.xz"), ("lab/causes.md", "lab/unstable.jsonl.xz")]
)
def test_table_of_the_rules_on_levels(page, runs):
    text = (DOCS / page).read_text()
    told = {
        row[0]: row[1:] for row in re.findall(r"^\| (set|judge) \| " + r"([^|]+) \| " * 6 + r"([^|]+) \|$", text, re.M)
    }
    for half, score in score_packed(sorted(DOCS.glob(runs)), None).items():
        figures = (score.runs, score.collapses, f"{score.share_noticed:.1%}", score.in_time, f"{score.median_lead:g}")
        assert told[half] == tuple(map(str, (*figures, score.healthy_steps, f"{score.false_per_thousand:.2f}")))


def test_counts_of_runs_of_a_known_cause():
    text = (DOCS / "lab" / "causes.md").read_text()
    words = " ".join(text.split())
    rows = judged(DOCS / "lab" / "unstable.jsonl.xz")
    assert "\n".join(summary_of_causes(rows)) in text
    harmed = [(run, right) for run, _, right in rows if run.cause and right != "unharmed"]
    told = re.search(r"has (\d+) runs\. (\d+) planted causes did harm, and `why` has (\d+) of these", words).groups()
    assert tuple(map(int, told)) == (len(rows), len(harmed), sum(right == "yes" for _, right in harmed))
    misses = {run.name.partition("/")[2] for run, right in harmed if right == "no"}
    assert set(re.findall(r"`([\w-]+)`", re.search(r"^Misses: (.*?)\n\n", text, re.M | re.S)[1])) == misses


def test_table_of_the_families_mismatch():
    file = DOCS / "lab" / "families.json"
    assert "\n".join(table_of_families(file, "bf16")) in (DOCS / "lab" / "families.md").read_text()
    assert len(table_of_families(file)) == 2 * len(table_of_families(file, "bf16")) - 2


def right_outcomes(config: DetectorConfig, curve, outcome, noise: float, seeds: int = 20) -> float:
    """Share of ``seeds`` noisy curves on which the detector does what it should."""
    return float(
        np.mean([outcome(surge_step(config, curve(np.random.default_rng(seed), noise))) for seed in range(seeds)])
    )


def test_performance_md_has_the_figures_of_its_records():
    """Every number in the column of figures is in the record of the program beside it, but for the targets."""
    text = (DOCS / "performance.md").read_text()
    records = json.loads((DOCS / "performance.json").read_text())["records"]
    rows = re.findall(r"^\| .+ \| (.+) \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(rows) > 8, "nothing was looked at"
    for figures, program in rows:
        numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"\(target.*?\)|`.*?`", "", figures.replace(",", "")))
        recorded = set(re.findall(r"\d+(?:\.\d+)?", "\n".join(records[program]["output"]).replace(",", "")))
        assert set(numbers) <= recorded, f"{program}: {sorted(set(numbers) - recorded)}"
    assert set(MARK.search(text)[1].split(", ")) == {records[program]["commit"] for _, program in rows}


MEASURED = (
    "exact",
    "performance",
    "planning",
    "precision",
    "reliability",
    "router-replay",
    "schedule-and-alarms",
    "servers",
)
DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.]*\d)")  # no address, no version
MARK = re.compile(r"<!-- figures: ([\w., ]+) -->")


@pytest.mark.parametrize("name", MEASURED)
def test_measured_figures_name_what_made_them(name):
    """Each section with decimals names the commit that its figures were measured at, or the test that makes them."""
    lines = (DOCS / f"{name}.md").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("#")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = "\n".join(lines[start + 1 : end])
        marks = MARK.findall(text)
        assert bool(marks) == bool(DECIMAL.search(MARK.sub("", text))), lines[start]
        for source in ", ".join(marks).split(", ") if marks else []:
            ancestor = ["git", "merge-base", "--is-ancestor", source, "HEAD"]  # a rebase leaves objects of no branch
            known = subprocess.run(ancestor, cwd=REPOSITORY, capture_output=True, check=False)
            in_git = (REPOSITORY / ".git").exists() and re.fullmatch("[0-9a-f]{7}", source)
            assert source == "test_figures.py" or not in_git or known.returncode == 0, f"{lines[start]}: {source}"
            assert source == "test_figures.py" or re.fullmatch("[0-9a-f]{7}", source), source


def test_sums_of_patches_md_are_those_of_its_record():
    text = " ".join((DOCS / "patches.md").read_text().split())
    record = json.loads((DOCS / "patches.json").read_text())
    assert "On each release our tests of the series passed" in text
    assert len(record["ours"]["passed"]) == 5
    before = sum(sum(run["passed_before"].values()) for run in record["own"]["runs"])
    assert f"of {before:,} of Megatron's own tests" in text
    assert not any(lost for run in record["own"]["runs"] for lost in run["lost_after"].values())


def test_the_faults_of_parity_md_are_those_of_its_record():
    made = json.loads((DOCS / "parity.json").read_text())
    located = sum(row["located"] for row in made["faults"])
    assert f"{located} of {len(made['faults'])} planted faults were named" in (DOCS / "parity.md").read_text()
    assert {row["fault"] for row in made["faults"]} == FAULTS.keys()
    assert all(witness["beyond"] == 0 for witness in made["clean"].values())
    assert located >= 0.95 * len(made["faults"])
