"""Series of small patches, and trees that they are for."""

from pathlib import Path

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.series import Series

CHANGE = """From 0
Subject: [PATCH] Change {name}

Because.

Origin: ours
Forwarded: not-needed
Drop-When: never
Test: tests/patches/test_states.py
---
diff --git a/top/{name}.py b/top/{name}.py
--- a/top/{name}.py
+++ b/top/{name}.py
@@ -1 +1 @@
-{name} = 0
+{name} = 1
"""


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def small(tmp_path) -> tuple[Series, releases.Target]:
    """Series of small patches, and a tree to which the second patch of `schedule` does not fit."""
    names = {"routing/a": "", "schedule/b": "", "schedule/c": "-0.17", "schedule/d": ""}
    folder = tmp_path / "patches" / "small"
    folder.mkdir(parents=True)
    pins = {"Project": "small", "Version": "1.0", "Source": "nowhere", "Package": "small==1.0", "Root": "top"}
    pins["Tree-Before"] = "-"
    (folder / "UPSTREAM").write_text("".join(f"{key}: {value}\n" for key, value in pins.items()))
    (folder / "series").write_text("".join(f"{name}{ending}.patch\n" for name, ending in names.items()))
    root = tmp_path / "tree" / "top"
    root.mkdir(parents=True)
    for name, ending in names.items():
        path = tmp_path / "patches" / "megatron" / f"{name}{ending}.patch"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHANGE.format(name=path.name[0]))
        (root / f"{path.name[0]}.py").write_text(f"{path.name[0]} = {2 if name == 'schedule/c' else 0}\n")
    return Series.read(folder), releases.Target(root.parent, None)
