"""`doctor --measure`: what is multiplied, and the file that `plan --gpu` reads."""

from __future__ import annotations

import json

import pytest

from megatron_rl.__main__ import main
from megatron_rl.config import load_recipe
from megatron_rl.doctor import frame, rates
from megatron_rl.doctor.checks import Outcome, Setting, failed, not_run, passed
from megatron_rl.errors import InputError
from megatron_rl.instruments.plan import GPUS, find_gpu
from megatron_rl.instruments.plan.learner import active_parameters
from megatron_rl.model.architecture import shape_of
from tests.support.rounding import rounded
from tests.support.tiny import REPOSITORY

MOE = REPOSITORY / "recipes/router_replay/grpo-qwen3-30b-a3b-4n8g-tp4ep8-r3.yaml"
FIGURES = {"recipe": "r", "tokens": 8192, "dtype": "bf16", "products": 6.5e14, "attention": 4e14, "copies": 3.1e12}


def rates_of(device: str = "NVIDIA H200", memory_gib: float = 139.8) -> Outcome:
    return passed("", device=device, memory_gib=memory_gib, **FIGURES)


def links(**kinds: float) -> Outcome:
    table = {kind: {"kind": kind.replace("_", " "), "all_reduce": speed} for kind, speed in kinds.items()}
    return passed("", **{"GiB/s": table})


def test_products_are_those_of_a_layer_on_one_rank():
    """Qwen3-30B-A3B, TP4 EP8: a rank has a quarter of attention's columns and 16 experts, each with the tokens that 8
    ranks of a quarter of the rows sent it."""
    recipe = load_recipe(MOE)
    architecture = shape_of(recipe.model.path)[0]
    assert rates.layer_products(recipe.learner.parallel, architecture, 8192) == [
        (1, 8192, 2048, (4096 + 2 * 512) // 4),
        (1, 8192, 1024, 2048),
        (16, 8192 * 8 * 8 // (4 * 128), 2048, 2 * 768),
        (16, 1024, 768, 2048),
    ]
    single = load_recipe(MOE, ["learner.parallel={tensor: 1, expert: 1, expert_tensor: 1}"])
    counted = (
        rates.operations(rates.layer_products(single.learner.parallel, architecture, 128)) * architecture.num_layers
    )
    in_layers = active_parameters(architecture) - architecture.vocab_size * architecture.hidden_size
    assert counted == pytest.approx(2 * 128 * in_layers, rel=0.005)  # norms and routers are left out


def test_a_cpu_measures(monkeypatch):
    monkeypatch.setattr(rates, "OPERATIONS", {"cpu": 1e7})
    monkeypatch.setattr(rates, "COPIED", {"cpu": 1 << 20})
    outcome = rates.rates(Setting("cpu", 1, "", "recipes/tiny/grpo.yaml", ["learner.dtype=fp32"]))
    assert outcome.status == "pass"
    assert outcome.figures["dtype"] == "fp32"
    assert min(outcome.figures[name] for name in ("products", "attention", "copies", "memory_gib")) > 0
    assert outcome.figures["device"].startswith("a CPU with")


@pytest.mark.parametrize(
    ("device", "memory_gib", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA B200", 178.4, "b200-180"),
        ("NVIDIA GB200", 184.3, "gb200-186"),
        ("NVIDIA H20", 95.0, "h20-96"),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("a CPU with 1 thread", 16.0, None),
    ],
)
def test_a_device_has_the_data_sheet_of_its_name(device, memory_gib, name):
    assert rates.data_sheet(device, memory_gib) == name


def test_which_links_count():
    def figures(**kinds):
        return rates.link_figures(links(**kinds).figures["GiB/s"])

    assert figures(in_a_node=200.0, all=100.0) == {"nvlink_gb_s": 107.4}
    assert figures(in_a_node=200.0, between_nodes=40.0, all=100.0) == {"network_gb_s": 42.95, "nvlink_gb_s": 214.7}
    assert figures(all=0.0) == {}


@pytest.mark.parametrize("name", ["node.yaml", "node.json"])
def test_the_file_is_one_that_plan_reads_and_goes_on_with_more(tmp_path, name):
    path = tmp_path / name
    told = rates.write_measured(path, {"rates": rates_of(), "collectives": not_run("one rank")})
    assert "links were not measured" in told
    gpu = find_gpu(str(path))
    assert (gpu.name, gpu.nvlink, gpu.network) == ("node", GPUS["h200-141"].nvlink, GPUS["h200-141"].network)
    assert gpu.flops_16bit == rounded(6.5e14 / 0.7)
    assert gpu.bandwidth == rounded(3.1e12 / 0.9)
    assert gpu.attention_cost == rounded(6.5 / 4)
    rates.write_measured(path, {"collectives": links(in_a_node=200.0, between_nodes=40.0)})
    more = find_gpu(str(path))
    assert more.flops_16bit == gpu.flops_16bit
    assert more.network == rounded(42.95e9 / 0.7)


def test_an_unknown_device_says_whose_figures_count(tmp_path):
    path = tmp_path / "node.yaml"
    told = rates.write_measured(path, {"rates": rates_of("NVIDIA X1", 50.0), "collectives": links(all=10.0)})
    assert "no data sheet of NVIDIA X1: what was not measured is that of h100-80" in told
    assert find_gpu(str(path)).memory_gib == 50.0


def test_nothing_measured_writes_nothing(tmp_path):
    with pytest.raises(InputError, match="nothing was measured"):
        rates.write_measured(tmp_path / "a.yaml", {"rates": failed("no", "do"), "collectives": failed("no", "do")})
    (tmp_path / "b.yaml").write_text("name: run\nseed: 1\n")
    with pytest.raises(InputError, match=r"b\.yaml:\n  seed: unknown key"):
        rates.write_measured(tmp_path / "b.yaml", {"rates": rates_of(), "collectives": links(all=10.0)})
    assert not (tmp_path / "a.yaml").exists()


def test_the_command_measures_and_writes(tmp_path, monkeypatch, capsys):
    outcomes = {"rates": rates_of(), "collectives": links(all=10.0)}
    monkeypatch.setattr(frame, "_in_processes", lambda check, *rest: (outcomes[check.name], ""))
    path = tmp_path / "node.json"
    assert main(["doctor", "--measure", str(path), "--shared", str(tmp_path)]) == 0
    assert f"wrote {path}: megatron-rl plan RECIPE --gpu {path}" in capsys.readouterr().out
    assert json.loads(path.read_text())["measured"]["nvlink_gb_s"] == 10.74
    assert main(["doctor", "--measure", str(path), "--only", "patches"]) == 2
    assert "--measure runs its own checks" in capsys.readouterr().err
