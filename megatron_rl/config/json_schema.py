"""The JSON Schema of recipe files, for editors: what `load_recipe` reads, before it merges."""

from __future__ import annotations

from typing import Any

from megatron_rl.config.loader import MAX_BASES
from megatron_rl.config.recipe import Recipe

_EXTENDS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_BASES},
        {"type": "null"},
    ],
    "description": "Recipes that this one changes, relative to it: one, or several merged in order.",
}


def recipe_schema() -> dict[str, Any]:
    """Every key with its sentence, type and range. No key is required: a recipe says what differs from its base."""
    schema = _without_required(Recipe.model_json_schema())
    properties = {"extends": _EXTENDS, **schema.pop("properties")}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "properties": properties}


def _without_required(node: Any) -> Any:
    """A part of a variant may stand without the key that names it, so that several variants may fit."""
    if isinstance(node, list):
        return [_without_required(item) for item in node]
    if not isinstance(node, dict):
        return node
    is_schema = isinstance(node.get("properties"), dict) or "oneOf" in node
    left_out = ("required", "discriminator") if is_schema else ()
    return {
        "anyOf" if key == "oneOf" and is_schema else key: _without_required(value)
        for key, value in node.items()
        if key not in left_out
    }
