"""A second model, which gives the log-prob of each token that was sampled: keys `reference`, `scoring`, `teacher`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from megatron_rl.config.base import AnyPath, Dtype, LookedUp, OffCount, Section
from megatron_rl.config.learner import PrecisionConfig
from megatron_rl.config.rollout import MOST_KEPT


class SecondModelConfig(Section):
    path: Annotated[AnyPath | None, LookedUp(hub="model")] = None
    """Its folder, as `model.path`, with the same vocabulary. null: that folder."""


class ReferenceConfig(SecondModelConfig):
    """A policy that is not trained, on the learner's ranks: `reference/*` measures how far the trained one is from it,
    and `objective.kl_loss` and `objective.kl_in_reward` hold it back. With learner.lora and no path it is the policy
    without its adapters, else a second copy of weights, which lies in host memory between its passes."""


class ScoringConfig(Section):
    """The policy itself in another precision, on the learner's ranks: `scoring/*` says how much of log po - log mu is
    the learner's rounding. Its weights are those of the learner's passes. Nothing is learned from it."""

    dtype: Dtype = "fp32"
    """Type of its weights and activations; the dtype's name alone stands for the section."""
    fp32_head: bool | None = None
    """Logits in fp32. null: as precision.fp32_head."""
    fp32_router: bool | None = None
    """The router in fp32. null: as precision.fp32_router."""
    every: PositiveInt = 1
    """Steps from one such pass to the next."""

    def of(self, learners: PrecisionConfig) -> PrecisionConfig:
        """Its own parts in fp32, where those of the learner are ``learners``."""
        own = {"fp32_head": self.fp32_head, "fp32_router": self.fp32_router}
        return learners.model_copy(update={name: is_on for name, is_on in own.items() if is_on is not None})


class TeacherModelConfig(SecondModelConfig):
    engine: Literal["vllm", "vllm_server", "learner"] = "vllm"
    """What computes the teacher's log-probs. `vllm`: an engine beside the learner in every rank, in `rollout.dtype`; it
    keeps its memory while the learner works. `vllm_server`: the servers at `addresses`. `learner`: the learner's ranks,
    at the sampling temperature."""
    addresses: list[str] = []
    """Servers of engine `vllm_server`, as `http://host:port`: vLLM's own, or others that return prompt log-probs from
    /v1/completions, or those of `megatron-rl serve`. They hold the model of `path`, of whose folder only config and
    tokenizer are read. MRL_SERVER_TOKEN, where set, is sent as their key."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> TeacherModelConfig:
        if (self.engine == "vllm_server") != bool(self.addresses):
            raise ValueError(f"addresses: {self.addresses} with engine: {self.engine}; vllm_server alone has addresses")
        for address in self.addresses:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"addresses: found {address!r}; write http://host:port")
        if self.engine == "vllm_server" and self.path is None:
            raise ValueError(
                "path: null with engine: vllm_server, whose vocabulary is compared with the student's; give a folder "
                "with config and tokenizer of the model that the servers hold"
            )
        return self


class TeacherOfSourcesConfig(TeacherModelConfig):
    data_sources: Annotated[list[str], Field(min_length=1)]
    """Data sources whose prompts this teacher teaches."""


SET_KEYS = {"tokens": "teacher", "forward": 0.0, "normalized": True}
"""Keys that `teacher.top_k` alone gives a meaning, and their defaults."""


class TeacherConfig(TeacherModelConfig):
    """A model that the policy learns from: A_t = A - weight · (log s - log τ) of each token (docs/algorithms.md,
    "Teacher"). With `objective.advantage: none` it alone teaches."""

    weight: NonNegativeFloat = 1.0
    """λ. 0: `teacher/*` is measured, and nothing learned from."""
    student: Literal["rollout", "recompute", "current"] = "recompute"
    """Whose log-prob s of a token is compared with the teacher's: mu (`rollout`), po (`recompute`), which takes the
    pass for old log-probs where a batch has several updates, or pi (`current`). With `top_k` it is pi."""
    discount: float = Field(0.0, ge=0, le=1)
    """γ: a token answers for γ^k times the difference k trained tokens later. 0: for its own alone."""
    top_k: OffCount = 0
    """k, 2 to 1024: at each place the policy is compared with the teacher on a set of k tokens, not on the sampled
    token: the loss gets weight · a divergence of pi from τ, with its gradient, and advantages stay. 0 or null: none."""
    tokens: Literal["teacher", "student"] = "teacher"
    """Whose most probable tokens the sets of `top_k` are: the teacher's, or the sampler's (`rollout.sampled_head`),
    which engine `learner` alone can score."""
    forward: float = Field(0.0, ge=0, le=1)
    """β: the share of KL(τ‖pi) in the divergence of `top_k`; KL(pi‖τ) has the rest."""
    normalized: bool = True
    """true: pi and τ of `top_k` are distributions over the set. false, with `forward: 1`: over the whole vocabulary,
    so that the policy loses what it holds outside of the set."""
    by_source: list[TeacherOfSourcesConfig] = []
    """Teachers of some data sources; the section's own model teaches the others."""

    @model_validator(mode="after")
    def _one_teacher_each(self) -> TeacherConfig:
        named = [source for teacher in self.by_source for source in teacher.data_sources]
        if twice := sorted({source for source in named if named.count(source) > 1}):
            raise ValueError(f"by_source: {', '.join(twice)} named twice; each data source has one teacher")
        if self.by_source and "learner" in {self.engine, *(teacher.engine for teacher in self.by_source)}:
            raise ValueError("by_source with engine: learner, which holds one second model; use vllm or vllm_server")
        return self

    @model_validator(mode="before")
    @classmethod
    def _student_of_sets(cls, values: Any) -> Any:
        return {"student": "current", **values} if isinstance(values, dict) and values.get("top_k") else values

    @model_validator(mode="after")
    def _sets_fit(self) -> TeacherConfig:
        set_without = [name for name, default in SET_KEYS.items() if getattr(self, name) != default]
        if not self.top_k and set_without:
            raise ValueError(f"{set_without[0]}: {getattr(self, set_without[0])} without top_k; give it, 16 for one")
        if not self.top_k:
            return self
        named = f"with top_k: {self.top_k}"
        if not 2 <= self.top_k <= MOST_KEPT:
            raise ValueError(f"top_k: {self.top_k}; a set has 2 to {MOST_KEPT} tokens, and 0 means none")
        if self.student != "current" or self.discount:
            raise ValueError(
                f"student: {self.student}, discount: {self.discount:g} {named}, whose student is pi, without later "
                "tokens; use student: current and discount: 0"
            )
        if not self.normalized and self.forward != 1:
            raise ValueError(
                f"normalized: false with forward: {self.forward:g}: KL(pi‖τ) over a part of the vocabulary is least "
                "where pi leaves it; use forward: 1, or normalized: true"
            )
        if self.tokens == "student" and {model.engine for model in self.models.values()} != {"learner"}:
            raise ValueError(
                f"tokens: student {named} and engine: {self.engine}: vLLM returns its own most probable tokens alone; "
                "use tokens: teacher, or engine: learner"
            )
        return self

    @property
    def models(self) -> dict[str, TeacherModelConfig]:
        """The teachers by the key of each in a recipe."""
        return {"teacher": self, **{f"teacher.by_source.{i}": model for i, model in enumerate(self.by_source)}}

    def key_of(self, data_source: str) -> str:
        """The teacher of a data source, by its key in `models`."""
        named = (f"teacher.by_source.{i}" for i, one in enumerate(self.by_source) if data_source in one.data_sources)
        return next(named, "teacher")
