"""What the rollout engine rounds beyond its dtype: the section `rollout.quantization`, see docs/precision.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from megatron_rl.config.base import Section

WeightType = Literal["fp8", "int8", "int4"]
Block = tuple[int | None, int | None]

OWN_BLOCK: dict[str, Block] = {"fp8": (128, 128), "int8": (1, None), "int4": (1, 128)}
"""Rows and columns that share a scale where the recipe does not say."""
ON_CUDA: dict[Block, str] = {(128, 128): "fp8_per_block", (1, None): "fp8_per_channel", (None, None): "fp8_per_tensor"}
"""What vLLM 0.30 rounds by itself while it loads, in all linear layers and experts: block of fp8 → its name."""


class QuantizationConfig(Section):
    weights: WeightType | None = None
    """Type that weights of linear layers and experts are rounded to; embeddings, head, routers and norms keep `dtype`.
    null: none. int8 and int4: on a CPU only, which computes with the rounded numbers in `dtype`."""
    block: Annotated[list[PositiveInt | None], Field(min_length=2, max_length=2)] | None = None
    """Outputs and inputs of a weight that share a scale; null in it: all of them. null: [128, 128] for fp8, [1, null]
    for int8, [1, 128] for int4. On CUDA fp8 has [128, 128], [1, null] and [null, null]."""
    kv_cache: Literal["fp8"] | None = None
    """Type of keys and values in the cache, e4m3 with scale 1. null: `dtype`."""

    @property
    def of_weights(self) -> Block:
        """``block``, or the type's own."""
        if self.block is not None:
            return self.block[0], self.block[1]
        return OWN_BLOCK[self.weights or "fp8"]

    @property
    def words(self) -> str:
        """Of the weights, for the precision contract."""
        return in_words(self.weights, self.of_weights) if self.weights else "off"

    @model_validator(mode="after")
    def _block_is_of_something(self) -> QuantizationConfig:
        if self.block is not None and self.weights is None:
            raise ValueError(
                f"block: {self.block}, but weights is null and nothing is rounded; set weights or leave it"
            )
        return self


def in_words(weights: str, block: Block) -> str:
    """Type and block, as the precision contract names them."""
    return f"{weights} [{', '.join(str(size or 'all') for size in block)}]"
