"""What vLLM makes of our arguments on CUDA: python -m tests.unit.rollout.programs.vllm_on_cuda < cases > findings

A case: place ("learner" | "server"), gpu, recipe (a file), ranks, set (keys of the recipe), changes (arguments that are
set or replaced), nvcc (whether one is on PATH; FlashInfer is installed), left alone (vLLM chooses its sums itself). Our
own code builds the arguments and hands them to vLLM, which is stopped where it would start an engine. JSON both ways.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import cuda_platform

FOUND: Any = None  # vLLM's own question for FlashInfer


class Captured(BaseException):
    """Instead of an engine: what it would have been started with. No `Exception`: our code must not catch it."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config


def model_folder(root: Path, name: str) -> Path:
    """A checkpoint's folder as the hub has it, without weights."""
    from megatron_rl.model.architecture import KNOWN_MODELS
    from megatron_rl.model.families import FAMILIES

    folder, shape = root / name, KNOWN_MODELS[name]
    folder.mkdir(exist_ok=True)
    architectures = [FAMILIES[shape["model_type"]].hf_class]
    (folder / "config.json").write_text(
        json.dumps({"architectures": architectures, "torch_dtype": "bfloat16", **shape})
    )
    return folder


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """This process as the first of ``ranks``, whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_learner(recipe: Any, model: Path, ranks: int) -> Any:
    """The configuration of the engine in a rank of the learner."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from megatron_rl.rollout.vllm_engine import VllmGenerator

    def stop(engine_args: Any, usage_context: Any, **_: Any) -> None:
        raise Captured(engine_args.create_engine_config(usage_context))

    engine = VllmGenerator.__new__(VllmGenerator)
    engine._config, engine._precision, engine._device = recipe.rollout, recipe.precision, "cuda"
    engine._sleeps = True
    engine._rank, engine._max_prompt_length = 0, recipe.data.prompt.max_length
    engine._record_routes = recipe.routing.needs_engine_routes
    with world(ranks), mock.patch.object(LLMEngine, "from_engine_args", stop):
        try:
            engine._start(model)
        except Captured as captured:
            return captured.config
    raise AssertionError("vLLM was not reached")


def of_server(recipe: Any, model: Path, ranks: int) -> Any:
    """The configuration of the engine in `megatron-rl serve`."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from megatron_rl.rollout.servers import server

    def stop(config: Any, **_: Any) -> None:
        raise Captured(config)

    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    with server._listen("127.0.0.1", 0) as listener, mock.patch.object(AsyncLLM, "from_vllm_config", stop):
        try:
            asyncio.run(server._serve(recipe, "cuda", "a", "", listener))
        except Captured as captured:
            return captured.config
    raise AssertionError("vLLM was not reached")


def attention(config: Any) -> str:
    """The backend that vLLM takes for this model's layers."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        return get_attn_backend(model.get_head_size(), model.dtype, config.cache_config.cache_dtype).get_name()


def experts(config: Any) -> str:
    """The backend that vLLM takes for experts of this model that are not quantized, with FlashInfer installed."""
    import torch
    from vllm.model_executor.layers.fused_moe import config as moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe, trtllm_bf16_moe
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

    shape = config.model_config.hf_config
    asked = moe.FusedMoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.num_experts_per_tok,
        hidden_dim=shape.hidden_size,
        intermediate_size=shape.moe_intermediate_size,
        num_local_experts=shape.num_experts,
        num_logical_experts=shape.num_experts,
        activation=MoEActivation.SILU,
        device=torch.device("cpu"),
        routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=config.model_config.dtype,
        moe_backend=config.kernel_config.moe_backend,
    )
    with (
        mock.patch.object(trtllm_bf16_moe, "has_flashinfer_trtllm_fused_moe", return_value=True),
        mock.patch.object(flashinfer_cutlass_moe, "has_flashinfer_cutlass_fused_moe", return_value=True),
    ):
        return select_unquantized_moe_backend(asked)[0].name


def quantization(config: Any) -> list[Any] | None:
    """The name of what vLLM quantizes to while it loads, and the layers that it leaves out."""
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    if config.quant_config is None:
        return None
    assert isinstance(config.quant_config, OnlineQuantizationConfig), config.quant_config
    return [config.model_config.quantization, config.quant_config.ignored_layers]


def facts(config: Any) -> dict[str, Any]:
    """What a run relies on, as vLLM has it in the end."""
    from vllm.v1.executor import Executor

    model, parallel = config.model_config, config.parallel_config
    return {
        "device": config.device_config.device_type,
        "second runner": config.use_v2_model_runner,
        "async scheduling": config.scheduler_config.async_scheduling,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "eager": model.enforce_eager,
        "sleep mode": model.enable_sleep_mode,
        "routes": getattr(config, "aux_output_config", model).enable_return_routed_experts,
        "logprobs": model.logprobs_mode,
        "dtype": str(model.dtype).removeprefix("torch."),
        "length": model.max_model_len,
        "seed": model.seed,
        "architecture": model.architecture,
        "tensor parallel": parallel.tensor_parallel_size,
        "worker": parallel.worker_cls,
        "executor": Executor.get_class(config).__name__,
        "sequences": config.scheduler_config.max_num_seqs,
        "utilization": config.cache_config.gpu_memory_utilization,
        "quantization": quantization(config),
        "cache type": config.cache_config.cache_dtype,
        "cache bytes": config.cache_config.kv_cache_memory_bytes,
        "prefix caching": config.cache_config.enable_prefix_caching,
        "weight transfer": config.weight_transfer_config.backend,
        "attention": attention(config),
        "asked attention": backend.name if (backend := config.attention_config.backend) else None,
        "experts": experts(config) if getattr(model.hf_config, "num_experts", 0) else None,
    }


def everything(config: Any, prefix: str = "") -> dict[str, str]:
    """Each field of vLLM's configuration and of those in it, and vLLM's variables as it reads them."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name, None), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= everything(value, f"{name}.")
        else:
            found[name] = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return found


def variables() -> dict[str, str]:
    from vllm import envs

    return {name: repr(read()) for name, read in envs.environment_variables.items()}


@contextmanager
def node(nvcc: bool, left_alone: bool) -> Iterator[None]:
    """A node with FlashInfer, whose PATH has an nvcc or none. ``left_alone``: vLLM's own choice of sums."""
    from vllm.utils import flashinfer

    from megatron_rl.rollout import engine_arguments, process_state

    for module in list(sys.modules.values()):  # what the case before replaced
        if getattr(module, "__name__", "").startswith("vllm.") and "has_flashinfer" in vars(module):
            module.has_flashinfer = FOUND
    FOUND.cache_clear()
    own = [mock.patch.object(engine_arguments, "sums_on_cuda", return_value={})] if left_alone else []
    own += [mock.patch.object(process_state, "choose_kernels")] if left_alone else []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if nvcc:
            compiler = Path(folder, "nvcc")
            compiler.write_text("#!/bin/sh\n")
            compiler.chmod(0o755)
        stack.enter_context(mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}" if nvcc else "/none"))
        spec = importlib.machinery.ModuleSpec("flashinfer", None)
        found = importlib.util.find_spec
        finder = mock.Mock(wraps=importlib.util, find_spec=lambda name: spec if name == "flashinfer" else found(name))
        stack.enter_context(mock.patch.object(flashinfer, "importlib", mock.Mock(util=finder)))
        for one in own:
            stack.enter_context(one)
        yield


def shadowed(config: Any) -> list[str]:
    """Names of our worker extension that vLLM's worker has as well; vLLM refuses to start with any."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    parallel = config.parallel_config
    ours, theirs = (resolve_obj_by_qualname(name) for name in (parallel.worker_extension_cls, parallel.worker_cls))
    return [name for name in dir(ours) if not name.startswith("__") and hasattr(theirs, name)]


def find(case: dict[str, Any], root: Path) -> dict[str, Any]:
    from megatron_rl.config import load_recipe
    from megatron_rl.rollout import engine_arguments

    cuda_platform.become(case["gpu"])
    recipe = load_recipe(Path(case["recipe"]), case.get("set", ()))
    build = engine_arguments.engine_arguments

    def changed(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return build(*args, **kwargs) | case.get("changes", {})

    place = of_server if case["place"] == "server" else of_learner
    with (
        mock.patch.object(engine_arguments, "engine_arguments", changed),
        mock.patch("megatron_rl.rollout.vllm_engine.engine_arguments", changed),
    ):
        try:
            with node(case.get("nvcc", False), case.get("left alone", False)):
                config = place(recipe, model_folder(root, recipe.model.path.name), case["ranks"])
                if case.get("everything"):
                    return {"everything": everything(config) | variables()}
                return facts(config) | {"shadowed": shadowed(config)}
        except Exception as error:  # noqa: BLE001 - it is what the case finds
            return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")  # vLLM prints
    os.dup2(2, 1)
    cuda_platform.install("h100-80")
    from vllm.utils import flashinfer

    global FOUND
    FOUND = flashinfer.has_flashinfer
    with tempfile.TemporaryDirectory() as root:
        json.dump([find(case, Path(root)) for case in json.load(sys.stdin)], answer)
    answer.close()


if __name__ == "__main__":
    main()
