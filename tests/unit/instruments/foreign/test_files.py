"""Files of logs: every format, and several runs below one path."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.instruments.foreign.read import read_run

LOGS = Path(__file__).with_name("logs.tar.xz")


def written(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


ROWS = [{"step": step, "reward": 0.1 * step, "frac_reward_zero_std": 0.0} for step in range(1, 4)]


def as_csv(folder: Path, prefix: str = "") -> Path:
    names = [name for name in ROWS[0] if name != "step"]
    with (folder / "run.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Step", *(prefix + name for name in names), *(f"{prefix}{name}__MIN" for name in names)])
        table.writerows([row["step"], *(row[name] for name in names), "", ""] for row in ROWS)
    return folder / "run.csv"


@pytest.mark.parametrize(
    "write",
    [
        as_csv,
        lambda folder: as_csv(folder, "my run - "),
        lambda folder: written(folder / "run.jsonl", ROWS),
        lambda folder: written(folder / "run.jsonl", ROWS).parent,
        lambda folder: written(folder / "run.jsonl", [{"step": row["step"], "data": row} for row in ROWS]),
    ],
)
def test_formats(tmp_path, write: Callable[[Path], Path]):
    run = read_run(write(tmp_path))
    assert run.project.name == "TRL"
    expected = [(row["step"], row["reward"], 0.0) for row in ROWS]
    assert [(r["step"], r["critic/rewards/mean"], r["groups/no_signal_frac"]) for r in run.records] == expected


def test_logs_of_several_runs_are_listed(tmp_path):
    for name in ("one.jsonl", "two.jsonl"):
        written(tmp_path / name, ROWS)
    with pytest.raises(InputError, match=r"2 logs of several runs \(each has .*one\.jsonl, .*two\.jsonl"):
        read_run(tmp_path)


CONSOLE = {
    "verl": "(Task pid=7) step:{step} - critic/score/mean:np.float64({reward}) - timing_s/step:3 - actor/lr:0",
    "slime": "[2026-08-21] rollout {step}: {{'rollout/raw_reward': {reward}, 'rollout/response_len/mean': 9.5}}",
    "TRL": "{{'loss': 0.0, 'reward': '{reward}', 'completions/clipped_ratio': nan, 'frac_reward_zero_std': 0.1}}",
}


@pytest.mark.parametrize("project", CONSOLE)
def test_what_a_run_printed_is_read(tmp_path, project):
    lines = [CONSOLE[project].format(step=step, reward=0.5 + step / 8) for step in (1, 2, 3)]
    (tmp_path / "run.log").write_text("\n".join(["Starting …", lines[0], "a warning: {'x'", *lines[1:], "Killed"]))
    run = read_run(tmp_path / "run.log")
    assert run.project.name == project
    reward = "critic/score/mean" if project == "verl" else "critic/rewards/mean"
    assert [(record["step"], record[reward]) for record in run.records] == [(1, 0.625), (2, 0.75), (3, 0.875)]


def test_a_list_of_rows_and_a_history_with_empty_cells_are_read(tmp_path):
    rows = [{"_step": 2 * n, "rollout/step": n, "rollout/raw_reward": 0.5} for n in range(3)]
    rows += [{"_step": 2 * n + 1, "train/step": n, "train/pg_clipfrac": 0.1} for n in range(3)]
    (tmp_path / "run.json").write_text(json.dumps(rows))
    columns = ["_step", "rollout/step", "train/step", "rollout/raw_reward", "train/pg_clipfrac"]
    table = [",".join(str(row.get(name, "")) for name in columns) for row in rows]
    (tmp_path / "run.csv").write_text("\n".join([",".join(columns), *table]))
    expected = [{"step": n, "critic/rewards/mean": 0.5, "actor/pg_clipfrac": 0.1} for n in range(3)]
    assert read_run(tmp_path / "run.json").records == expected
    assert read_run(tmp_path / "run.csv").records == expected
