"""Print the recipe's JSON Schema, for an editor's completion and hints: all keys with their meaning and defaults.

megatron-rl recipe schema > recipe.schema.json

Editors that use yaml-language-server, such as VS Code with the YAML extension, then complete and check a recipe that
begins with `# yaml-language-server: $schema=recipe.schema.json`.
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config.loader import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return EXIT_DONE
