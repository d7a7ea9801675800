"""Cost of a server on top of its engine: a batch of responses and a push of weights, against a local engine.

    python -m tools.bench.servers [--prompts 8] [--group 8] [--length 64] [--rounds 9] [--set a.b=c …]

One vLLM server (HTTP and engine) and one vLLM engine in this process, same model and requests, asked in turn; nothing
else runs, so wall time of an idle machine is meant. The limit is the engine in this process: it has no second process
to talk to. Both must return the same responses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
import yaml

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config import load_recipe
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.rollout.servers.generator import ServerGenerator
from megatron_rl.rollout.vllm_engine import VllmGenerator
from tools.bench.lib.timing import alternate, median_ratio, medians

ROOT = Path(__file__).resolve().parents[2]
warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of every response")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override of the recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(
            ROOT / "recipes" / "tiny" / "servers.yaml",
            [
                "name=bench",
                f"run_root={folder}",
                f"rollout.max_response_length={options.length}",
                "rollout.stop_token_ids=[]",
                "rollout.max_staleness=0",
                "rollout.servers.launch=1",
                *options.set,
            ],
        )
        file = Path(folder) / "bench" / "recipe.resolved.yaml"
        file.parent.mkdir()
        file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        tokenizer = load_tokenizer(str(recipe.model.path))
        prompts = list(load_prompts(recipe.data.train, tokenizer, recipe.data.prompt))[: options.prompts]
        longest = recipe.data.prompt.max_length
        server = ServerGenerator(
            recipe.rollout, recipe.model.path, max_prompt_length=longest, run_dir=file.parent, recipe_file=file
        )
        engine = VllmGenerator(recipe.rollout, recipe.model.path, max_prompt_length=longest)
        weights = list(HFFolder(recipe.model.path).items())
        asked = {"policy_version": 0, "step": 0}
        tokens = [
            [
                rollout.tokens.tolist()
                for group in one.rollout(prompts, options.group, **asked)
                for rollout in group.rollouts
            ]
            for one in (server, engine)
        ]
        assert tokens[0] == tokens[1], "other responses: nothing to compare"
        times = alternate(
            options.rounds,
            {
                "server, batch": lambda: server.rollout(prompts, options.group, **asked),
                "engine, batch": lambda: engine.rollout(prompts, options.group, **asked),
                "server, push": lambda: server.refit(iter(weights), 0),
                "engine, refit": lambda: engine.refit(iter(weights), 0),
            },
            clock=time.perf_counter,
        )
        server.close()
        engine.close()
    print(f"{options.prompts} × {options.group} responses of {options.length} tokens, load {os.getloadavg()[0]:.1f}")
    for name, median in medians(times).items():
        print(f"{name:<14} {1e3 * median:8.1f} ms")
    for name, limit in (("server, batch", "engine, batch"), ("server, push", "engine, refit")):
        print(f"{name} against {limit}: {median_ratio(times[name], times[limit]):.2f}")


if __name__ == "__main__":
    main()
