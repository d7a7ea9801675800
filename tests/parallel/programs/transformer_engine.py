"""The programs of the other tests over TransformerEngine's layers: importing this module installs them.

It is for a helper process of its own, that has not imported Megatron.
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any
from unittest import mock

from megatron_rl.patching.series import Series
from tests.support import te

te.install()

Job = tuple[str, dict[str, Any]]


def run_jobs(jobs: dict[str, Job]) -> dict[str, Any]:
    """name → (program.function, kwargs); what each returned. A job that is named "upstream …" runs without our marks
    of expert weights and with a TransformerEngine that has patches/transformer-engine-upstream, "ring …" with fused
    attention, which context parallelism needs."""
    from tests.support.layouts import leave_layout

    results = {}
    for name, (function, kwargs) in jobs.items():
        module, _, attribute = function.rpartition(".")
        program = importlib.import_module(f"tests.parallel.programs.{module or 'transformer_engine'}")
        with ExitStack() as changes:
            if name.startswith("upstream"):
                changes.enter_context(_unmarked())
                changes.enter_context(_patched_upstream())
            if name.startswith("ring"):
                changes.enter_context(ring_on_a_cpu())
            results[name] = getattr(program, attribute)(**kwargs)
        leave_layout()
    return results


def _unmarked() -> AbstractContextManager:
    """Expert weights as TransformerEngine and Megatron leave them."""

    def only_their_optimizer(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False

    return mock.patch("megatron_rl.learner.model.mark_expert_parameters", only_their_optimizer)


def _patched_upstream() -> AbstractContextManager:
    """`GroupedLinear.reset_parameters` as the patch that is offered to TransformerEngine has it."""
    from transformer_engine.pytorch.module import grouped_linear

    series = Series.read(te.REPOSITORY / "patches" / "transformer-engine-upstream")
    (path,) = series.paths
    source = series.patched(series.load(te.FOLDER))[path]
    (layer,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "GroupedLinear")
    layer.body = [n for n in layer.body if isinstance(n, ast.FunctionDef) and n.name == "reset_parameters"]
    layer.bases, layer.decorator_list = [], []
    results: dict[str, Any] = {}
    exec(compile(ast.Module([layer], []), path, "exec"), results)
    ours, theirs = results["GroupedLinear"].reset_parameters, grouped_linear.GroupedLinear.reset_parameters
    # super() of the installed class: its cell goes with the patched code.
    patched = FunctionType(ours.__code__, vars(grouped_linear), None, ours.__defaults__, theirs.__closure__)
    return mock.patch.object(grouped_linear.GroupedLinear, "reset_parameters", patched)


@contextmanager
def ring_on_a_cpu() -> Iterator[None]:
    """Fused attention for packed rows, of a GPU of compute capability 9.0 whose streams do nothing."""
    import torch
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel, utils

    def communicate(*args: Any) -> list[_Once]:
        return [_Once(request) for request in exchange(*args)]

    fused = extension.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    exchange = context_parallel.flash_attn_p2p_communicate
    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(context_parallel, "flash_attn_p2p_communicate", communicate))
        for module in (context_parallel, utils):
            changes.enter_context(mock.patch.object(module, "get_device_compute_capability", return_value=(9, 0)))
        changes.enter_context(mock.patch.object(extension, "get_fused_attn_backend", return_value=(fused, "")))
        streams = {"Stream": _Stream, "Event": _Stream, "current_stream": _Stream, "stream": lambda _: nullcontext()}
        for name, value in streams.items():
            changes.enter_context(mock.patch.object(torch.cuda, name, value))
        changes.enter_context(torch.compiler.set_stance("force_eager"))  # there is no GPU to compile for
        yield


class _Once:
    """A request that may be waited for again, as NCCL's; Gloo's would wait for another message."""

    def __init__(self, request: Any):
        self._request = request

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
        self._request = None


class _Stream:
    """Everything is in order on a CPU."""

    def wait_event(self, _: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def record_event(self, _: Any) -> None: ...


def thd_choices() -> dict[str, str]:
    """What the learner says to attention over packed rows on each architecture, with and without flash-attn.

    The extension answers as TransformerEngine's own does for packed rows: cuDNN has them from compute capability 9.0.
    """
    import torch
    import transformer_engine_torch as extension
    from megatron.core.transformer.transformer_config import TransformerConfig
    from packaging.version import Version
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    from megatron_rl.errors import InputError
    from megatron_rl.layers.attention import packed_attention, refuse_unfused_attention

    fused = extension.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    results = {}
    for capability in ((8, 0), (9, 0)):
        for has_flash in (False, True):
            for dtype in (torch.bfloat16, torch.float32):
                config = TransformerConfig(
                    num_layers=1, hidden_size=256, num_attention_heads=4, num_query_groups=2, params_dtype=dtype
                )
                backend = fused if capability >= (9, 0) else extension.NVTE_Fused_Attn_Backend.NVTE_No_Backend
                with (
                    mock.patch.object(torch.cuda, "get_device_capability", lambda *_, c=capability: c),
                    mock.patch.object(utils, "get_device_compute_capability", lambda c=capability: c),
                    mock.patch.object(extension, "get_fused_attn_backend", lambda *_, b=backend, **__: (b, "")),
                    mock.patch.object(utils.FlashAttentionUtils, "is_installed", has_flash),
                    mock.patch.object(utils.FlashAttentionUtils, "version", Version("2.8.3" if has_flash else "0")),
                ):
                    name = f"sm{capability[0]}{capability[1]}{' flash' * has_flash}, {str(dtype)[6:]}"
                    try:
                        results[name] = packed_attention(config)
                        refuse_unfused_attention(config)
                    except InputError as error:
                        results[name] = f"refused: {error}"
    return results
