"""Checks of `megatron_rl.doctor` on learners and engines that are whole, or broken in one way."""

from megatron_rl.doctor import engine, frame, learner
from megatron_rl.doctor.checks import Outcome, Setting


def healthy(name: str, setting: Setting) -> Outcome:
    """A check on what nothing was done to."""
    return frame.attempt(name, setting)[0]


def unmarked_experts(setting: Setting) -> Outcome:
    """Expert weights as TransformerEngine 2.20 leaves them: nothing marks them."""
    from megatron_rl.learner import model

    def unmark(module) -> None:
        for name, parameter in module.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False
                for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                    if hasattr(parameter, mark):
                        delattr(parameter, mark)

    model.mark_expert_parameters = unmark
    return learner.experts(setting)


def lost_keys(setting: Setting) -> Outcome:
    """Ranks that share a sequence lose the gradients of their keys and values."""
    from megatron_rl.layers.attention import ContextKeys

    own = ContextKeys.gather
    ContextKeys.gather = lambda self, key, value: own(self, key, value).detach()
    return learner.context(setting)


def lost_moments(setting: Setting) -> Outcome:
    """A load that brings the weights back and leaves Adam's second moments at half."""
    import torch

    from megatron_rl.learner.learner import Learner

    load = Learner.load

    def half(self, *arguments, **options):
        state = load(self, *arguments, **options)
        self.was_loaded = True
        return state

    def update(self, batch, complete=None):
        if getattr(self, "was_loaded", False):
            with torch.no_grad():
                for optimizer in self.optimizer.chained_optimizers:
                    for moments in optimizer.optimizer.state.values():
                        moments["exp_avg_sq"].mul_(0.5)
        self.was_loaded = False
        return own_update(self, batch, complete)

    own_update, Learner.load, Learner.update = Learner.update, half, update
    return learner.checkpoint(setting)


def other_logprobs(setting: Setting) -> Outcome:
    """An engine that says of each token what it said of the one before; one pair of types is enough to see it."""
    import numpy as np

    from megatron_rl.rollout import vllm_engine

    own = vllm_engine.sampled_tokens

    def shifted(completion, place):
        tokens, logprobs = own(completion, place)
        return tokens, np.roll(logprobs, 1).tolist()

    vllm_engine.sampled_tokens = shifted
    engine.PAIRS = {"bf16/bf16": "bf16"}
    return engine.mismatch(setting)


def stale_engine(setting: Setting) -> Outcome:
    """An engine that takes updates after the first trial and keeps its weights."""
    from megatron_rl.rollout.vllm_engine import VllmGenerator

    own = VllmGenerator.refit

    def keep(self, weights, policy_version):
        if policy_version == 0:
            return own(self, weights, policy_version)
        for _ in weights:
            pass
        self._policy_version = policy_version
        self._stats["perf/refit_engine_s"] = 0.0

    VllmGenerator.refit = keep
    return engine.refit(setting)


def corrupted_update(setting: Setting) -> Outcome:
    """An update that changes one weight of an expert: of dense layers vLLM shows no weights on a CPU, it packs them."""
    from megatron_rl.rollout import vllm_engine

    own = vllm_engine.checked

    def spoil(weights, shapes):
        for name, tensor in own(weights, shapes):
            if name.endswith("layers.0.mlp.experts.0.up_proj.weight"):
                tensor = tensor.clone()
                tensor.view(-1)[0] += 1
            yield name, tensor

    vllm_engine.checked = spoil
    return frame.attempt("refit", setting)[0]
