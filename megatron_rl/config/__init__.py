"""The recipe schema: typed, documented field by field, unknown keys rejected. No engine is imported here."""

from megatron_rl.config.objective import ObjectiveConfig

__all__ = ["ObjectiveConfig", "Recipe", "load_recipe"]


def __getattr__(name):
    if name == "load_recipe":
        from megatron_rl.config.loader import load_recipe

        return load_recipe
    if name == "Recipe":
        from megatron_rl.config.recipe import Recipe

        return Recipe
    raise AttributeError(name)
