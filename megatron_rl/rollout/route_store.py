"""Recorded routes in vLLM from 0.31 on.

Up to 0.30 vLLM's scheduler keeps routes by slots of the cache. From 0.31 on a worker keeps them in a store, whose keys
are the hashes that name blocks of the prefix cache. Nothing else of an engine changes: a response still brings
``routed_experts``. What the store wants or lacks is here:

* It wants prefix caching, and so no short cut around it (`engine_arguments`).
* vLLM connects it to its second model runner alone, which wants Triton. On a CPU `RecordingRunner` connects it to the
  first one, whose routers hand over the same rows.
* vLLM turns the prefix cache off for latent attention on a CPU, whose kernel cannot begin with cached blocks. There
  blocks are named, and never looked up.
* It answers the first rank of an engine alone. Where engines join the learner's world, every rank has a scheduler that
  asks its own worker (`start_connector`).

The parts for CUDA were read from the wheel of 0.32.0 and were not run on a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np


def has_store() -> bool:
    """Whether the installed vLLM keeps routes in a store. Imports vLLM."""
    return find_spec("vllm.distributed.aux_output_connector") is not None


def install(on_cpu: bool) -> None:
    """Put this into vLLM, before an engine is configured in this process. Does nothing where vLLM has no store."""
    if not has_store():
        return
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    if AuxOutputWorkerConnector.__init__ is not start_connector:
        global _start_connector
        _start_connector, AuxOutputWorkerConnector.__init__ = AuxOutputWorkerConnector.__init__, start_connector
    if on_cpu:
        _connect_first_runner()


_start_connector: Any = None  # vLLM's


def start_connector(self: Any, *, vllm_config: Any, **rest: Any) -> None:
    """vLLM's `AuxOutputWorkerConnector.__init__`, for which each rank of an engine in the learner's world is a first
    one."""
    from vllm.distributed.aux_output_connector import worker

    get_tp_group = worker.get_tp_group
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    try:
        _start_connector(self, vllm_config=vllm_config, **rest)
    finally:
        worker.get_tp_group = get_tp_group


class _WithSecondRunner:
    """A `VllmConfig` that says that it has the second model runner."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _connect_first_runner() -> None:
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if cpu_worker.CPUModelRunner is not CPUModelRunner:
        return
    verify, look_up = VllmConfig._verify_aux_output_compatibility, KVCacheManager.prefix_cache_lookup_enabled

    class RecordingRunner(CPUModelRunner):
        """vLLM's first model runner on a CPU, with the store of routes around each of its steps."""

        routes: Any = None  # AuxOutputWorkerConnector

        def initialize_kv_cache(self, *positional: Any, **options: Any) -> None:
            super().initialize_kv_cache(*positional, **options)
            if self.vllm_config.aux_output_config.enabled:
                if self.use_async_scheduling:
                    raise RuntimeError("routes on a CPU: vLLM's first model runner was asked to schedule ahead")
                self.routes = get_aux_output_connector(self.model, self.vllm_config, self.kv_cache_config)

        def execute_model(self, scheduled: Any, *positional: Any, **options: Any) -> Any:
            if self.routes is not None:
                self.routes.begin_step(scheduled.aux_output_connector_metadata)
            return super().execute_model(scheduled, *positional, **options)

        def sample_tokens(self, *positional: Any, **options: Any) -> Any:
            state = self.execute_model_state
            output = super().sample_tokens(*positional, **options)
            if self.routes is not None and state is not None:
                computed = self.input_batch.num_computed_tokens_cpu
                output.aux_output_connector_output = self._rows(output, state.scheduler_output, computed)
            return output

        def _rows(self, output: Any, scheduled: Any, computed: np.ndarray) -> dict[str, Any] | None:
            """Request → its rows of this step, as the second runner hands them to the scheduler."""
            names = output.req_ids
            ends = np.cumsum([scheduled.num_scheduled_tokens[name] for name in names])
            batch = SimpleNamespace(
                req_ids=names,
                query_start_loc_np=np.concatenate([[0], ends]),
                num_computed_tokens_np=computed[: len(names)].copy(),
            )
            step = self.routes.prepare_output(batch)
            if step is None:  # another rank answers the scheduler
                return None
            num_sampled = np.asarray([len(tokens) for tokens in output.sampled_token_ids])
            step.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            return step.process_output()

    def check(config: VllmConfig) -> None:
        if config.aux_output_config.enabled and config.model_config.use_mla:
            config.cache_config.enable_prefix_caching = True  # for the names of blocks: see `looks_up`
        verify(_WithSecondRunner(config))

    def looks_up(manager: KVCacheManager, request: Any) -> bool:
        """Whether a request may begin with cached blocks: not those of latent attention, whose kernel has no way to."""
        specs = (group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups)
        return look_up(manager, request) and not any(isinstance(spec, MLAAttentionSpec) for spec in specs)

    cpu_worker.CPUModelRunner = RecordingRunner
    VllmConfig._verify_aux_output_compatibility = check
    KVCacheManager.prefix_cache_lookup_enabled = looks_up
