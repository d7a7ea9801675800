"""`megatron-rl parity` on real engines: sound ones are within every bound, planted faults are named where they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl.config.rollout import ExactConfig
from megatron_rl.exact.doses import make_dose
from megatron_rl.instruments.parity.compare import compare
from megatron_rl.instruments.parity.report import model_hash
from megatron_rl.instruments.parity.witnesses import learner_record
from megatron_rl.learner.process_groups import shutdown
from tests.support.patience import PATIENCE_S
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tests.support.zygote import run_command, run_ranks_of_command
from tools.dev.parity_bench import MODELS, Bench, make_models
from tools.dev.parity_faults import FAULTS, examine

pytestmark = pytest.mark.usefixtures("cheap_engines")

REPOSITORY = Path(__file__).parents[2]
GRPO = "recipes/tiny/grpo.yaml"
WHO = ("transformers", "learner", "exact", "vllm")
WITNESSES = ["transformers", "learner", "exact pass", "vLLM prefill", "vLLM decode"]
QUICK = (
    "vLLM: two experts exchanged",
    "vLLM: position off by one in decode",
    "vLLM: cosines in bf16",
    "vLLM: a cached key lost in decode",
    "learner: softmax before the choice of experts",
    "learner: attention across packed sequences",
    "exact generation: cached keys in bf16",
)


class Benches:
    """One bench at a time: a process runs one engine."""

    def __init__(self, folder: Path):
        self._folder, self._models, self._name, self._bench = folder, {}, None, None

    def of(self, model: str, dtype: str = "fp32") -> Bench:
        if self._name != (model, dtype):
            self.close()
            if model not in self._models:
                self._models |= make_models(self._folder, [model])
            self._name, self._bench = (model, dtype), Bench(self._models[model], dtype)
        return self._bench

    def close(self) -> None:
        if self._bench is not None:
            self._bench.__exit__()
        self._name = self._bench = None


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    made = Benches(tmp_path_factory.mktemp("models"))
    yield made
    made.close()
    shutdown()


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(FAULTS, key=lambda name: MODELS.index(FAULTS[name].model))))
def test_a_planted_fault_is_named(benches, name):
    comparison = examine(benches.of(FAULTS[name].model), FAULTS[name])
    assert comparison["located"], comparison


IN_EXACT_MODE = {"qwen3_moe", "qwen2_moe", "olmoe", "qwen3", "qwen2", "llama"}
UNSCALED = ("glm4_moe", "fp16")  # vLLM 0.30 leaves out the experts' scale there
PAIRS = [(model, dtype) for model in MODELS for dtype in ("fp32", "bf16", "fp16")]
PAIRS.remove(UNSCALED)


@pytest.mark.parametrize(("model", "dtype"), slow_but(PAIRS[:1], PAIRS))
def test_sound_witnesses_are_within_every_bound(benches, model, dtype):
    """Also after faults: a fault is gone with its block, and so is every hook."""
    bench = benches.of(model, dtype)
    records = [record for who in WHO for record in bench.records(who)]
    result = compare(bench.checkpoint, records)
    assert result.failures == [], result.verdict()
    if model not in IN_EXACT_MODE:
        assert [record.witness for record in records] == [name for name in WITNESSES if "exact" not in name]
    else:
        assert [record.witness for record in records] == WITNESSES
        assert result.generation == (4, [])  # embedding, both layers, last norm
    for witness in (bench.vllm, bench.learner, bench.transformers):
        hooks = [m for m in witness.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert hooks == []


@pytest.mark.slow
def test_a_scale_that_vllm_leaves_out_is_named(benches):
    bench = benches.of(*UNSCALED)
    result = compare(bench.checkpoint, [record for who in WHO for record in bench.records(who)])
    assert {failure.witness.split()[0] for failure in result.failures} == {"vLLM"}, result.verdict()


@pytest.mark.parametrize(("operator", "tap"), [("o_proj", "1.o_proj"), ("mlp", "1.mlp"), (None, "1.output")])
def test_a_dose_of_exact_mode_is_in_the_operator_that_it_names(benches, operator, tap):
    """`exact.noise` on one operator of one layer: that operator's own error alone is beyond its bound."""
    bench = benches.of("qwen3_moe")
    dose = make_dose(ExactConfig(noise={"kind": "hidden", "std": 1e-3, "layers": [1], "operator": operator}), 0)
    positions = bench.clean("transformers")[0].positions
    with dose.on(bench.exact):
        dose.before_pass(torch.zeros_like(positions), positions)
        record = learner_record(bench.setup, bench.architecture, bench.exact, exact=True)
    comparison = compare(bench.checkpoint, [record])
    assert [error.tap for error in comparison.failures] == [tap]


def test_the_command_writes_a_certificate(tmp_path):
    done = run_command("megatron_rl", ["parity", str(MODEL), "--dtype", "bf16", "--out", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pass: every operator of every witness is within its bound" in done.stdout
    assert "exact mode: 6 taps of its pass and of its generation: all equal bit for bit" in done.stdout
    certificate = json.loads((tmp_path / "parity.json").read_text())
    seen = {token for sequence in certificate["tokens"] for token in sequence}
    assert f"at the first 70 positions and for {len(seen)} different tokens" in done.stdout
    assert (certificate["verdict"], certificate["first"]) == ("pass", [])
    assert certificate["dtypes"] == {"learner": "bf16", "rollout": "bf16"}
    assert {entry["witness"] for entry in certificate["operators"]} == set(WITNESSES)
    assert len(certificate["operators"]) == 76 * len(WITNESSES)
    assert all(entry["pass"] for entry in certificate["operators"])
    assert len(certificate["model"]["sha256"]) == 64
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "parity.txt").read_text() in done.stdout


def parity_of(folder: Path, *arguments: str, ranks: int = 1) -> dict:
    """The certificate of a comparison that was started from the command line."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "megatron_rl", "parity", *arguments, "--out", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("pass: every operator of every witness is within its bound") == 1
    return json.loads((folder / "parity.json").read_text())


BOTH = ("--set", "learner.parallel.tensor=2", "--set", "learner.parallel.expert=2")


def test_a_recipes_layout_and_first_layers_on_two_ranks(tmp_path):
    arguments = ["parity", GRPO, *BOTH, "--witnesses", "learner", "--layers", "1", "--tokens", "1,5,3"]
    done = run_ranks_of_command("megatron_rl", [*arguments, "--out", str(tmp_path)], tmp_path, 2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    certificate = json.loads((tmp_path / "parity.json").read_text())
    assert {certificate["layout"][name] for name in ("tensor", "expert", "ranks")} == {2}
    assert certificate["model"]["layers"] == 1
    assert {entry["tap"].split(".")[0] for entry in certificate["operators"] if "." in entry["tap"]} == {"0"}
    assert certificate["tokens"] == [[1, 5, 3]]


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_compared(tmp_path):
    """A run under TP2·EP2, then its checkpoint under the same layout, with every witness."""
    settings = [f"run_root={tmp_path}", "name=run", "num_steps=1", "batch.prompts=4", "validation.every=0"]
    settings += ["checkpoint={every: 0, keep_last: 0}", "learner.optimizer.lr=1.0e-2", "monitor.plots=false"]
    train = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train += ["-m", "megatron_rl", "train", GRPO, *BOTH, *(x for setting in settings for x in ("--set", setting))]
    done = subprocess.run(train, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = parity_of(tmp_path / "parity", str(tmp_path / "run"), ranks=2)
    assert {entry["witness"] for entry in report["operators"]} == {*WITNESSES}
    assert report["layout"]["tensor"] == 2
    assert report["model"]["sha256"] != model_hash(MODEL)  # an update at a high rate has moved the weights


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no/such/folder"], "no/such/folder"),
        ([str(MODEL), "--layers", "9"], "--layers 9: the model has 4 layers; 1 … 4 are allowed"),
        ([str(MODEL), "--tokens", "1,x"], "--tokens: '1,x'; write numbers of tokens"),
        ([str(MODEL), "--witnesses", "vllm,me"], "--witnesses: 'me'; there are transformers, learner, exact, vllm"),
        ([str(MODEL), "--set", "seed=1"], "--set changes keys of a recipe"),
        (["recipes/tiny/grpo.yaml", "--dtype", "bf16"], "--set learner.dtype=bf16"),
        (["recipes/tiny/fp8.yaml"], "--set rollout.quantization.weights=null"),
        (["docs"], "neither a model's folder"),
    ],
)
def test_bad_arguments_are_named(arguments, told, capsys):
    from megatron_rl.__main__ import main

    assert main(["parity", *arguments]) == 2
    assert told in capsys.readouterr().err
