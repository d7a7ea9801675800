"""A checkpoint from elsewhere is data: loading one whose files hold code runs none of it."""

import pickle
import shutil

import pytest

from megatron_rl.checkpoint import manifest
from tests.support.evil import Evil


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_code_in_a_checkpoint_does_not_run(runs, tmp_path, file):
    name, proof = f"foreign{file}", tmp_path / "ran"
    shutil.copytree(runs.root / "whole", runs.root / name)
    newest = runs.root / name / "checkpoints" / "step_00000007"
    (newest / file).write_bytes(pickle.dumps(Evil(proof), protocol=2))
    # Whoever made it also made a manifest that fits.
    manifest.write_manifest(newest, manifest.hash_files(newest, manifest.read_manifest(newest)))
    ended = runs.end(runs.start(name, resume=str(newest)))
    assert not proof.exists()
    assert ended.status == 2, ended.output
    assert ended.last_line.startswith("error: ")
    assert "posix.mkdir" in ended.last_line


def test_no_secret_reaches_the_run_directory(runs):
    """The helper was started with a secret in its environment; nothing that a run writes holds it."""
    for path in (runs.root / "whole").rglob("*"):
        if path.is_file():
            assert b"do-not-write-this" not in path.read_bytes(), path
