"""The rules of the series `cpu`: what they change, where they are applied, and what they refuse."""

import os
import re
import subprocess
import sys

import pytest

from megatron_rl.patching import cpu, series, states
from megatron_rl.patching.releases import Target, for_tree
from megatron_rl.patching.series import MEGATRON, PatchError, Series
from tests.support.series import EVERY, PATCHES, QUICK, megatron_core, unpacked
from tests.support.slow import slow_but

WORDS = {  # what a line holds before and after
    "x.cuda()": "x.to(torch.cpu.current_device())",
    "x.cuda(torch.cuda.current_device())": "x.to(torch.cpu.current_device())",
    "x.cuda(non_blocking=True)": "x.to(torch.cpu.current_device())",
    "x.cuda(3)": "x.cuda(3)",
    "x.cudagraph()": "x.cudagraph()",
    "torch.zeros(2, device='cuda')": 'torch.zeros(2, device="cpu")',
    "torch.zeros(2, device = 'cuda:1')": "torch.zeros(2, device = 'cuda:1')",
    "torch.cuda.current_device()": "torch.cpu.current_device()",
    "torch.cuda.current_device_uuid()": "torch.cuda.current_device_uuid()",
    "torch.cuda.is_available()": "torch.cuda.is_available()",
    "torch.cuda.random.get_rng_state()": "torch.get_rng_state()",
    "'torch.cuda.BFloat16Tensor'": "'torch.BFloat16Tensor'",
    "pin_memory=True": "pin_memory=False",
    "# Grüße, x.cuda()": "# Grüße, x.to(torch.cpu.current_device())",
}


def small() -> dict[str, bytes | None]:
    """Sources with the places alone."""
    files: dict[str, bytes | None] = {}
    for place in cpu.PLACES:
        path = f"{MEGATRON}/{place.path}"
        files[path] = (files.get(path) or b"") + place.old.encode() + b"\n"
    return files


def test_whole_words_are_changed_and_nothing_else():
    files = small() | {f"{MEGATRON}/a.py": "\n".join(WORDS).encode(), "megatron/other.py": b"x.cuda()"}
    files |= {f"{MEGATRON}/a.txt": b"x.cuda()", f"{MEGATRON}/none.py": None}
    after = cpu.rewrite(files, MEGATRON)
    assert after[f"{MEGATRON}/a.py"].decode().splitlines() == list(WORDS.values())
    unchanged = ("megatron/other.py", f"{MEGATRON}/a.txt", f"{MEGATRON}/none.py")
    assert {path: after[path] for path in unchanged} == {path: files[path] for path in unchanged}
    for place in cpu.PLACES:
        assert place.new.encode() in after[f"{MEGATRON}/{place.path}"]


@pytest.mark.parametrize("place", cpu.PLACES, ids=lambda place: place.new.split("\n")[0].strip())
@pytest.mark.parametrize("count", [0, 2, None])
def test_a_place_that_is_not_there_once_is_an_error_that_names_it(place, count):
    files, path = small(), f"{MEGATRON}/{place.path}"
    files[path] = None if count is None else files[path].replace(place.old.encode(), place.old.encode() * count)
    if count is None and place.is_newer:
        assert cpu.rewrite(files, MEGATRON)[path] is None
        return
    told = f"cpu: {path}: is not there" if count is None else f"cpu: {path}: has {count} times, not once: "
    with pytest.raises(PatchError, match=f"^{re.escape(told)}"):
        series.Rules.below(MEGATRON).applied_to(files)


@pytest.mark.parametrize("name", slow_but(QUICK, EVERY))
def test_they_fit_each_release_and_leave_no_device_of_cuda(name, tmp_path):
    of_release, where = unpacked(name, tmp_path)
    files = of_release.load(where.root)
    after = cpu.rewrite(files, MEGATRON)
    changed = {path for path in files if after[path] != files[path]}
    assert len(changed) > 90
    for path in changed:
        compile(after[path], path, "exec")
        assert not re.search(rb"torch\.cuda\.current_device\b|\.cuda\(\)", after[path]), path


def test_megatron_is_imported_without_triton(tmp_path):
    _, where = unpacked(megatron_core().name, tmp_path)
    states.apply_or_revert(for_tree(PATCHES, where.root), where, False, ["cpu"])
    program = "import sys; sys.modules['triton'] = None\n"
    program += "import megatron.core; from megatron.core.transformer.moe.ops import paged_stash as p; print(p.__file__)"
    environment = os.environ | {"PYTHONPATH": str(where.root)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip().startswith(str(where.root)), done.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", False),
        ("cuda = None\nhip = '7.0'\n", False),
        (None, False),
    ],
    ids=["for CPUs", "CUDA", "ROCm", "not installed"],
)
def test_only_an_environment_for_cpus_gets_them(text, wanted, tmp_path, monkeypatch):
    """Whatever devices the machine has, on which a cluster's environment is made."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if text is not None:
        about = tmp_path / "torch-2.13.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{text}")
    assert cpu.is_wanted() is wanted
    tree = tmp_path / "tree"
    release = Series.read(PATCHES / megatron_core().name)
    assert ("cpu" in {patch.purpose for patch in release.of(None)}) is wanted
    _, where = unpacked(release.name, tree)
    states.apply_or_revert(release, Target(where.root, None), False)
    assert (b".to(torch.cpu" in (where.root / MEGATRON / "utils.py").read_bytes()) is wanted
    assert states.report(release, where)["series"]["cpu"]["state"] == ("applied" if wanted else "not applied")
