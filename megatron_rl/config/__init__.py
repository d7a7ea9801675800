"""The recipe schema: typed, documented field by field, unknown keys rejected. No engine is imported here."""

from megatron_rl.config.loader import load_recipe
from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.config.recipe import Recipe

__all__ = ["ObjectiveConfig", "Recipe", "load_recipe"]
