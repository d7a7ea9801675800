"""Print the recipe's JSON Schema, for an editor's completion and hints: all keys with their meaning and defaults.

megatron-rl schema > recipe.schema.json
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config import Recipe

    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return EXIT_DONE
