"""The other program of `tools.bench.trl`: TRL's GRPOTrainer with vLLM in its process, held at every step.

    PYTHON_WITH_TRL -m tools.bench.lib.grpo_trl \\
        MODEL PROBLEMS.jsonl LONGEST PROMPTS GROUP LR {default,plain,eager}

Same model, prompts, batch, sampling, optimizer and precision as ours. Two things differ from a plain use of TRL: its
weight sync is patched, without which it fails on vLLM's CPU build (linear layers are packed after loading, experts
once only), and response lengths are imposed request by request where the benchmark asks for it. ``plain``: without
TRL's importance-sampling correction, and so without its extra pass for old log-probs. ``eager``: with it, and vLLM not
compiled, as ours is by default on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl.extras.profiling as profiling
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from megatron_rl.rewards.rewarder import modsum_reward
from tools.bench.lib.gate import Gate
from tools.bench.lib.lengths import response_lengths

PHASES: dict[str, float] = {}
FACTS: dict[str, Any] = {}
GIVEN: dict[str, str] = {}


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as in the checkpoint: transformers keeps the experts of a layer in one tensor."""
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            stem = name[: -len("gate_up_proj")]
            for expert, both in enumerate(parameter.data):
                gate, up = both.chunk(2, 0)
                yield f"{stem}{expert}.gate_proj.weight", gate
                yield f"{stem}{expert}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(parameter.data):
                yield f"{name[: -len('down_proj')]}{expert}.down_proj.weight", down
        else:
            yield name, parameter.data


def sync_weights(self: VLLMGeneration) -> None:
    runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights(weights_iterator=checkpoint_tensors(self.model))
    for module in runner.model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
    self.llm.reset_prefix_cache()


def time_phases() -> None:
    """Every timed part of TRL goes through this context manager."""
    import time

    def enter(self: Any) -> Any:
        self._start_time = time.process_time()
        return self

    def leave(self: Any, *_: Any) -> bool:
        name = self.name.split("Trainer.")[-1]
        PHASES[name] = PHASES.get(name, 0.0) + time.process_time() - self._start_time
        return False

    profiling.ProfilingContext.__enter__, profiling.ProfilingContext.__exit__ = enter, leave


def run_eagerly() -> None:
    import trl.generation.vllm_generation as generation

    generation.LLM = partial(generation.LLM, enforce_eager=True)


def impose_lengths(longest: int) -> None:
    from vllm import LLM

    generate, calls = LLM.generate, [0]

    def with_lengths(self: Any, prompts: list, sampling_params: Any, **options: Any) -> Any:
        kind = GIVEN["lengths"]
        if kind == "free":
            return generate(self, prompts, sampling_params=sampling_params, **options)
        lengths = response_lengths(kind, len(prompts), longest, calls[0])
        calls[0] += 1
        params = [sampling_params.clone() for _ in prompts]
        for p, length in zip(params, lengths, strict=True):
            p.max_tokens, p.ignore_eos, p.stop_token_ids = length, True, []
        return generate(self, prompts, sampling_params=params, **options)

    LLM.generate = with_lengths


class Hold(TrainerCallback):
    def __init__(self) -> None:
        self.gate = Gate()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        GIVEN["lengths"] = self.gate.wait(**FACTS)
        if GIVEN["lengths"] is None:
            self.gate.leave()
        PHASES.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        FACTS["phases"] = dict(PHASES)

    def on_log(self, *_: Any, logs: dict | None = None, **__: Any) -> None:
        if logs and "reward" in logs:
            FACTS.update(reward=logs["reward"], logprob_difference=logs.get("sampling/sampling_logp_difference/mean"))


def main() -> None:
    model_path, problems, longest, num_prompts, group, lr, variant = sys.argv[1:]
    rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["problem"], "answer": row["answer"]} for row in rows])

    def exact(prompts: list, completions: list, answer: list, **_: Any) -> list[float]:
        texts = [completion.split("<eos>")[0] for completion in completions]
        FACTS["tokens"] = None
        return [modsum_reward(text, gold) for text, gold in zip(texts, answer, strict=True)]

    VLLMGeneration.sync_weights = sync_weights
    time_phases()
    impose_lengths(int(longest))
    if variant == "eager":
        run_eagerly()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    batch = int(num_prompts) * int(group)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_generations=int(group),
        max_completion_length=int(longest),
        temperature=1.0,
        learning_rate=float(lr),
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=100_000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=16 + int(longest),
        vllm_importance_sampling_correction=variant != "plain",
        vllm_importance_sampling_mode="token_truncate",
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation("grouped_mm")  # the fastest of its implementations on a CPU
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        callbacks=[Hold()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
