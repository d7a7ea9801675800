"""docs/turns.md shows the function that is shipped."""

from __future__ import annotations

import ast
import re

from tests.support.tiny import REPOSITORY


def test_the_page_shows_the_shipped_function():
    page = (REPOSITORY / "docs" / "turns.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    source = (REPOSITORY / "recipes" / "tiny" / "calculator.py").read_text()
    functions = [ast.get_source_segment(source, node) for node in ast.parse(source).body]
    assert shown.strip() in functions
