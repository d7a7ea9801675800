"""The example of docs/add-an-objective.md works as printed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_rl.config import objective as schema
from megatron_rl.config import policy_terms as terms
from megatron_rl.objective import policy_terms
from tests.support.rounding import rounded

DOCUMENT = Path(__file__).parents[3] / "docs" / "add-an-objective.md"


def test_the_example_term_computes_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (function,) = (block for block in blocks if block.startswith("def "))
    (section,) = (block for block in blocks if block.startswith("class "))
    namespace = {**vars(policy_terms), **vars(schema), **vars(terms)}
    exec(section, namespace)
    exec(function, namespace)
    config = namespace["Quadratic"](beta=3.0)
    log_ratio = torch.tensor([0.5, -0.2], dtype=torch.float64)
    tokens = SimpleNamespace(log_ratio=log_ratio, advantages=torch.tensor([2.0, -1.0], dtype=torch.float64))
    want = [-2 * math.exp(0.5) + 1.5 * 0.25, math.exp(-0.2) + 1.5 * 0.04]
    assert namespace["quadratic"](tokens, config).loss.tolist() == rounded(want)


def test_names_in_the_document_exist():
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in ("POLICY_TERMS", "PolicyTerm", "TermSection", "carries_w", "is_anchored_on_rollout"):
        assert name in text
        assert any(hasattr(owner, name) for owner in (policy_terms, schema, terms, terms.TermSection))
    for path in re.findall(r"`((?:megatron_rl|tests|tools)/[\w/]+\.py)`", text):
        assert (DOCUMENT.parents[1] / path).is_file(), path
