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
