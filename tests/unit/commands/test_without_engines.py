"""Commands that need no engine run where none is installed, and the others say what to install."""

import json
import re
import subprocess
import sys
import tomllib

import yaml

from megatron_rl.config import load_recipe
from tests.support.patience import PATIENCE_S
from tests.support.tiny import REPOSITORY

# Imports of the engines fail as on a machine without them. Arguments: one command line each, as JSON.
PROGRAM = """
import json, sys
ENGINES = ("torch", "vllm", "transformers", "megatron", "tokenizers", "math_verify")
class Others:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ENGINES else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Others, sys.meta_path)
from megatron_rl.__main__ import main
for line in map(json.loads, sys.argv[1:]):
    try:
        status = main(line)
    except SystemExit as end:
        status = end.code
    print("status", status, flush=True)
"""
SCALED = "recipes/exact/grpo-qwen3-30b-a3b-4n8g-tp2ep8-exact.yaml"


def call(*lines: list[str], cwd=REPOSITORY) -> tuple[list[int], subprocess.CompletedProcess]:
    command = [sys.executable, "-c", PROGRAM, *map(json.dumps, lines)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S)
    return list(map(int, re.findall(r"^status (\d+)$", done.stdout, re.MULTILINE))), done


def test_commands_that_need_no_engine(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": step, "critic/rewards/mean": 0.5, "actor/grad_norm": 1.0} for step in range(30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe(REPOSITORY / "recipes/tiny/grpo.yaml").model_dump(mode="json")
    (run / "recipe.resolved.yaml").write_text(yaml.safe_dump(recipe))
    lines = [
        ["plan", SCALED, "--gpu", "h100-80"],
        ["check", "--offline", SCALED],
        ["check", "--offline", SCALED, "--set", "rollout.engine=vllm", "--set", "rollout.quantization.kv_cache=fp8"],
        ["check", "--offline", "recipes/tiny/grpo.yaml"],  # its model and data are here, which needs a tokenizer
        ["run", "plot", str(run), "--out", str(tmp_path / "plots")],
        ["run", "why", str(run)],
        ["run", "watch", str(run), "--once"],
        ["run", "score-alarms", str(run)],
        ["schema"],
        ["doctor", "--only", "open-files"],
        ["lab", "--help"],
    ]
    statuses, done = call(*lines)
    assert statuses == [0] * len(lines), done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("prompts and reward: transformers is not installed") == 3


def test_a_command_that_needs_one_says_how_to_install_it():
    statuses, done = call(["check", "recipes/tiny/grpo.yaml"])
    assert statuses == [2], done.stderr
    said = "error: megatron-rl check: the package transformers is not installed; install the engines: pip install -r "
    assert said in done.stderr
    assert str(REPOSITORY / "requirements-cpu.txt") in done.stderr


def test_dependencies_are_among_the_requirements():
    """With the same bounds, so that installing the package beside the engines changes none of them."""
    dependencies = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    bounded = [line for line in dependencies if re.search("[<>=]", line)]
    assert len(bounded) > 8, "nothing was compared"
    for file in ("requirements.txt", "requirements-cpu.txt"):
        lines = [line.partition("#")[0].strip() for line in (REPOSITORY / file).read_text().splitlines()]
        assert set(bounded) <= set(lines), file
