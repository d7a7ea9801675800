"""Both engines in every precision: bits of weights on both ends, fp32 parts of the engine, mismatch per dtype, and a
run that ends for gradients that stay NaN."""

import json
import math

import numpy as np
import pytest
import torch

from megatron_rl.__main__ import main
from megatron_rl.config.model_rules import confirm_contract, contract
from megatron_rl.errors import RunEnded
from megatron_rl.instruments.paper.mismatch_pairs import measure_pair
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.process_groups import shutdown
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.train import train
from megatron_rl.types import Prompt
from tests.e2e import hf_reference
from tests.e2e.hf_reference import Keeping
from tests.support.rounding import assert_rounded, standard_errors
from tests.support.tiny import MODEL, stored_rollouts, tiny_recipe
from tools.dev.make_tiny_checkpoint import build_tokenizer

pytestmark = pytest.mark.usefixtures("cheap_engines")

PROBED = ("model.embed_tokens.weight", "model.norm.weight")  # not packed for a kernel


def probe(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that vLLM stores as they came, and the type of a router's output."""
    probed = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if name in PROBED}
    gate = model.get_submodule("model.layers.0.mlp.gate")
    probed["logits"], _ = gate(torch.ones(1, gate.input_size, dtype=probed[PROBED[0]].dtype))
    return probed


@pytest.fixture(scope="module")
def fp16():
    """A learner in fp16 two updates on, and an engine that has its weights; head and routers in fp32 on both."""
    recipe = tiny_recipe(
        learner={"dtype": "fp16"}, rollout={"dtype": "fp16"}, precision={"fp32_head": True, "fp32_router": True}
    )
    learner = Learner(recipe)
    for step in range(2):
        learner.update(stored_rollouts(step))
    generator = VllmGenerator(recipe.rollout, MODEL, max_prompt_length=16, precision=recipe.precision)
    generator.refit(learner.export_weights(), learner.num_updates)
    yield recipe, learner, generator
    generator.close()
    shutdown()


def test_weights_reach_the_engine_bit_for_bit(fp16):
    _, learner, generator = fp16
    own = dict(learner.export_weights())
    stored = generator._llm.apply_model(probe)[0]
    for name in PROBED:
        assert stored[name].dtype == torch.float16
        assert torch.equal(stored[name].view(torch.int16), own[name].view(torch.int16)), name
    embedding = stored[PROBED[0]]
    assert (embedding != embedding.bfloat16().half()).float().mean() > 0.75  # bits that bf16 has not


def test_the_engines_router_is_fp32_after_an_update(fp16):
    _, learner, generator = fp16
    own = dict(learner.export_weights())
    logits = generator._llm.apply_model(probe)[0]["logits"]
    assert logits.dtype == torch.float32
    weight = own["model.layers.0.mlp.gate.weight"].double()
    # The input is ones: each logit is a sum over the width, of terms that cancel.
    assert_rounded(logits, weight.sum(1)[None], weight.size(1), float(weight.abs().sum(1).max()), torch.float32)


def test_the_engines_keep_the_contract(fp16):
    recipe, learner, generator = fp16
    stated = contract(recipe, learner.architecture)
    seen = generator.describe_precision()
    rows = {row.aspect: row for row in confirm_contract(stated, learner.describe_precision(), seen)}
    assert (rows["dtype"].rollout, rows["head"].rollout, rows["router"].rollout) == ("fp16", "fp32", "fp32")
    assert rows["attention"].rollout.startswith("vLLM ")
    with pytest.raises(ValueError, match="head: the rollout engine uses fp16, the recipe says fp32"):
        confirm_contract(stated, learner.describe_precision(), seen | {"head": "fp16"})


def compute_in(dtype: torch.dtype, module: torch.nn.Module) -> None:
    """``module`` on its input, both in ``dtype``, and so what comes out."""
    module.to(dtype)
    module.register_forward_pre_hook(lambda _, inputs: tuple(x.to(dtype) for x in inputs))


def typical(difference: np.ndarray) -> float:
    return float(np.median(np.abs(difference)))


def test_log_probs_agree_through_fp32_parts(fp16, tmp_path):
    """Of two engines, each as far from float64 as transformers' model in fp16 with head and routers in fp32.

    By the median over tokens, which the few whose router meets a tie do not move: for two independent errors of one
    size it is that of one times the root of two, and for the same one twice. fp16 rounds what is stored, and sums are
    in fp32, so that their order does not enlarge the error (as in `plain_training.relative_gradient_error`).
    """
    recipe, learner, generator = fp16
    tokenizer, keeping = build_tokenizer(), Keeping(generator)
    problems = ("^12345=", "^9=", "^604=", "^7171=")
    prompts = [Prompt(id=text, tokens=tokenizer.encode(text), answer="0") for text in problems]
    result = measure_pair(recipe, learner, keeping, prompts, learner.num_updates)
    learner.export_hf(tmp_path)
    double, half = (hf_reference.load(tmp_path, dtype) for dtype in (torch.float64, torch.float16))
    for module in (half.lm_head, *(layer.mlp.gate for layer in half.model.layers)):
        compute_in(torch.float32, module)

    def score(model: torch.nn.Module) -> np.ndarray:
        return np.concatenate(hf_reference.score(model, keeping.groups, Sampling(24))[0])

    right = score(double)
    bound = 2 * typical(score(half) - right)
    assert typical(result.mu - result.po) <= bound
    compute_in(torch.bfloat16, half.lm_head)
    assert typical(score(half) - right) > bound, "a head in bf16 would pass"


def test_fp16_is_at_least_five_times_closer_than_bf16(tmp_path):
    """Same prompts, seeds and response lengths; the policy's own responses.

    Five is a statement about precision and no rounding: three more bits of fp16 make eight in the mean, less where
    parts are in fp32 on both sides; fp32 has 13 bits more.
    """
    recipe = str(MODEL.parent / "grpo.yaml")
    pairs = "bf16/bf16,fp16/fp16,fp32/fp32"
    status = main(["mismatch", recipe, "--pairs", pairs, "--prompts", "128", "--out", str(tmp_path)])
    assert status == 0
    rows = {row["learner"]: row for row in json.loads((tmp_path / "mismatch.json").read_text())["pairs"]}
    # Nearly the same responses: no further apart than independent ones, whose spread is half their range at most.
    lengths, count = [row["mean_length"] for row in rows.values()], min(row["num_sequences"] for row in rows.values())
    assert max(lengths) - min(lengths) < math.sqrt(2) * standard_errors(24 / 2, count)
    for spread in ("sequence_log_ratio_std", "sequence_log_ratio_iqr_std"):
        assert rows["bf16"][spread] > 5 * rows["fp16"][spread], spread
        assert rows["fp16"][spread] > 5 * rows["fp32"][spread], spread
    assert rows["bf16"]["routes_differ_frac"] > rows["fp16"]["routes_differ_frac"] > 0
    assert (tmp_path / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    shutdown()


def test_gradients_that_stay_nan_end_the_run(tmp_path, monkeypatch):
    """Through the whole loop: generation goes on with the old weights, then the run saves and ends."""
    started = Learner.__init__

    def with_nan(self, *args, **kwargs):
        started(self, *args, **kwargs)
        self.module.decoder.layers[3].mlp.router.weight.register_hook(lambda gradient: gradient * float("nan"))

    monkeypatch.setattr(Learner, "__init__", with_nan)
    recipe = tiny_recipe(
        run_root=str(tmp_path),
        num_steps=6,
        learner={"dtype": "fp16", "max_consecutive_overflows": 3},
        rollout={"dtype": "fp16", "num_samples": 4},
        monitor={"plots": False, "tensorboard": False},
    )
    with pytest.raises(RunEnded, match=r"3 updates in a row .* model\.layers\.3\.mlp\.gate\.weight"):
        train(recipe)
    rows = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "precision/overflow_steps" in row]
    assert [row["precision/overflow_steps"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["precision/loss_scale"] for row in rows] == [16384.0, 8192.0, 4096.0]
    assert (recipe.run_dir / "checkpoints" / "step_00000003" / "trainer.json").is_file()
