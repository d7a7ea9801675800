"""The command `score-alarms`: over runs, over packed runs, and its file of rules."""

from __future__ import annotations

import json
import re

import pytest

from megatron_rl.__main__ import main
from megatron_rl.errors import InputError
from megatron_rl.instruments.why.command import read_rules
from megatron_rl.monitor.alarms import Alarms, read_packed
from tests.support.finished_run import curve, packed, write_run


def test_the_command_prints_the_two_halves(tmp_path, capsys):
    runs = [{"run": f"r{number}", "records": curve([0.8] * 20 + [0.1 + number / 1000] * 20)} for number in range(12)]
    assert main(["score-alarms", str(packed(tmp_path / "x.xz", runs))]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    halves = [read_packed(tmp_path / "x.xz")[number].half for number in range(12)]
    assert int(rows["set"][1]) == halves.count("set") > 0
    assert rows["judge"][2:5] == [str(halves.count("judge")), "100.0%", str(halves.count("judge"))]


def test_long_names_have_a_column_of_their_own(tmp_path, capsys):
    run = write_run(tmp_path / ("a-name-of-many-words" * 3), 0, collapses=True)
    rule = [{**GROWTH_RULE, "above": 0.01, "name": "a-rule-whose-name-is-long-too"}]
    (tmp_path / "rules.yaml").write_text(json.dumps(rule))
    assert main(["score-alarms", str(run), "--rules", str(tmp_path / "rules.yaml")]) == 0
    head, _, row = (line.split() for line in capsys.readouterr().out.splitlines()[:3])
    assert row[:2] == [str(run), "a-rule-whose-name-is-long-too"]
    assert len(row) == len(head)


GROWTH_RULE = {"name": "growth", "metric": "mismatch/rho_std", "statistic": "log_slope_lower", "window": 40}
RULES = [
    {**GROWTH_RULE, "above": 0.01, "for_steps": 3},
    {"name": "short", "metric": "critic/rewards/mean", "below": 0.2},
]


def test_score_alarms_over_runs(tmp_path, capsys):
    runs = [str(write_run(tmp_path / f"{c}", s, c == "bad")) for s, c in enumerate(("bad", "good"))]
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps(RULES))
    assert main(["score-alarms", *runs, "--rules", str(rules), "--json"]) == 0
    bad, good = json.loads(capsys.readouterr().out).values()
    assert 230 <= bad[0]["collapse"] <= 250
    assert 60 <= bad[0]["lead"] <= 110
    assert (good[0]["fired"], good[0]["collapse"]) == ([], None)
    assert main(["score-alarms", *runs, "--rules", str(rules)]) == 0
    assert re.search(r"growth +1 +1 +\d+ +0 +2\n", capsys.readouterr().out)
    assert main(["score-alarms", *runs, "--json"]) == 0  # the recipes have no rules of their own
    judged = [row["rule"] for row in next(iter(json.loads(capsys.readouterr().out).values()))]
    assert judged == [rule.name for rule in Alarms.of({}).rules]
    rules.write_text("{}")
    assert main(["score-alarms", *runs, "--rules", str(rules)]) == 2
    assert "no rules" in capsys.readouterr().err


def test_alarm_rules_are_read_as_recipes_are(tmp_path, capsys):
    """YAML 1.2: 1e-08 is a number, as a resolved recipe writes it; PyYAML's own reader makes it text."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {name: tiny, metric: mismatch/rho_std, above: 1e-08, for_steps: 2, then: [warn]}\n")
    (rule,) = read_rules(rules)
    assert rule.above == 1e-8
    rules.write_text("- {name: [\n")
    with pytest.raises(InputError, match=r"rules\.yaml: not valid YAML"):
        read_rules(rules)
