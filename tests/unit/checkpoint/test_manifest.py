"""Publishing, recovering, pruning and judging checkpoints as files; their contents do not matter here."""

import json
import os
from pathlib import Path

import pytest

from megatron_rl.checkpoint import manifest


def write(folder: Path, step: int, hidden: str = "", content: str = "weights") -> Path:
    path = folder / f"{hidden}{manifest.checkpoint_name(step)}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_text(content)
    (path / "trainer.json").write_text("{}")
    manifest.write_manifest(path, manifest.hash_files(path, ["__0_0.distcp", "trainer.json"]))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_truncated_missing_altered(tmp_path):
    path = write(tmp_path, 3)
    shard = path / "__0_0.distcp"
    assert manifest.incomplete(path) is None
    assert manifest.altered_files(path) == []
    shard.write_text("weightz")
    assert manifest.incomplete(path) is None, "sizes say nothing of contents"
    assert manifest.altered_files(path) == ["__0_0.distcp has another SHA-256"]
    shares = [manifest.altered_files(path, part, 3) for part in range(3)]
    assert [name for share in shares for name in share] == ["__0_0.distcp has another SHA-256"]
    shard.write_text("weight")
    assert manifest.incomplete(path) == "__0_0.distcp has 6 of 7 bytes"
    shard.unlink()
    assert manifest.incomplete(path) == "__0_0.distcp is missing"
    (path / "manifest.json").unlink()
    assert manifest.incomplete(path) == "no manifest.json"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": {}}', '{"files": {"../../x": {"size": 1, "sha256": ""}, "trainer.json": {}}}', "\0"]
)
def test_a_manifest_that_is_none(tmp_path, text):
    path = write(tmp_path, 3)
    (path / "manifest.json").write_text(text)
    assert "manifest.json" in manifest.incomplete(path)
    assert manifest.list_checkpoints(tmp_path) == []


def test_a_manifest_of_another_format_is_named(tmp_path):
    path = write(tmp_path, 3)
    text = (path / "manifest.json").read_text()
    for version in (2, 0, "1", True, None):
        (path / "manifest.json").write_text(
            text.replace('"format_version": 1', f'"format_version": {json.dumps(version)}')
        )
        assert manifest.incomplete(path) == f"manifest.json has format_version {version!r}, this version reads 1"


def test_what_a_loss_of_power_must_not_take_is_on_the_disk_in_time(tmp_path, monkeypatch):
    """The manifest when it is written; the folder of files before it gets its name, and the name afterwards."""
    synced = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        name = path.name.removesuffix(f".{os.getpid()}")
        synced.append((name, names(path) if path.is_dir() else json.loads(path.read_text())["format_version"]))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "checkpoints"
    partial = write(folder, 3, ".partial-")
    assert synced == [(".partial-manifest.json", 1)]
    manifest.publish(partial, folder / "step_00000003")
    assert synced[1:] == [
        (".partial-step_00000003", ["__0_0.distcp", "manifest.json", "trainer.json"]),
        ("checkpoints", ["step_00000003"]),
    ]


def test_recovery_after_a_kill_anywhere_in_publishing(tmp_path):
    write(tmp_path, 1, ".partial-")  # before the rename
    write(tmp_path, 2, ".old-")  # between the renames, with
    write(tmp_path, 2, ".partial-", "newer")  # its replacement
    write(tmp_path, 3, ".old-")  # after the renames
    write(tmp_path, 3)
    (tmp_path / ".partial-step_00000004").mkdir()  # in the middle of writing
    write(tmp_path, 5, ".deleting-")
    said = manifest.recover(tmp_path)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]
    assert (tmp_path / "step_00000002" / "__0_0.distcp").read_text() == "newer"
    assert len(said) == 2
    assert manifest.recover(tmp_path) == []


def test_pruning_spares_the_newest_and_the_best(tmp_path):
    for step in range(1, 7):
        write(tmp_path, step)
    (tmp_path / "damaged_step_00000001").mkdir()
    manifest.prune(tmp_path, keep_last=2, protected=[2])
    assert [p.name[-1] for p in manifest.list_checkpoints(tmp_path)] == ["2", "5", "6"]
    manifest.prune(tmp_path, keep_last=0)
    assert len(manifest.list_checkpoints(tmp_path)) == 3
    manifest.prune(tmp_path, keep_last=1)
    assert [p.name[-1] for p in manifest.list_checkpoints(tmp_path)] == ["6"]
    assert "damaged_step_00000001" in names(tmp_path)


def test_setting_aside_twice(tmp_path):
    assert manifest.set_aside(write(tmp_path, 3), "damaged").name == "damaged_step_00000003"
    assert manifest.set_aside(write(tmp_path, 3), "damaged").name == "damaged_step_00000003_2"


def test_the_newest_up_to_a_step_is_whole_and_may_be_of_that_step(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step)
    (write(tmp_path, 25) / manifest.MANIFEST_FILE).unlink()
    newest = {step: manifest.newest_checkpoint(tmp_path, step) for step in (9, 10, 19, 20, 29, 99)}
    steps = {step: path and manifest.checkpoint_step(path) for step, path in newest.items()}
    assert steps == {9: None, 10: 10, 19: 10, 20: 20, 29: 20, 99: 30}
