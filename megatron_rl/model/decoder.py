"""The numbers of a decoder. `architecture` makes them from config.json. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LatentAttention:
    """Widths of multi-head latent attention: keys and values of all heads are made from one latent vector a token."""

    query_rank: int | None  # of the latent vector that queries are made from; None: they come from the layer's input
    rank: int  # of the latent vector of keys and values
    plain_width: int  # of a head's query and key, the part that rotary embeddings leave alone
    rotary_width: int  # of the part that they turn; all heads share the key's
    value_width: int  # of a head


@dataclass(frozen=True)
class LinearAttention:
    """Widths of gated delta nets: a state of key_width × value_width for each head of values, instead of a cache."""

    key_heads: int  # of queries and of keys; each serves value_heads / key_heads heads of values
    value_heads: int
    key_width: int
    value_width: int
    kernel: int  # tokens that the convolution in front sees, with the token itself

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the projection into it: of queries, keys, values, gates, write strengths and decays."""
        keys, values = self.key_heads * self.key_width, self.value_heads * self.value_width
        return keys, keys, values, values, self.value_heads, self.value_heads


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of the rotary embedding. Fields: the keys of config.json.

    Frequencies that turn more than ``beta_fast`` times in the original length stay, those that turn less than
    ``beta_slow`` times are divided by ``factor``, and those between are blended. ``truncate``: the two bounds between
    which they are blended are whole numbers. ``mscale`` and ``mscale_all_dim`` (of DeepSeek-V3) scale what attention's
    softmax gets; without them cosine and sine are multiplied by 0.1 · log(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder that layout checks, the converter and the planner need."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_embeddings: bool
    qkv_bias: bool
    qk_layernorm: bool  # of queries and keys, head by head or as `wide_qk_norm` says
    num_experts: int  # 0 for a dense model
    experts_per_token: int
    moe_ffn_hidden_size: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]  # per layer: MoE (True) or dense
    shared_ffn_hidden_size: int = 0  # of the experts that every token passes, together; 0: none
    shared_expert_gate: bool = False  # whether a sigmoid of the token weights them
    sigmoid_router: bool = False  # scores are sigmoids and a bias decides the choice alone; else scores are a softmax
    routed_scale: float = 1.0  # by which the weights of chosen experts are multiplied
    is_unscaled_in_fp16: bool = False  # whether vLLM leaves `routed_scale` out in fp16
    router_in_fp32: bool = False  # whether vLLM computes the router in fp32 whatever the engine's dtype
    wide_qk_norm: bool = False  # whether one norm is over all heads of a token
    rotary_fraction: float = 1.0  # of a head's width that rotary embeddings turn
    latent: LatentAttention | None = None  # then head_dim is the whole width of a head's query
    router_groups: tuple[int, int] = (1, 1)  # groups of experts, and how many of them a token may choose from
    windows: tuple[int | None, ...] = ()
    """Per layer: how many tokens a token sees, with itself. None: all. Empty: all in every layer."""
    has_sinks: bool = False  # whether a trained score of each head takes part in the softmax, and has no value
    linear_bias: bool = False  # of attention's output, of the router (trained) and of experts
    clamped_gate: bool = False  # whether experts have gpt-oss's activation in the place of SiLU's
    linear: LinearAttention | None = None
    linear_layers: tuple[bool, ...] = ()
    """Per layer: a gated delta net (True) or attention. Empty: attention in every layer."""
    output_gate: bool = False  # whether a sigmoid of the token weights what attention gives, number by number
    zero_centred_norms: bool = False  # whether norms multiply by 1 + weight; that inside a delta net never does
    unused_layers: int = 0  # behind the last layer: of the checkpoint, for guesses of later tokens; nobody loads them

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def of_layers(self, layers: Sequence[int]) -> Architecture:
        """The model of these layers alone."""
        by_layer = {
            name: tuple(values[layer] for layer in layers)
            for name in ("moe_layers", "windows", "linear_layers")
            if (values := getattr(self, name))
        }
        return replace(self, num_layers=len(layers), **by_layer)

    def is_linear(self, layer: int) -> bool:
        """Whether ``layer`` has a gated delta net in the place of attention."""
        return bool(self.linear_layers) and self.linear_layers[layer]

    @property
    def llama3_factor(self) -> float | None:
        """The factor by which Llama 3's rope scaling slows low rotary frequencies; None for other models."""
        if self.rope_scaling is None or self._has_yarn or self._rope_problems():
            return None
        return float(self.rope_scaling["factor"])

    @property
    def yarn(self) -> Yarn | None:
        """The scaling of a model with latent attention, or with sinks; None for others, and where there is none."""
        if self.rope_scaling is None or not self._has_yarn or self._rope_problems():
            return None
        return Yarn(**{key: value for key, value in self.rope_scaling.items() if key not in ("type", "rope_type")})

    @property
    def _has_yarn(self) -> bool:
        """Whether the scaling of the rotary embedding, if there is one, is YaRN's."""
        return self.latent is not None or self.has_sinks

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """The vocabulary rounded up to what ``tensor_parallel`` ranks share evenly.

        Padding rows never reach a softmax: `learner.logprobs` masks them, so pi is over the same tokens as mu.
        """
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def problems(self) -> list[str]:
        """Why the learner cannot build this model; empty where it can."""
        return self._rope_problems() + self._expert_problems()

    def _expert_problems(self) -> list[str]:
        if not self.is_moe or 1 < self.experts_per_token <= self.num_experts:
            return []
        reason = ""
        if self.experts_per_token == 1:
            reason = "; Megatron-Core's router weights experts against each other, one has none"
        return [
            f"model.path: num_experts_per_tok is {self.experts_per_token} of {self.num_experts} experts; from 2 to "
            f"{self.num_experts} are supported{reason}"
        ]

    def _rope_problems(self) -> list[str]:
        if self._has_yarn:
            return self._yarn_problems()
        scaling = dict(self.rope_scaling or {})
        scaling["rope_type"] = scaling.pop("rope_type", None) or scaling.pop("type", None)
        if self.rope_scaling is None or (scaling.pop("factor", 0) > 0 and scaling == _LLAMA3_SCALING):
            return []
        return [
            f"model.path: rope scaling {self.rope_scaling} is not supported, only Llama 3's ({_LLAMA3_SCALING}, any "
            "factor); take it out of config.json only where that kind leaves sequences of the run's length alone"
        ]

    def _yarn_problems(self) -> list[str]:
        """With sinks, vLLM has YaRN whatever `rope_type` is, asks for each of its keys, and reads no other."""
        if self.rope_scaling is None and not self.has_sinks:
            return []
        given = dict(self.rope_scaling or {})
        kind = given.pop("rope_type", None) or given.pop("type", None)
        given.pop("type", None)
        fits = kind == "yarn"
        required, optional = {"factor", "original_max_position_embeddings"}, {"beta_fast", "beta_slow"}
        if self.has_sinks:
            fits = fits and type(given.pop("truncate", True)) is bool
            required, optional = required | optional, set()
            part = "attention sinks"
            keys = "beta_fast, beta_slow and truncate"
        else:
            required |= {"mscale", "mscale_all_dim"}
            part = "latent attention"
            keys = (
                "mscale and mscale_all_dim (above 0: transformers, vLLM and Megatron-Core read others in different "
                "ways), beta_fast and beta_slow"
            )
        fits = fits and required <= set(given) <= required | optional
        fits = fits and all(type(value) in (int, float) and value > 0 for value in given.values())
        if not fits or given["factor"] <= 1 or given.get("beta_fast", 32) < given.get("beta_slow", 1):
            return [
                f"model.path: rope scaling {self.rope_scaling} is not supported with {part}, only yarn with "
                f"factor (above 1), original_max_position_embeddings, {keys}"
            ]
        longest = given["factor"] * given["original_max_position_embeddings"]
        if self.max_position_embeddings > longest:
            return [
                f"model.path: max_position_embeddings is {self.max_position_embeddings}, but yarn's factor times "
                f"original_max_position_embeddings is {longest:g}, the most that vLLM takes; lower the one"
            ]
        return []


# The constants of Llama 3's scaling in Megatron-Core's RotaryEmbedding, which takes the factor alone.
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
