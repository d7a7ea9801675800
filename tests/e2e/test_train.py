"""The command that people type, on both engines: a run, its record, resuming it, stopping it, several ranks.

Starts are the cost (about 10 s each), so runs are made once and looked at by several tests, and all but the first start
in a process that has done its imports. Several updates a step, refilled groups, older checkpoints, offload and a user's
objective: tests/reliability and tests/parallel/test_offload.py. `torchrun`: test_turns.py.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.config.model_rules import FIRST_STEP_BOUNDS
from megatron_rl.instruments.watch.run import WatchedRun
from megatron_rl.monitor.samples import read_samples
from megatron_rl.rollout.generator import Sampling
from megatron_rl.run.recorded_batches import batch_path, load_batch
from megatron_rl.types import Batch
from tests.e2e import hf_reference
from tests.support.patience import PATIENCE_S
from tests.support.plain_training import Limits, float32_limits_on, run_on
from tests.support.rounding import CLOSED_FORM, adam_largest_update, gamma, rounded, unit_roundoff
from tests.support.series import megatron_core
from tests.support.tiny import MODEL, REPOSITORY
from tests.support.written_run import without_times
from tests.support.zygote import run_command, run_ranks_of_command, surroundings

GRPO = "recipes/tiny/grpo.yaml"
STEPS = 4
LR, BETAS = 1e-4, (0.9, 0.95)  # the recipe's
EPS = 1e-3  # as in tests/parallel/test_learner_layouts.py: updates are as exact as gradients
SAMPLING = Sampling(24)


def arguments_of(root: Path, name: str, *overrides: str, resume: str = "auto") -> list[str]:
    settings = [f"name={name}", f"run_root={root}", f"num_steps={STEPS}", "batch.prompts=4", "validation.limit=16"]
    settings += ["validation.every=0", "checkpoint={every: 0, keep_last: 0}", "monitor.plots=false"]
    settings += [f"learner.optimizer.eps={EPS}", *overrides]
    return ["train", GRPO, "--resume", resume, *(part for setting in settings for part in ("--set", setting))]


def train(root: Path, name: str, *overrides: str, resume: str = "auto", own_interpreter: bool = False):
    arguments = arguments_of(root, name, *overrides, resume=resume)
    if not own_interpreter:
        return run_command("megatron_rl", arguments, root)
    command = [sys.executable, "-m", "megatron_rl", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE_S
    )


def succeeded(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def metrics(root: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    succeeded(
        train(
            root,
            "whole",
            "validation.every=2",
            "monitor.plots=true",
            "checkpoint={every: 2, keep_last: 0, export_hf: true}",
            "recorder.record_batches=all",
            own_interpreter=True,
        )
    )
    return root


def test_a_watched_run_shows_what_it_recorded(root, batches):
    """Records are those of metrics.jsonl, and sampled texts have the ratio of their tokens."""
    run = WatchedRun("whole", root / "whole")
    run.refresh()
    assert run.status() == "done"
    assert [row["step"] for row in run.records] == [row["step"] for row in metrics(root, "whole")]
    samples = list(read_samples(run.directory.samples))
    assert samples
    for sample in samples:
        sequences = {sequence.id: sequence for sequence in batches[sample["step"]].sequences}
        sequence = sequences[f"{sample['prompt_id']}/{sample['sample']}"]
        assert sample["rho"]["max"] == np.exp(sequence.log_rho).max()


def test_a_run_leaves_its_whole_record(root, log_rho):
    run = root / "whole"
    rows = metrics(root, "whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "val/reward/mean" in rows[0]
    assert "val/reward/mean" in rows[4]
    assert "val/reward/mean" not in rows[1]
    for name in ("critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/lr"):
        assert all(name in row for row in rows[:4]), name
    assert all(row["perf/time/generate"] > 0 and row["perf/time/forward_backward"] > 0 for row in rows[:4])
    # One update per rollout batch: the pass for old log-probs is skipped, and costs nothing.
    assert all(row["perf/time/old_logprobs"] == 0.0 for row in rows[:4])
    assert "hacking/J_pcc" in rows[3]
    resolved = yaml.safe_load((run / "recipe.resolved.yaml").read_text())
    assert resolved["learner"]["dtype"] == "fp32"
    environment = json.loads((run / "environment.json").read_text())
    assert "megatron-core" in environment["versions"]
    assert environment["patches"]["status"][0].startswith(f"{megatron_core().name} ")
    assert environment["patches"]["status"][0].endswith(": applied")
    assert "WORLD_SIZE" not in environment["variables"], "a run alone must not set what processes it starts inherit"
    assert (run / "DONE").read_text().strip() == str(STEPS)
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("critic/rewards/mean")] == [0, 1, 2, 3]
    assert (run / "plots" / "curves.png").stat().st_size > 10_000
    kept = (run / "recipe.resolved.1.yaml").read_text()
    assert kept.startswith("# in force from step 0 on")
    samples = list(read_samples(run / "samples.jsonl"))
    assert [sample["step"] for sample in samples] == [0] * 4  # every 10 steps, 4 of them
    assert samples[0]["reward"] >= samples[1]["reward"]
    assert all(sample["prompt"].startswith("^") and sample["length"] > 0 for sample in samples)
    for sample in samples:
        assert math.exp(-log_rho) <= sample["rho"]["min"] <= sample["rho"]["max"] <= math.exp(log_rho)
    assert "validation before step 0" in (run / "log.txt").read_text()


JUDGE = """
import asyncio

async def judge(response, answer):
    await asyncio.sleep(0.05)
    if len(response) > 4 and len(response) % 3 == 0:
        raise ConnectionError("the judge is away")
    return float(response.rpartition("#")[2] == answer)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scores_that_come_during_the_pass_for_old_logprobs_change_nothing(ranks, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    settings = [f"reward={{name: '{tmp_path}/judge.py:judge', retries: 0}}", "batch.minibatches=2", "num_steps=2"]
    settings += ["reward.max_error_frac={first: 1.0, later: 1.0}", "recorder.record_batches=all"]
    rows = {}
    for name, program in (("late", "megatron_rl"), ("early", "tests.e2e.programs.early_scores")):
        done = run_ranks_of_command(program, arguments_of(tmp_path, name, *settings), tmp_path, ranks)
        succeeded(done)
        rows[name] = without_times(metrics(tmp_path, name))
    assert rows["late"] == rows["early"]
    assert 0 < rows["late"][0]["reward/unscored_frac"] < 1
    for step in range(2):
        late, early = (load_batch(batch_path(tmp_path / name / "batches", step)).batch for name in ("late", "early"))
        assert [s.advantage for s in late.sequences] == [s.advantage for s in early.sequences]
        assert all(np.array_equal(a.loss_mask, b.loss_mask) for a, b in zip(late.sequences, early.sequences))
        assert all(np.array_equal(a.old_logprobs, b.old_logprobs) for a, b in zip(late.sequences, early.sequences))


@pytest.fixture(scope="module")
def log_rho() -> float:
    """How far rounding may take log rho from 0: two engines, neither of them in float64."""
    return 2 * hf_reference.rounding_bound(hf_reference.responses(), SAMPLING)


@pytest.fixture(scope="module")
def batches(root) -> list[Batch]:
    """What the run was trained on."""
    return [load_batch(batch_path(root / "whole" / "batches", step)).batch for step in range(STEPS)]


@pytest.fixture(scope="module")
def limits(batches) -> Limits:
    """How far rounding may take two runs on the same tokens apart, what Adam makes of it included."""
    return float32_limits_on(batches, lr=LR, eps=EPS)


def test_plain_pytorch_trains_as_the_run(root, batches, limits):
    """So that the limits are those of this computation."""
    plain = run_on(batches, torch.float64, lr=LR, eps=EPS)
    for step, row in enumerate(metrics(root, "whole")[:STEPS]):
        if limits.ties[step]:
            break
        assert row["actor/lr"] == LR
        assert abs(row["actor/grad_norm"] - np.linalg.norm(plain.gradients[step])) <= limits.gradients[step]
        assert abs(row["actor/entropy"] - plain.entropy[step].mean()) <= limits.entropy


def test_both_engines_agree_in_fp32_after_every_update(root, log_rho):
    """mu from vLLM after a weight update, po from Megatron: the run's own proof that weights arrive."""
    for row in metrics(root, "whole")[:STEPS]:
        assert row["mismatch/rho_std"] <= math.expm1(log_rho)
        assert row["mismatch/rho_max"] <= math.exp(log_rho)
    # With the weights of the start the last step's mismatch would not pass.
    trained, started = (
        np.concatenate(
            hf_reference.score(hf_reference.load(path, torch.float64), hf_reference.responses(), SAMPLING)[0]
        )
        for path in (root / "whole" / "checkpoints" / "hf", MODEL)
    )
    assert np.exp(trained - started).std() > math.expm1(log_rho)


def test_resumed_run_continues_bit_for_bit(root):
    """Stopped through the STOP file after a step, then continued by the same command."""
    (root / "stopped").mkdir()
    (root / "stopped" / "STOP").touch()
    due = "checkpoint={every: 1, keep_last: 0, async_save: false}"  # the step of the stop has a save of its own
    first = succeeded(train(root, "stopped", "validation.every=2", due))
    assert "stopped on request after step 0" in first.stdout
    assert first.stdout.count("checkpoint: ") == 1
    assert len(metrics(root, "stopped")) == 1
    assert not (root / "stopped" / "STOP").exists()
    second = succeeded(train(root, "stopped", "validation.every=2"))
    assert "continues from step 1" in second.stdout
    assert without_times(metrics(root, "stopped")) == without_times(metrics(root, "whole"))


def test_exported_checkpoint_loads_and_holds_the_trained_weights(root):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = root / "whole" / "checkpoints" / "hf"
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    started = AutoModelForCausalLM.from_pretrained(REPOSITORY / "recipes/tiny/model", dtype=torch.float32).state_dict()
    assert trained.keys() == started.keys()
    rounding_of_a_weight = unit_roundoff(torch.float32) * max(float(tensor.abs().max()) for tensor in trained.values())
    moved = [float((trained[name] - started[name]).abs().max()) for name in trained]
    updates = [adam_largest_update(number, LR, *BETAS) for number in range(1, STEPS + 1)]
    assert 0 < max(moved) <= sum(updates) * (1 + gamma(CLOSED_FORM, torch.float32)) + STEPS * rounding_of_a_weight
    assert AutoTokenizer.from_pretrained(folder)("^12=").input_ids


def test_two_ranks_train_like_one(root, log_rho, batches, limits):
    """Rollouts are drawn per response, so two ranks sample what one samples, and learn the same from it.

    Where a router meets a tie within rounding the two may choose otherwise: later steps are others then.
    """
    layout = ("learner.parallel.tensor=2", "learner.parallel.expert=2")
    succeeded(run_ranks_of_command("megatron_rl", arguments_of(root, "two", *layout), root, 2))
    rows = metrics(root, "two"), metrics(root, "whole")[:STEPS]
    tokens = [sum(s.length for s in batch.sequences) for batch in batches]
    assert limits.ties[0] == 0
    for step, (got, want, ties) in enumerate(zip(*rows, limits.ties, strict=True)):
        if ties:
            break
        assert got["mismatch/rho_std"] <= math.expm1(log_rho)
        for key in ("critic/rewards/mean", "response_length/mean", "actor/lr"):
            assert got[key] == want[key], key
        for key in ("actor/grad_norm", "actor/entropy"):
            assert abs(got[key] - want[key]) <= limits.of_metric(key, step), (step, key)
        # One update a step: r is 1, so that the loss is a mean of advantages, whatever the log-probs.
        loss = rounded(want["actor/pg_loss"], 2 * tokens[step], limits.mean_advantage, torch.float32)
        assert got["actor/pg_loss"] == loss


def test_a_second_run_in_the_same_directory_is_refused(root):
    done = train(root, "whole", resume="never")
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert "Traceback" not in done.stderr


def test_eval_scores_checkpoints_of_both_kinds(root, tmp_path):
    """A run's own checkpoint (its newest, where the run is named) and its Hugging Face export hold the same weights, so
    they score the same. Two files have a row each."""
    lines = (REPOSITORY / "recipes/tiny/data/validation.jsonl").read_text().splitlines(keepends=True)
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for file, part in zip(files, (lines[:6], lines[6:16]), strict=True):
        file.write_text("".join(part))

    def evaluate(checkpoint: Path) -> subprocess.CompletedProcess:
        arguments = ["eval", GRPO, "--checkpoint", str(checkpoint), "--output", str(tmp_path / "figures.json")]
        arguments += ["--set", "validation.num_samples=2"] + [f"--data={file}" for file in files]
        return run_command("megatron_rl", arguments, tmp_path)

    figures = []
    for path in (root / "whole", root / "whole" / "checkpoints" / "hf"):
        succeeded(evaluate(path))
        figures.append(json.loads((tmp_path / "figures.json").read_text()))
    assert {**figures[0], "checkpoint": str(root / "whole" / "checkpoints" / "step_00000004")} == figures[0]
    assert {**figures[0], "checkpoint": ""} == {**figures[1], "checkpoint": ""}
    samples = list(read_samples(tmp_path / "figures.samples.jsonl"))
    assert len(samples) == 16 * 2
    assert {sample["finish"] for sample in samples} <= {"stop", "length"}
    correct = sum(sample["raw_reward"] for sample in samples) / len(samples)
    first, second, both = figures[1]["files"]
    assert [row["problems"] for row in (first, second, both)] == [6, 10, 16]
    assert [row["reward"] for row in (first, second)] == [
        figures[1][f"val/{name}/avg@2"] for name in ("first", "second")
    ]
    assert correct == rounded(both["reward"])
    assert 0.0 < both["reward"] <= both["pass_at"]["2"] <= 1.0
    refused = evaluate(tmp_path)
    assert refused.returncode == 2
    assert "neither a Hugging Face folder" in refused.stderr


CENTRED = ["objective.policy_term=reinforce", "objective.score_centering=true", "num_steps=2", "batch.minibatches=2"]


@pytest.mark.parametrize(
    "more",
    [
        ["rollout.sampled_head=4", "rollout.temperature=2", "learner.fused_head=true"],
        ["rollout.top_k=8", "rollout.top_p=0.9", "rollout.kept_sets=true", "rollout.sampled_head=8"],
    ],
    ids=["head", "kept sets"],
)
def test_centred_scores_of_engines_that_agree_and_of_one_that_rounds(tmp_path, more):
    """c_v is rounding with one update and engines in fp32, and not under int4. At this temperature there are tails."""
    settings = [*CENTRED, *more, "recorder.record_batches=all"]
    succeeded(train(tmp_path, "fp32", *settings, "batch.minibatches=1"))
    succeeded(train(tmp_path, "int4", *settings, "rollout.quantization=int4"))
    sums = {
        name: [row["score_centering/abs_coeff_sum"] for row in metrics(tmp_path, name)] for name in ("fp32", "int4")
    }
    assert 10 * max(sums["fp32"]) < min(sums["int4"])
    row = metrics(tmp_path, "int4")[0]
    sequences = load_batch(batch_path(tmp_path / "int4" / "batches", 0)).batch.sequences
    mu = np.exp(np.concatenate([s.head_logprobs for s in sequences]).astype(np.float64)).sum(axis=1)
    trained = np.concatenate([s.loss_mask for s in sequences])
    assert row["score_centering/head_mass_mu"] == rounded(mu[trained].mean(), dtype=torch.float32)
    assert row["score_centering/head_mass_min"] == rounded(mu[trained].min(), dtype=torch.float32)
    heads = np.concatenate([s.kept_tokens if s.head_tokens is None else s.head_tokens for s in sequences])
    outside = ~(heads == np.concatenate([s.tokens for s in sequences])[:, None]).any(axis=1)
    assert row["score_centering/outside_frac"] == rounded(outside[trained].mean())


def test_kept_sets_leave_no_more_than_rounding_between_the_engines(tmp_path):
    """pi is over what mu keeps, in both mini-batches and in the pass before them; a stored batch has the sets."""
    settings = ["rollout.top_k=8", "rollout.top_p=0.9", "rollout.temperature=1.2", "rollout.kept_sets=true"]
    settings += ["num_steps=2", "batch.minibatches=2", "recorder.record_batches=all", "learner.fused_head=true"]
    succeeded(train(tmp_path, "kept", *settings))
    largest = FIRST_STEP_BOUNDS["fp32"]
    assert all(0 < row["training/rollout_probs_diff_max"] <= largest for row in metrics(tmp_path, "kept"))
    batch = load_batch(batch_path(tmp_path / "kept" / "batches", 0)).batch
    kept = np.concatenate([s.kept_tokens for s in batch.sequences])
    sampled = np.concatenate([s.tokens for s in batch.sequences])
    assert (kept == sampled[:, None]).any(axis=1).all()
    assert (kept >= 0).sum(axis=1).min() < (kept >= 0).sum(axis=1).max() <= 8
