"""Megatron-LM's own training loop on a CPU under the decay style length-decay.

    python tests/patches/programs/training_loop.py TREE LENGTHS OUT WARMUP MODE

``TREE``: a checkout with the series ``schedule`` and ``cpu``. ``LENGTHS``: JSON, the mean response length of each
iteration. Writes to ``OUT``, as JSON, the learning rate in force at each update, and what the loop's own scheduler
keeps at the end.

`megatron.training.pretrain` runs with ``--perform-rl-step`` on a GPT of one layer: arguments, optimizer, scheduler,
gradients, updates and logs are Megatron's. Replaced is what needs CUDA: the device that tensors are made on, questions
to it, streams, the warm-up of fused kernels, Triton's kernels; and the rollouts (`get_grpo_data_iterator`), which need
its inference engine: a batch of random tokens, whose mean length is read from the file. They leave it where Megatron's
own leave it, in `RLRuntimeState`. The helpers of data sets, in C++, are not compiled: there is no data set.
"""

import inspect
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

TREE, LENGTHS, OUT, WARMUP, MODE = sys.argv[1:]
BATCH, LENGTH, VOCABULARY = 4, 8, 32
LR, MIN_LR = "1e-3", "1e-4"

sys.path.insert(0, TREE)
lengths = json.loads(Path(LENGTHS).read_text())
sys.argv[1:] = f"""
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --max-position-embeddings {LENGTH}
    --micro-batch-size {BATCH} --global-batch-size {BATCH} --train-iters {len(lengths)} --eval-iters 0
    --eval-interval {10**6} --log-interval 100 --lr {LR} --min-lr {MIN_LR} --weight-decay 0.1
    --lr-warmup-iters {WARMUP} --lr-decay-style length-decay --lr-length-decay-mode {MODE} --lr-length-decay-factor 1.8
    --perform-rl-step --grpo-prompts-per-step {BATCH} --grpo-group-size 1 --grpo-iterations 1
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --transformer-impl local --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --distributed-backend gloo --use-cpu-initialization
    --rerun-mode disabled --make-vocab-size-divisible-by 1
    --no-check-for-nan-in-loss-and-grad --no-create-attention-mask-in-dataloader
""".split()
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", CUDA_DEVICE_MAX_CONNECTIONS="1")
os.environ.setdefault("MASTER_PORT", "0")

import torch  # noqa: E402
from on_cpu import replace_cuda  # noqa: E402


def main() -> None:
    replace_cuda()
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.rl import rl_utils
    from megatron.training import get_args, initialize, training
    from megatron.training.arguments import core_transformer_config_from_args

    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    training.set_jit_fusion_options = initialize._compile_dependencies = lambda **_: None
    schedulers, rates = [], []
    build = training.get_optimizer_param_scheduler

    def kept(*args: Any, **kwargs: Any) -> Any:
        schedulers.append(build(*args, **kwargs))
        return schedulers[-1]

    training.get_optimizer_param_scheduler = kept

    def rollouts(model: Any, inference_model: Any, optimizer: Any, iteration: int, *_: Any, **__: Any) -> Any:
        rl_utils.get_rl_runtime_state().mean_length = float(lengths[iteration])
        return RerunDataIterator(iter([torch.randint(VOCABULARY, (BATCH, LENGTH + 1))]))

    rl_utils.get_grpo_data_iterator = rollouts
    rl_utils.rl_inference_interface_shutdown = lambda: None

    def model_provider(pre_process: bool = True, post_process: bool = True, **_: Any) -> Any:
        config = core_transformer_config_from_args(get_args())
        return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process, post_process)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(batches: Any, model: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, Any]:
        (scheduler,) = schedulers
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        tokens = next(batches)
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_of

    keys = {
        "train_valid_test_dataset_provider": lambda numbers: (None, None, None),
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(training.pretrain).parameters:  # from 0.18 on
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        keys["cfg_container"] = pretrain_cfg_container_from_args(parse_and_validate_args())
    training.pretrain(**keys)
    results = {"rates": rates, "scheduler": schedulers[0].state_dict(), "groups": len(rates[0])}
    Path(OUT).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
