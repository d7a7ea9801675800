"""Print the recipe's JSON Schema, for an editor's completion and hints: all keys with their meaning and defaults.

megatron-rl schema > recipe.schema.json

A recipe that begins with `# yaml-language-server: $schema=recipe.schema.json` is then completed and checked by editors
that speak to yaml-language-server, such as VS Code with the YAML extension.
"""

from __future__ import annotations

import argparse
import json

from megatron_rl.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    from megatron_rl.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))
    return EXIT_DONE
