"""What the learner does on a GPU before it has one (the device is replaced), and asks of Megatron."""

import importlib.util
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.config.learner import LearnerConfig, ParallelConfig, PrecisionConfig
from megatron_rl.config.model_rules import stage_layers
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.exact import invariant
from megatron_rl.layers import attention
from megatron_rl.learner import learner as learner_module
from megatron_rl.learner import model, optimizer, process_groups
from megatron_rl.learner.model import _uneven_stages, mark_expert_parameters, mark_whole_parameters
from megatron_rl.model.architecture import KNOWN_MODELS, architecture_from, read_architecture
from megatron_rl.monitor import run_directory
from megatron_rl.monitor.monitor import PhaseTimer, peak_memory_gib
from tests.support.tiny import MODEL, tiny_recipe

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Reached(Exception):
    """The call that a test is about."""


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """What `initialize` asks for, in order, on a node of eight GPUs."""
    made: list[tuple] = []

    def noted(name: str, wanted: str = ""):
        return lambda *args, **kwargs: made.append((name, args, kwargs.get(wanted, os.environ.get(wanted))))

    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "11")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", noted("device", "CUDA_DEVICE_MAX_CONNECTIONS"))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", noted("world", "timeout"))
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", noted("groups", "distributed_timeout_minutes"))
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", noted("seed"))
    yield made
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)


@pytest.mark.parametrize(("tensor", "connections"), [(1, None), (2, "1")])
def test_tensor_parallel_ranks_keep_the_order_of_launches(calls, tensor, connections):
    """Set before CUDA starts, whatever a site's files say."""
    assert process_groups.initialize(ParallelConfig(tensor=tensor), "cuda", 0) == torch.device("cuda", 3)
    assert calls[0] == ("device", (torch.device("cuda", 3),), connections)
    assert calls[1][:2] == ("world", ("cpu:gloo,cuda:nccl",))


def test_a_users_number_of_connections_stays(calls, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    process_groups.initialize(ParallelConfig(tensor=2), "cuda", 0)
    assert calls[0][2] == "8"


@pytest.mark.parametrize(("own", "wait", "minutes"), [(None, None, 30), (None, 7200.0, 120), (45, 7200.0, 45)])
def test_collectives_wait_as_long_as_a_rollout_may_take(calls, own, wait, minutes):
    process_groups.initialize(ParallelConfig(timeout_minutes=own), "cuda", 0, wait)
    assert [(name, given) for name, _, given in calls if name in ("world", "groups")] == [
        ("world", timedelta(minutes=minutes)),
        ("groups", minutes),
    ]


def test_the_learner_says_how_long_a_rollout_may_take(monkeypatch):
    def initialize(parallel: Any, device: str, seed: int, longest_wait_s: float) -> None:
        raise Reached(longest_wait_s)

    monkeypatch.setattr(learner_module, "initialize", initialize)
    with pytest.raises(Reached) as reached:
        learner_module.Learner(tiny_recipe(rollout={"deadline_s": 7200.0, "dtype": "fp32"}))
    assert reached.value.args[0] >= 7200.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_are_held_to_the_recipe_where_the_learner_has_fp32_ones(dtype, monkeypatch):
    held: list[tuple] = []
    monkeypatch.setattr(learner_module.products, "settle", lambda kinds, device: held.append((kinds, device)))
    monkeypatch.setattr(learner_module.products, "measured_products", lambda *_, **__: {"cuBLAS": "fp32"})
    monkeypatch.setattr(learner_module.products, "hold", lambda *given: held.append(given))
    recipe = tiny_recipe(learner={"dtype": dtype}, rollout={"dtype": "bf16"})
    learner = SimpleNamespace(recipe=recipe, device=CPU, exact=False)
    measured = {"cuBLAS": "fp32"} if dtype == "fp32" else {}
    assert learner_module.Learner._settle_products(learner) == measured
    assert held[1:] == ([("fp32", measured, "learner")] if measured else [])


def test_no_deadline_is_no_wait_to_wait_for():
    assert RolloutConfig(deadline_s=None).hang_limit_s is None


def test_exact_modes_kernels_are_loaded_before_the_first_pass_on_a_gpu(monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr(invariant, "kernel_ops", lambda: loaded.append("kernels"))
    assert isinstance(invariant.batch_invariant(torch.device("cpu")), invariant.BatchInvariant)
    assert not loaded
    assert isinstance(invariant.batch_invariant(GPU), invariant.BatchInvariant)
    assert loaded == ["kernels"]


def test_exact_mode_wants_triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"rollout\.engine: exact on cuda.*Triton is not installed.*or use runtime\.dev"
    ):
        model.build_model(read_architecture(MODEL), LearnerConfig(), GPU, exact=True)


def test_a_transformer_engine_that_megatron_cannot_import_is_refused(monkeypatch):
    """Else a run on GPUs would go on with Megatron's own layers, and nobody would know."""
    monkeypatch.setattr(model, "HAVE_TE", False)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=r"TransformerEngine is installed, but Megatron-Core cannot import it"):
        model.use_transformer_engine(GPU)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None)
    assert model.use_transformer_engine(GPU) is False
    monkeypatch.setattr(model, "HAVE_TE", True)
    assert model.use_transformer_engine(GPU) is True
    assert model.use_transformer_engine(torch.device("cpu")) is False


def test_attention_over_packed_rows_is_asked_for_before_the_model_is_built(monkeypatch):
    def refuse(config: Any) -> None:
        raise Reached(config)

    monkeypatch.setattr(model, "HAVE_TE", True)
    monkeypatch.setattr(model, "transformer_config", lambda *args: "its configuration")  # fused parts want TE itself
    monkeypatch.setattr(model, "refuse_unfused_attention", refuse)
    with pytest.raises(Reached, match="its configuration"):
        model.build_model(read_architecture(MODEL), LearnerConfig(), GPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unfused_attention_is_refused_with_the_gpus_capability(monkeypatch, dtype):
    monkeypatch.setattr(attention, "packed_attention", lambda config: "unfused")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    config = attention.TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2, params_dtype=dtype)
    if dtype == torch.float32:
        attention.refuse_unfused_attention(config)
        return
    with pytest.raises(InputError, match=r"compute capability 8\.0\).*install 'flash-attn"):
        attention.refuse_unfused_attention(config)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_gloo_twins_of_groups_where_nccl_is_the_backend(monkeypatch, device):
    asked: dict[str, Any] = {}

    class Wrapped:
        def __init__(self, *args: Any):
            self.config = args[0]

    def adam(settings: Any, models: Any, **kwargs: Any) -> Any:
        asked.update(kwargs)
        return type("Adam", (), {"scale_loss": None, "chained_optimizers": ()})()

    monkeypatch.setattr(optimizer, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", adam)
    module = torch.nn.Linear(1, 1)
    module.config = type("Config", (), {})()
    optimizer.with_optimizer(module, LearnerConfig(), torch.device(device), None)
    assert asked == {"use_gloo_process_groups": device == "cuda"}


def test_hardware_names_every_gpu(monkeypatch):
    properties = type("Properties", (), {"name": "NVIDIA H100 80GB HBM3", "total_memory": 81559 << 20})
    monkeypatch.setattr(run_directory, "default_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    hardware = run_directory.hardware()
    assert hardware["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}] * 2
    assert hardware["cuda"] == "13.0"
    assert hardware["nccl"] == "2.29.7"


def test_a_phase_ends_when_its_kernels_have(monkeypatch):
    """Time and memory of a phase are the GPU's, where it is in use."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)

    def clock() -> float:
        order.append("clock")
        return float(len(order))

    timer = PhaseTimer(clock)
    with timer.phase("generate"), timer.phase("reward"):
        pass
    assert order[-2:] == ["synchronized", "clock"]
    assert order.count("synchronized") == 1, "a phase without kernels waits for none"
    assert peak_memory_gib() == 3.0


class SecondRank:
    """A tensor-parallel group as its second rank sees it, where copies do not count."""

    def rank(self) -> int:
        return 1


class GroupedWeights(torch.nn.Module):
    """One discrete weight per expert, unmarked, as TransformerEngine's GroupedLinear has them."""

    def __init__(self, num_experts: int):
        super().__init__()
        for expert in range(num_experts):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.zeros(2, 2)))


def layer(**experts: torch.nn.Module) -> torch.nn.Module:
    mlp = torch.nn.Module()
    mlp.experts = torch.nn.ModuleDict(experts)
    mlp.router = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Module()
    model.mlp = mlp
    return model


@pytest.mark.parametrize("megatrons", [None, False, True])
def test_expert_weights_are_no_copies_whatever_their_layers_mark(megatrons):
    model = layer(linear_fc1=GroupedWeights(2), linear_fc2=GroupedWeights(2))
    for parameter in model.mlp.experts.parameters() if megatrons is not None else ():
        set_tensor_model_parallel_attributes(parameter, megatrons, 1, 2)
    mark_expert_parameters(model)
    for name, parameter in model.named_parameters():
        is_expert = "experts" in name
        assert param_is_not_tensor_parallel_duplicate(parameter, SecondRank()) == is_expert, name
        assert getattr(parameter, "allreduce", True) != is_expert, name
        assert not is_expert or not parameter.sequence_parallel


def test_projections_to_latent_vectors_count_once_whatever_their_layers_mark():
    model = torch.nn.ModuleDict(
        {n: torch.nn.Linear(2, 2, bias=False) for n in ("linear_kv_down_proj", "linear_q_proj")}
    )
    for parameter in model.parameters():
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    mark_whole_parameters(model)
    counts = {n: param_is_not_tensor_parallel_duplicate(p, SecondRank()) for n, p in model.named_parameters()}
    assert counts == {"linear_kv_down_proj.weight": False, "linear_q_proj.weight": True}


GPT_OSS = architecture_from(KNOWN_MODELS["gpt-oss-20b-bf16"])


def test_transformer_engines_layers_are_refused(monkeypatch):
    monkeypatch.setattr(model, "use_transformer_engine", lambda device, exact=False: True)
    with pytest.raises(InputError, match=r"gpt_oss has attention sinks.* uninstall transformer-engine"):
        model.build_model(GPT_OSS, LearnerConfig(), CPU)


def test_megatrons_fields_say_windows_sinks_biases_and_activation():
    config = model.transformer_config(GPT_OSS, LearnerConfig(), CPU, PrecisionConfig())
    assert (config.bf16, config.fp16, config.params_dtype) == (True, False, torch.bfloat16)
    assert config.window_size == (127, 0)
    assert config.window_attn_skip_freq == [1, 0] * 12
    assert (config.softmax_type, config.add_bias_linear, config.add_qkv_bias) == ("learnable", True, True)
    assert (config.activation_func_clamp_value, config.glu_linear_offset) == (7.0, 1.0)
    assert torch.equal(config.activation_func(torch.ones(1)), torch.sigmoid(torch.tensor([1.702])))
    assert (config.yarn_rotary_scaling_factor, config.yarn_correction_range_round_to_int) == (32.0, False)
    plain = architecture_from(KNOWN_MODELS["Qwen3-30B-A3B"])
    others = model.transformer_config(plain, LearnerConfig(), CPU, PrecisionConfig())
    assert (others.softmax_type, others.window_size, others.add_bias_linear) == ("vanilla", None, False)
    assert not hasattr(others, "yarn_rotary_scaling_factor")


@pytest.mark.parametrize(("layers", "stages"), [(94, 8), (61, 16), (5, 2), (94, 4), (48, 4), (7, 3)])
def test_megatron_builds_the_layers_of_each_stage(layers, stages, monkeypatch):
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_dtype="bf16",
        **_uneven_stages(layers, stages),
    )
    monkeypatch.setattr(
        transformer_block,
        "parallel_state",
        SimpleNamespace(get_virtual_pipeline_model_parallel_world_size=lambda: None),
    )
    built = [transformer_block.get_num_layers_to_build(config, pp_rank=rank) for rank in range(stages)]
    assert built == stage_layers(layers, stages)
