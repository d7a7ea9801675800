"""Logs of other projects: as their own writers wrote them (logs.tar.xz), and made up where a case is rare.

The writers were run on a recorded run that collapses (unstable/rate-grpo-1e-3-seed0): verl's `Tracking` with each of
its services; slime's and miles' loggers, two updates a step; NeMo-RL's TensorboardLogger; prime-rl's FileMonitor, once
as trainer and once as orchestrator; TrainerState and TensorBoardCallback of transformers, which TRL logs through.
"""

from __future__ import annotations

import json
import math
import re
import struct
import tarfile
import zlib
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config.monitor import level_rules
from megatron_rl.errors import InputError
from megatron_rl.instruments.foreign.read import blind_rules, read_run
from megatron_rl.monitor.alarms import CollapseRule, RecordedRun, collapse_step, first_collapse, read_packed
from megatron_rl.monitor.run_directory import JsonlSink
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY

LOGS = Path(__file__).with_name("logs.tar.xz")
VERL = ("verl/tensorboard", "verl/wandb", "verl/verl.jsonl")
OTHERS = ("slime", "miles", "nemo", "prime", "trl/trainer_state.json", "trl/tensorboard")
FLOAT32 = 2.0**-24


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    with tarfile.open(LOGS) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def recorded() -> RecordedRun:
    runs = read_packed(REPOSITORY / "docs/lab/unstable.jsonl.xz")
    return next(run for run in runs if run.name == "unstable/rate-grpo-1e-3-seed0")


@pytest.mark.parametrize("log", VERL)
def test_a_log_of_verl_has_the_collapse_of_the_same_curve_as_metrics_jsonl(logs, recorded, tmp_path, log):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for record in recorded.records:
        sink.write(int(record["step"]), {name: value for name, value in record.items() if name != "step"})
    ours, theirs = read_run(tmp_path / "metrics.jsonl"), read_run(logs / log)
    assert (ours.project, theirs.project.name) == (None, "verl")
    for find in (collapse_step, first_collapse):
        collapse = find(ours.records, CollapseRule())
        assert collapse == 13
        assert find(theirs.records, CollapseRule()) == collapse


@pytest.mark.parametrize("log", [*VERL, *OTHERS])
def test_every_value_is_that_of_the_curve(logs, recorded, log):
    run = read_run(logs / log)
    values = {record["step"] - run.project.first_step * (run.project.name != "verl"): record for record in run.records}
    assert sorted(values) == [record["step"] for record in recorded.records[: len(run.records)]]
    common = set(run.sources) & set(recorded.records[0]) | ({"groups/no_signal_frac"} & set(run.records[1]))
    assert {"critic/rewards/mean", "val/reward/mean", "response_length/mean", "actor/grad_norm"} <= common
    relative = FLOAT32 if run.kind == "TensorBoard" else 2.0**-52  # a rounding on the way in; 1 - x of prime-rl's share
    for record in recorded.records[: len(run.records)]:
        for name in common & set(record):
            assert values[record["step"]][name] == pytest.approx(record[name], rel=relative, abs=2.0**-53), name


def test_two_updates_a_step_are_averaged_and_told(logs):
    run = read_run(logs / "slime")
    assert "2 updates a step: train/… are means over them" in run.source_lines()
    assert len(run.records) == 24


@pytest.mark.parametrize(
    ("updates", "batches", "last"),
    [
        (range(8), range(4), 3),  # two updates a batch
        (range(7), range(4), 3),  # killed before its last update
        (range(6), range(4), 2),  # the next batch is generated ahead
        (range(8), range(0, 8, 2), 6),  # both counted in updates
    ],
)
def test_the_batch_of_an_update(tmp_path, updates, batches, last):
    rows = [{"rollout/step": step, "rollout/raw_reward": 0.5} for step in batches]
    rows += [{"train/step": step, "train/ppo_kl": 1.0 * (step == updates[-1])} for step in updates]
    run = read_run(written(tmp_path / "run.jsonl", rows))
    assert [record["step"] for record in run.records] == list(batches)
    assert [record["step"] for record in run.records if record.get("actor/ppo_kl")] == [last]


def test_rho_std_of_verl_is_that_of_its_tokens(tmp_path):
    """From E rho² - 1, E(rho - 1 - log rho) and -E log rho over tokens."""
    rho = [0.9, 1.0, 1.4, 1.2, 0.8]
    mean = sum(rho) / len(rho)
    row = {
        "step": 1,
        "critic/score/mean": 0.5,
        "rollout_corr/chi2_token": sum(r * r for r in rho) / len(rho) - 1,
        "rollout_corr/k3_kl": sum(r - 1 - math.log(r) for r in rho) / len(rho),
        "rollout_corr/kl": -sum(map(math.log, rho)) / len(rho),
    }
    (record,) = read_run(written(tmp_path / "run.jsonl", [row])).records
    assert record["mismatch/rho_std"] == rounded(math.sqrt(sum((r - mean) ** 2 for r in rho) / len(rho)))


# -- formats


def written(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


ROWS = [{"step": step, "reward": 0.1 * step, "frac_reward_zero_std": 0.0} for step in range(1, 4)]


def test_values_that_are_not_finite_and_a_step_that_was_repeated(tmp_path):
    rows = [*ROWS, {"step": 2, "reward": "NaN"}, {"step": 4, "reward": float("-inf")}, {"step": 4, "note": "text"}]
    values = {r["step"]: r["critic/rewards/mean"] for r in read_run(written(tmp_path / "run.jsonl", rows)).records}
    assert math.isnan(values.pop(2))
    assert values == {1: 0.1, 3: ROWS[2]["reward"], 4: -math.inf}


def test_several_datasets_and_agents_are_averaged(tmp_path):
    row = {"step": 1, "timing_s/step": 2.0, "val-core/openai/gsm8k/acc/mean@4": 0.2, "val-core/math/reward/mean@4": 0.6}
    row |= {"val-core/math/reward/best@4/mean": 0.9, "val-aux/math/score/mean@4": 0.1}
    (record,) = read_run(written(tmp_path / "run.jsonl", [row])).records
    assert record["val/reward/mean"] == 0.4


def test_a_log_that_is_being_written_is_read_up_to_its_end(logs, tmp_path):
    for log, name in (("verl/tensorboard", "events.out.tfevents.1.host.2.0"), ("verl/wandb", "run-x.wandb")):
        (file,) = (path for path in (logs / log).rglob("*") if path.is_file())
        (tmp_path / name).write_bytes(file.read_bytes()[:-5000])
        whole, cut = read_run(logs / log), read_run(tmp_path / name)
        assert 0 < len(cut.records) < len(whole.records)
        assert cut.records[:-1] == whole.records[: len(cut.records) - 1]
    text = (logs / "verl/verl.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[:-50])
    assert read_run(tmp_path / "cut.jsonl").records == read_run(logs / "verl/verl.jsonl").records[:-1]


# -- what cannot be read


def fragment(data: bytes) -> bytes:
    return b":W&B" + bytes(3) + struct.pack("<IHB", zlib.crc32(b"\1" + data), len(data), 1) + data


def faulty(folder: Path, name: str, content: str | bytes) -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f: f / "absent", "absent: no such file; expected a run directory of megatron-rl, or a log of verl"),
        (lambda f: f, "no log found; expected a run directory"),
        (lambda f: faulty(f, "a.txt", "x"), "not a log that is known"),
        (lambda f: faulty(f, "a.jsonl", '{"reward": 1}\n'), "row 1: no step; expected a whole number under one of"),
        (lambda f: faulty(f, "a.jsonl", '{"step": 1,\n{}\n'), "line 1: not valid JSON"),
        (lambda f: faulty(f, "a.jsonl", '{"step": 1, "loss": 2}\n'), "nothing tells whose log it is (loss …)"),
        (lambda f: faulty(f, "a.jsonl", '{"step": 1}\n'), "the log has no number yet"),
        (lambda f: faulty(f, "a.csv", "a,b\n1,2\n"), "no column of steps"),
        (lambda f: faulty(f, "a.csv", "step,reward\n1,x\n"), "line 2: could not convert string to float: 'x'"),
        (lambda f: faulty(f, "a.csv", "Step,a - reward,b - reward\n1,2,3\n"), "reward has several columns"),
        (lambda f: faulty(f, "a.csv", "Wall time,Step,Value\n1,2,3\n"), "give the event files"),
        (lambda f: faulty(f, "trainer_state.json", "{}"), "no log_history"),
        (lambda f: faulty(f, "a.wandb", b"x" * 99), "does not begin with :W&B"),
        (
            lambda f: faulty(f, "a.wandb", b":W&B\0\0\0" + b"\0\0\0\0\x02\0\x01\x12\x09"),
            "broken at byte 7 (wrong checksum)",
        ),
        (
            lambda f: faulty(f, "a.wandb", fragment(b"\x12\x09")),
            "the client cannot have written (a field that is longer",
        ),
        (lambda f: faulty(f, "a.wandb", fragment(b"\x12\x04\x0a\x02\x08\x01")), "the client cannot have written"),
        (lambda f: faulty(f, "events.out.tfevents.1", b"x" * 99), "its first record is not whole"),
        (lambda f: faulty(f, "events.out.tfevents.1", b"\x03" + bytes(11) + b"\xff" * 7), "not an event file"),
    ],
)
def test_errors_say_what_was_expected(tmp_path, write, message):
    with pytest.raises(InputError, match=re.escape(message)):
        read_run(write(tmp_path))


def test_a_folder_of_our_runs_is_not_taken_for_a_log(tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/recipe.resolved.yaml").touch()
    written(tmp_path / "runs/a/metrics.jsonl", ROWS)
    with pytest.raises(InputError, match=r"holds run directories of megatron-rl; give one of .*runs/a$"):
        read_run(tmp_path / "runs")


# -- what a log lacks


def test_rules_that_see_nothing(logs):
    records = read_run(logs / "verl/wandb").records
    assert blind_rules(records, level_rules({})) == {
        "no-signal": "groups/no_signal_frac",
        "no-rate": "actor/lr",
        "mismatch-surge": "mismatch/rho_std",
        "update-size": "noise/relative_update",
        "overflows": "actor/update_skipped",
    }


def test_why_reads_a_log(logs, capsys):
    assert main(["run", "why", str(logs / "verl/tensorboard"), "--set", "rollout.max_staleness=3"]) == 0
    text = capsys.readouterr().out
    assert "TensorBoard, a log of verl, by the names of 0.10.0.dev" in text
    assert "step    13  collapse" in text
    assert "test: the same run with rollout.max_staleness=0 (docs/coming-from.json has your names)" in text
    assert "no-signal           needs groups/no_signal_frac" in text
    assert "recipe.resolved.yaml" not in text
    assert "run branch" not in text
    assert main(["run", "why", str(logs / "prime"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["collapse"], printed["read"]["actor/lr"]) == (14, ["optim/lr"])
    assert printed["lacks"]["update-size"] == "noise/relative_update"


def test_score_alarms_reads_a_log(logs, capsys):
    assert main(["run", "score-alarms", str(logs / "verl/verl.jsonl")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"reward-drop +13 +15 ", text)
    assert (
        "these rules see nothing: no-signal (groups/no_signal_frac), no-rate (actor/lr), mismatch-surge (mismatch"
        in text
    )
    assert main(["run", "score-alarms", str(logs / "slime"), "--json"]) == 0
    assert "overflows" in json.loads(capsys.readouterr().out)["lacks"][str(logs / "slime")]


def test_explain_schedule_reads_a_log(logs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "explain-schedule", str(logs / "nemo"), "--as", "detector.min_step=5"]) == 0
    text = capsys.readouterr().out
    assert "style=length-decay" in text
    assert "mode=shadow" in text
    assert "peak 0.001, floor 0.0001, 24 recorded steps" in text
    lengthless = written(tmp_path / "run.jsonl", ROWS)
    assert main(["run", "explain-schedule", str(lengthless)]) == 2
    assert "no response_length/mean" in capsys.readouterr().err


def test_plot_draws_a_log_beside_a_run(logs, tmp_path, capsys):
    run = f"theirs={logs / 'verl/wandb'}"
    assert main(["run", "plot", run, str(logs / "trl/trainer_state.json"), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "theirs: 1 run(s), 60 steps" in text
    assert "trainer_state: 1 run(s), 24 steps" in text
    assert (tmp_path / "curves.png").is_file()
