"""A watched run: what its status and its rules say."""

from __future__ import annotations

from megatron_rl.instruments.watch import views
from megatron_rl.instruments.watch.run import WatchedRun
from tests.support.written_run import WrittenRun


def test_a_collapsed_run_is_no_plain_done(tmp_path):
    written = WrittenRun(tmp_path)
    for step in range(12):
        written.step(step, alarm=step == 7)
    written.directory.done.write_text("12\n")
    run = WatchedRun("run", tmp_path)
    run.refresh()
    assert run.status() == "alarmed"
    rules = {rule["name"]: rule["text"] for rule in views.state([run])["runs"][0]["rules"]}
    assert "(window of 10, full since step 9)" in rules["reward-drop"]
    assert "(window of 20, has 12 of 21)" in rules["length-surge"]
    assert "window" not in rules["no-signal"]


def test_a_run_that_collapsed_without_an_alarm_is_no_plain_done(tmp_path):
    written, run = WrittenRun(tmp_path), WatchedRun("run", tmp_path)
    for step in range(10):
        written.step(step, reward=0.8)
    written.directory.done.write_text("10\n")
    run.refresh()
    assert run.status() == "done"
    for step in range(10, 20):
        written.step(step, reward=0.1)
    run.refresh()
    assert (run.status(), run.collapse()) == ("collapsed", 12)  # the first median of five that is low
    assert views.state([run])["runs"][0]["status"] == "collapsed"
