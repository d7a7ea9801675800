"""`--gpu FILE`: own figures, measured ones, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan import GPUS, find_gpu, hardware, make_plan, make_workload, render
from megatron_rl.instruments.plan.timing import flops_forward, step_time
from megatron_rl.model.architecture import shape_of
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY

RECIPE = REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
WHOLE = """
memory_gib: 79.1
tflops: {bf16: 989, fp32: 67, tf32: 494.5}
memory_tb_s: 3.35
nvlink_gb_s: 450
network_gb_s: 50
host_link_gb_s: 64
host_memory_gib: 2048
"""


def written(tmp_path: Path, text: str, name: str = "ours.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def work(gpu):
    recipe = load_recipe(RECIPE)
    return make_workload(recipe, shape_of(recipe.model.path)[0], gpu)


def seconds(gpu):
    w = work(gpu)
    return step_time(w, make_plan(w).memory.engine)


def test_a_file_with_every_figure_of_a_named_gpu_is_that_gpu(tmp_path):
    gpu = find_gpu(str(written(tmp_path, WHOLE)))
    assert gpu == replace(GPUS["h100-80"], name="ours")
    as_json = {"base": "h200-141", "name": "other", "memory_gib": 100}
    gpu = find_gpu(str(written(tmp_path, json.dumps(as_json), "a.json")))
    assert gpu == replace(GPUS["h200-141"], name="other", memory_gib=100.0)


@pytest.fixture
def fast_host(monkeypatch):
    """Passes that never wait for the host."""
    monkeypatch.setattr(hardware, "LAYER_HOST_S", dict.fromkeys(hardware.LAYER_HOST_S, 0.0))


def test_measured_figures_replace_the_assumed_ones(tmp_path, fast_host):
    """Each measurement that is what the plan assumes anyway changes nothing; a slower one changes its own part."""
    h100 = GPUS["h100-80"]
    usual = {
        "tflops": {"bf16": h100.flops_16bit * hardware.PRODUCT_SHARE / 1e12},
        "memory_tb_s": h100.bandwidth * hardware.COPY_SHARE / 1e12,
        "nvlink_gb_s": h100.nvlink * hardware.LINK / 1e9,
        "network_gb_s": h100.network * hardware.LINK / 1e9,
        "attention_tflops": h100.flops_16bit * hardware.PRODUCT_SHARE / 1e12,
    }

    def measured(**changes):
        text = json.dumps({"base": "h100-80", "name": "h100-80", "measured": usual | changes})
        return find_gpu(str(written(tmp_path, text, "m.json")))

    usual_gpu = replace(measured(), measured=())
    for field in ("flops_16bit", "bandwidth", "nvlink", "network", "attention_cost"):
        assert getattr(usual_gpu, field) == rounded(getattr(h100, field))
    assert len(measured().measured) == len(usual)
    # Half the rate of products and attention together: passes without communication take twice the time.
    half, before = measured(tflops={"bf16": 346.15}, attention_tflops=346.15), seconds(h100)
    after = seconds(half)
    assert after.update > 1.2 * before.update
    slow = seconds(measured(nvlink_gb_s=usual["nvlink_gb_s"] / 2))
    assert slow.update > before.update
    assert seconds(measured(memory_tb_s=usual["memory_tb_s"] / 2)).generate > 1.2 * before.generate
    assert seconds(measured(network_gb_s=1.0)).optimizer > before.optimizer


def test_measured_attention_makes_its_operations_dearer():
    a = work(GPUS["h100-80"]).architecture
    products, both = flops_forward(a, 1.0, 0.0), flops_forward(a, 1.0, 4096.0)
    assert flops_forward(a, 1.0, 4096.0, 3.0) == rounded(products + 3 * (both - products))


def test_a_plan_says_what_was_measured(tmp_path, capsys):
    path = written(tmp_path, "base: b200\n".replace("b200", "b200-180") + "measured: {tflops: {bf16: 1400}}\n")
    assert main(["plan", str(RECIPE), "--gpu", str(path), "--detail"]) == 0
    printed = capsys.readouterr().out
    assert "measured on a node (ours): products in bf16 1400 TFLOP/s (counted as 70% of the peak)" in printed
    assert "2000 TFLOP/s" in printed
    assert "measured on a node" not in render(make_plan(work(GPUS["b200-180"])), detail=True)


def test_nvlink_joins_a_rack_of_gb200(fast_host):
    recipe = load_recipe(RECIPE)
    shape, gpu = shape_of(recipe.model.path)[0], GPUS["gb200-186"]
    rack = make_workload(recipe, shape, gpu, 8, 4)
    trays = make_workload(recipe, shape, replace(gpu, nvlink_gpus=0), 8, 4)
    engine = make_plan(rack).memory.engine
    assert step_time(rack, engine).update < step_time(trays, engine).update
    assert step_time(rack, engine).refit < step_time(trays, engine).refit


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base: h100\n", "base: found 'h100'; allowed: 'a100-40', 'a100-80'"),
        ("base: h100-80\nmemory: 80\n", "memory: unknown key; did you mean 'memory_gib'? allowed: tflops, memory_tb_s"),
        ("base: h100-80\nmemory_gib: much\n", "memory_gib: found 'much'; input should be a valid number"),
        ("base: h100-80\nmemory_gib: .nan\n", "memory_gib: found nan; input should be a finite number"),
        ("base: h100-80\ntflops: {fp16: 9}\n", "tflops.fp16: unknown key; did you mean 'bf16'?"),
        ("base: h100-80\nmeasured: {tflops: {bf16: 0}}\n", "measured.tflops.bf16: found 0; input should be greater"),
        ("base: h100-80\nmeasured: {attention_tflops: 9}\n", "measured.tflops has 0 types; give one"),
        (WHOLE.replace("network_gb_s: 50", ""), "network_gb_s: missing; give them, or `base: NAME`"),
        (WHOLE.replace("fp32: 67, ", ""), "tflops: {bf16, tf32, fp32}: missing"),
        ("- 1\n", "expected a mapping of keys"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, told):
    path = written(tmp_path, text)
    with pytest.raises(InputError) as error:
        find_gpu(str(path))
    assert str(path) in str(error.value)
    assert told in str(error.value)
