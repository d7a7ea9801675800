"""The host memory that is available."""

from __future__ import annotations

from megatron_rl.process.host import available_gib

GIB = 2**30


def test_a_control_groups_limit_counts(tmp_path):
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
    group = tmp_path / "group"
    assert available_gib(tmp_path / "meminfo", group) == 64
    group.mkdir()
    (group / "memory.max").write_text(f"{10 * GIB}\n")
    (group / "memory.current").write_text(f"{6 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {2 * GIB}\n")
    assert available_gib(tmp_path / "meminfo", group) == 6
    (group / "memory.max").write_text("max\n")
    assert available_gib(tmp_path / "meminfo", group) == 64
