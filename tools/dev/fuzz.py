"""Throw random input at what reads files and model text: the recipe loader, the data loader, the reward.

    python -m tools.dev.fuzz [--seconds 60] [recipe] [data] [reward]

Whatever comes in, each has to accept it or refuse it with an `InputError`; the reward has to give 0 or 1. Anything else
is printed as Hypothesis reduced it, and the exit status is 1.
`tests/unit/tools/test_fuzz_inputs.py` runs a few of each.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config import load_recipe
from megatron_rl.config.data import DataSourceConfig
from megatron_rl.data.source import read_problems
from megatron_rl.errors import InputError
from megatron_rl.rewards.pool import WorkerPool
from megatron_rl.rewards.rewarder import math_verdict

REPOSITORY = Path(__file__).resolve().parents[2]

ROUND = 200  # examples between two looks at the clock

WORDS = ["off", "1e-6", "~", "!!python/name:os.system", "&a", "*a", "<<", "=", "0x10", "1_000", "../x", "\0"]
NUMBERS = st.integers(-(2**70), 2**70) | st.floats()
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=12) | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(SCALARS.filter(lambda x: x == x), v, max_size=3)
)
BASE = yaml.safe_load((REPOSITORY / "recipes" / "tiny" / "base.yaml").read_text())
YAML_PIECES = st.sampled_from(
    ["name: x\n", "extends: a.yaml\n", "model: {path: m}\n", "- ", "? ", ": ", "{", "}", "[", "]", "&a ", "*a",
     "<<: *a\n", "!!python/object/apply:os.system [x]\n", "|\n", ">\n", "'", '"', "#", "%YAML 9.9\n", "---\n", "...\n",
     "\t", " ", "\n", "é", "\x85", "\ufeff"]
)  # fmt: skip

LINES = (
    st.binary(max_size=60)
    | VALUES.map(lambda v: json.dumps(v, default=str).encode())
    | st.fixed_dictionaries({"problem": VALUES, "answer": VALUES}, optional={"id": VALUES, "extra_info": VALUES}).map(
        lambda v: json.dumps(v, default=str).encode()
    )
)

LATEX = st.sampled_from(
    [r"\frac", r"\sqrt", r"\boxed{", r"\pm", r"\int", r"\sum", r"\lim", r"\left(", r"\right)", r"\begin{pmatrix}",
     r"\end{pmatrix}", "{", "}", "(", ")", "^", "_", "!", "9", "99", "x", "y", "+", "-", "*", "/", "=", ",", "<", ">",
     "%", " ", "\n", "__import__('os')", ".__class__", "lambda:", "exec(", "10^", "factorial("]
)  # fmt: skip
RESPONSES = st.lists(LATEX, max_size=25).map(lambda parts: r"\boxed{" + "".join(parts) + "}") | st.text(max_size=60)


def mutated(data: Any, path: list[Any], value: Any) -> dict[str, Any]:
    """A recipe with one value, chosen by the numbers ``path``, replaced."""
    recipe = copy.deepcopy(BASE)
    node: Any = recipe
    for choice in path[:-1]:
        inner = [key for key, item in node.items() if isinstance(item, dict)]
        if not inner:
            break
        node = node[inner[choice % len(inner)]]
    keys = [*node, data]
    node[keys[path[-1] % len(keys)]] = value
    return recipe


@st.composite
def recipes(draw) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(st.lists(YAML_PIECES, max_size=20).map("".join)).encode() + draw(st.binary(max_size=6))
    key = draw(SCALARS.filter(lambda x: x == x and not isinstance(x, list)))
    recipe = mutated(key, draw(st.lists(st.integers(0, 30), min_size=1, max_size=3)), draw(VALUES))
    return yaml.safe_dump(recipe, allow_unicode=True).encode("utf-8", "surrogatepass")


KEYS = st.sampled_from(["batch", "rollout.dtype", "a.b", "", "objective.policy_term"])
OVERRIDES = st.lists(st.text(max_size=12) | st.builds("{}={}".format, KEYS, st.text(max_size=9)), max_size=2)


def try_recipe(folder: Path, content: bytes, overrides: list[str]) -> None:
    file = folder / "recipe.yaml"
    file.write_bytes(content)
    try:
        load_recipe(file, overrides)
    except InputError:
        return


def try_data(folder: Path, lines: list[bytes]) -> None:
    file = folder / "data.jsonl"
    file.write_bytes(b"\n".join(lines))
    try:
        for problem in read_problems(DataSourceConfig(path=str(file))):
            assert isinstance(problem.answer, str)
    except InputError:
        return


def try_reward(pool: WorkerPool, response: str, gold: str) -> None:
    verdict = math_verdict(response, gold)
    if isinstance(verdict, dict):
        (outcome,) = pool.run([verdict])
        assert outcome.failure in ("", "limit"), outcome
        verdict = outcome.value
    assert verdict in (0.0, 1.0), verdict


def examples(target: str, folder: Path, pool: WorkerPool | None, number: int, count: list[int]) -> Callable[[], None]:
    """A Hypothesis test of ``number`` examples; ``count[0]`` grows by one for each."""
    cases, attempt = {
        "recipe": (st.tuples(recipes(), OVERRIDES), partial(try_recipe, folder)),
        "data": (st.tuples(st.lists(LINES, max_size=6)), partial(try_data, folder)),
        "reward": (st.tuples(RESPONSES, RESPONSES), partial(try_reward, pool)),
    }[target]

    def run(case: tuple) -> None:
        count[0] += 1
        attempt(*case)

    configured = settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return configured(given(cases)(run))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="recipe|data|reward", help="default: all three")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of them")
    options, all_targets = parser.parse_args(), ["recipe", "data", "reward"]
    if unknown := set(options.targets) - set(all_targets):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; allowed are {', '.join(all_targets)}")
    status = 0
    for target in options.targets or all_targets:
        count, start = [0], time.monotonic()
        with tempfile.TemporaryDirectory() as folder, WorkerPool(1, timeout_s=1.0, memory_limit_mib=512) as pool:
            try:
                while time.monotonic() - start < options.seconds:
                    examples(target, Path(folder), pool, ROUND, count)()
            except Exception as error:  # noqa: BLE001 - that is what this looks for
                status = 1
                print(f"{target}: {type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", [])))
            killed = f", {pool.num_restarts} workers replaced" if target == "reward" else ""
        print(f"{target}: {count[0]} examples in {time.monotonic() - start:.0f} s{killed}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
