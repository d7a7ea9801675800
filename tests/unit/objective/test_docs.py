"""The examples of docs/add-an-objective.md work as printed."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

from megatron_rl.config import objective as schema
from megatron_rl.config import policy_terms as term_schema
from megatron_rl.objective import Denominators, compute_advantages, policy_terms
from megatron_rl.objective.trial import check_user_functions
from megatron_rl.process.user_functions import load_function
from tests.support.rounding import rounded

DOCUMENT = Path(__file__).parents[3] / "docs" / "add-an-objective.md"


def test_the_example_term_computes_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (function,) = (block for block in blocks if block.startswith("def "))
    (section,) = (block for block in blocks if block.startswith("class "))
    namespace = {**vars(policy_terms), **vars(term_schema)}
    exec(section, namespace)
    exec(function, namespace)
    config = namespace["Quadratic"](beta=3.0)
    log_ratio = torch.tensor([0.5, -0.2], dtype=torch.float64)
    tokens = SimpleNamespace(log_ratio=log_ratio, advantages=torch.tensor([2.0, -1.0], dtype=torch.float64))
    want = [-2 * math.exp(0.5) + 1.5 * 0.25, math.exp(-0.2) + 1.5 * 0.04]
    assert namespace["quadratic"](tokens, config).loss.tolist() == rounded(want)


def test_the_example_file_passes_the_trial_and_computes_what_it_says(tmp_path):
    text = DOCUMENT.read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block.startswith("# mine.py"))
    (values,) = (block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "mine.py" in block)
    file = tmp_path / "mine.py"
    file.write_text(code)
    config = schema.ObjectiveConfig.model_validate(yaml.safe_load(values.replace("mine.py", str(file)))["objective"])
    check_user_functions(config)
    functions = {name.rpartition(":")[2]: load_function(name) for name in schema.user_functions(config)}
    rho = torch.tensor([1.0, 0.5, 4.0], dtype=torch.float64)
    assert functions["soft_cap"](SimpleNamespace(token=rho), cap=2.0).tolist() == rounded([1.0, 1 / 1.5, 8 / 5])
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 1.0, 2.0]), torch.tensor([7, 7, 7, 2, 2, 2])
    advantages = compute_advantages(rewards, groups, config.advantage)
    assert advantages.tolist() == [1.0, 0.0, 0.0, 1.0, -1.0, 0.0]
    counts = Denominators(500.0, 4.0)
    assert functions["per_kilotoken"](torch.ones(4), counts, config) == 2.0


def test_names_in_the_document_exist():
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in ("POLICY_TERMS", "PolicyTerm", "TermSection", "carries_w", "is_anchored_on_rollout"):
        assert name in text
        assert any(hasattr(owner, name) for owner in (policy_terms, term_schema, term_schema.TermSection))
    for path in re.findall(r"`((?:megatron_rl|tests|tools)/[\w/]+\.py)`", text):
        assert (DOCUMENT.parents[1] / path).is_file(), path
