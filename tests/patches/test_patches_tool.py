"""`megatron-rl patch` on the real series and on small ones: all or nothing, there and back, on every kind of tree."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_rl.patching import releases
from megatron_rl.patching.series import PatchError
from megatron_rl.patching.states import installed_status
from tests.support.patience import PATIENCE_S
from tests.support.series import megatron_core, unpacked

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND = ("-m", "megatron_rl", "patch")
RECORD = "patches.diff"

ORIGINAL = {
    "top/pkg/a.py": b"".join(b"a%d = %d\n" % (n, n) for n in range(40)),
    "top/pkg/b.py": b"".join(b"b%d = %d\n" % (n, n) for n in range(40)),
    "top/pkg/untouched.py": b"x = 1\n",
}
TRAILERS = "Origin: ours\nForwarded: no\nDrop-When: never\nTest: tests/test_a.py\n"


def run(*arguments: object, python: str = sys.executable, **options) -> subprocess.CompletedProcess:
    command = [python, *COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_S, **options)


def read(root: Path, skip: tuple[str, ...] = (".git", "__pycache__")) -> dict[str, bytes]:
    """All files below `root` but the record of what is patched."""
    paths = (p for p in root.rglob("*") if p.is_file() and not set(p.relative_to(root).parts) & set(skip))
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.name != RECORD}


def write(root: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "core.autocrlf=false"]
    command = ["git", *identity, "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A git checkout of a small upstream (tag `pristine`) with three commits on top."""
    root = write(tmp_path / "checkout", ORIGINAL)
    git(root, "init", "-q")
    steps = [
        ("Upstream", {}),
        ("Change one file twice", {"top/pkg/a.py": ORIGINAL["top/pkg/a.py"].replace(b"3 =", b"3  =")}),
        (
            "Change it again, and another",
            {
                "top/pkg/a.py": ORIGINAL["top/pkg/a.py"].replace(b"3 =", b"3   ="),
                "top/pkg/b.py": ORIGINAL["top/pkg/b.py"].replace(b"b20 = 20\n", b""),
            },
        ),
        ("Add a file", {"top/pkg/new.py": b"new = 1\n"}),
    ]
    for subject, files in steps:
        write(root, files)
        git(root, "add", "-A")
        git(root, "commit", "-q", "--allow-empty", "-m", f"{subject}\n\nBecause.\n\n{TRAILERS}")
        if subject == "Upstream":
            git(root, "tag", "pristine")
    return root


@pytest.fixture
def patches(tmp_path, checkout) -> Path:
    """The folder patches/ made from `checkout`, with an archive of the pristine tree pinned."""
    folder = tmp_path / "patches" / "small"
    folder.mkdir(parents=True)
    archive = tmp_path / "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        for path, content in ORIGINAL.items():
            wheel.writestr(path, content)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    pins = {
        "Project": "small",
        "Version": "1.0",
        "Source": "nowhere",
        "Package": "small==1.0",
        "Root": "top",
        "Archive": f"{archive.name} sha256:{digest}",
        "Tree-Before": "-",
    }
    (folder / "UPSTREAM").write_text("".join(f"{key}: {value}\n" for key, value in pins.items()))
    (folder / "series").write_text("# the order\n")
    done = run("export", "--patches", folder.parent, "--tree", checkout, "--base", "pristine", "small")
    assert done.returncode == 0, done.stderr
    return folder.parent


@pytest.fixture
def tree(tmp_path) -> Path:
    """An unpacked pristine tree."""
    return write(tmp_path / "tree", ORIGINAL)


def patched(checkout: Path) -> dict[str, bytes]:
    return read(checkout)


# The real series


def test_status_says_what_it_was_asked_about(tmp_path):
    """A series that is named, and no other; what a package cannot have is named by both commands."""
    root = unpacked(megatron_core().name, tmp_path)[1].root
    where = ("--tree", root, "--series", "schedule")
    for code, mark in ((1, "not applied, but fits"), (0, "applied")):
        status = run("status", *where)
        assert status.returncode == code
        _, group, *patches = status.stdout.splitlines()
        assert group == f"  schedule: {mark}"
        assert [line.split(": ")[0][4:].rpartition("-0.")[0] or line[4:].split(".patch")[0] for line in patches] == [
            "length-decay-in-the-scheduler",
            "length-decay-on-the-command-line",
        ]
        assert patches[1].endswith(" (for a whole checkout)")
        if code:
            done = run("apply", *where)
            assert "; without schedule/length-decay-on-the-command-line: for a whole checkout" in done.stdout


# Trees


def test_unpacked_tree_there_and_back(patches, tree, checkout):
    where = ("--patches", patches, "--tree", tree, "small")
    assert "applied, 3 patches, 3 files" in run("apply", *where).stdout
    assert read(tree) == patched(checkout)
    times = {path: path.stat().st_mtime_ns for path in tree.rglob("*.py")}
    assert "already applied, nothing to do" in run("apply", *where).stdout
    assert {path: path.stat().st_mtime_ns for path in tree.rglob("*.py")} == times
    assert "reverted" in run("revert", *where).stdout
    assert read(tree) == ORIGINAL
    assert "not applied, nothing to do" in run("revert", *where).stdout


def test_git_checkout_and_export_reproduce_the_patches(patches, checkout, tmp_path):
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(checkout), str(other))
    git(other, "checkout", "-q", "pristine")
    assert run("apply", "--patches", patches, "--tree", other, "small").returncode == 0
    assert git(other, "status", "--porcelain").split() == [
        "M",
        "top/pkg/a.py",
        "M",
        "top/pkg/b.py",
        "??",
        "top/patches.diff",
        "??",
        "top/pkg/new.py",
    ]
    before = read(patches)
    assert run("export", "--patches", patches, "--tree", checkout, "--base", "pristine", "small").returncode == 0
    assert read(patches) == before


def test_patches_are_what_git_takes(patches, checkout, tmp_path):
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(checkout), str(other))
    git(other, "checkout", "-q", "pristine")
    names = [n for n in (patches / "small" / "series").read_text().splitlines() if not n.startswith("#")]
    git(other, "am", "-q", *[str(patches / "small" / name) for name in names])
    assert read(other) == patched(checkout)
    assert git(other, "log", "-3", "--format=%s").splitlines()[::-1] == [
        "Change one file twice",
        "Change it again, and another",
        "Add a file",
    ]


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment with the small package; its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    write(site, ORIGINAL)
    record = "".join(
        f"{path},,\n" for path in [*ORIGINAL, "small-1.0.dist-info/METADATA", "small-1.0.dist-info/RECORD"]
    )
    metadata = "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n"
    write(site / "small-1.0.dist-info", {"METADATA": metadata.encode(), "RECORD": record.encode()})
    return site


def test_installed_package_there_and_back(patches, environment, checkout, tmp_path):
    python = str(tmp_path / "venv" / "bin" / "python")
    before = read(environment)
    assert run("apply", "--patches", patches, python=python).returncode == 0
    after = read(environment)
    assert {path: after[path] for path in patched(checkout)} == patched(checkout)
    # pip removes what is in this list.
    assert b"top/patches.diff,,\ntop/pkg/new.py,,\n" in after["small-1.0.dist-info/RECORD"]
    assert run("status", "--patches", patches, python=python).returncode == 0
    assert run("revert", "--patches", patches, python=python).returncode == 0
    assert read(environment) == before
    assert not list(environment.rglob(RECORD))


def test_patched_code_is_what_runs_even_within_the_second(patches, environment, tmp_path):
    python = str(tmp_path / "venv" / "bin" / "python")
    load = ["env", "-u", "PYTHONDONTWRITEBYTECODE", python, "-c", "import top.pkg.b as b; print(hasattr(b, 'b20'))"]
    assert subprocess.run(load, capture_output=True, text=True).stdout == "True\n"
    assert list(environment.glob("top/pkg/__pycache__/b.*.pyc"))
    run("apply", "--patches", patches, python=python)
    assert not list(environment.glob("top/pkg/__pycache__/b.*.pyc"))
    assert subprocess.run(load, capture_output=True, text=True).stdout == "False\n"


def test_other_environments_and_versions_are_refused(patches, environment, tmp_path, monkeypatch):
    python = str(tmp_path / "venv" / "bin" / "python")
    other_version = run("status", "--patches", patches, python=python)
    assert other_version.returncode == 1
    shutil.copytree(environment / "small-1.0.dist-info", environment / "small-2.0.dist-info")
    shutil.rmtree(environment / "small-1.0.dist-info")
    (environment / "small-2.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 2.0\n")
    done = run("apply", "--patches", patches, python=python)
    assert done.returncode == 2
    assert "small 2.0 is installed, small is for 1.0, and no patches are for 2.0: install small==1.0" in done.stderr
    missing = run("apply", "--patches", patches)
    assert missing.returncode == 2
    assert "small is not installed" in missing.stderr
    # The machine's own environment: the running prefix is the base one, or the package lies outside of it.
    series = megatron_core()
    for prefix in (sys.base_prefix, str(tmp_path)):
        monkeypatch.setattr(sys, "prefix", prefix)
        with pytest.raises(PatchError, match="not inside a virtual environment"):
            releases.find_target(series, None, allow_global=False)
    assert releases.find_target(series, None, allow_global=True).version == series.pins["Version"]


# All or nothing


def test_a_hunk_that_does_not_match_changes_nothing_and_is_named(patches, tree):
    b = tree / "top/pkg/b.py"
    b.write_bytes(b.read_bytes().replace(b"b22 = 22", b"b22 = 0"))
    before = read(tree)
    done = run("apply", "--patches", patches, "--tree", tree, "small")
    assert done.returncode == 2
    assert (
        "change-it-again-and-another.patch: patch failed: top/pkg/b.py:18; top/pkg/b.py: patch does not apply"
        in done.stderr
    )
    assert "nothing was changed" in done.stderr
    assert read(tree) == before
    status = run("status", "--patches", patches, "--tree", tree, "small")
    assert status.returncode == 1
    assert status.stdout.startswith("small 1.0 in ")
    assert ": does not fit\n      change-it-again-and-another.patch: patch failed: top/pkg/b.py:18" in status.stdout


def test_an_edit_elsewhere_is_an_error_in_a_package_and_a_note_in_a_tree(patches, tree, environment, tmp_path):
    for root in (tree, environment):
        (root / "top/pkg/b.py").write_bytes(b"# edited\n" + ORIGINAL["top/pkg/b.py"])
    done = run("apply", "--patches", patches, "--tree", tree, "small")
    assert done.returncode == 0
    assert "its files are not those of 1.0" in done.stdout
    done = run("apply", "--patches", patches, python=str(tmp_path / "venv" / "bin" / "python"))
    assert done.returncode == 2
    assert "differs from upstream's 1.0" in done.stderr
    assert f"Reinstall it: {releases.reinstall('small', '1.0')}\n" in done.stderr


def test_two_at_once_do_not_disturb_each_other(patches, tree, checkout):
    command = [sys.executable, *COMMAND, "apply", "--patches", str(patches), "--tree", str(tree), "small"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(process.communicate(timeout=PATIENCE_S)[0].split(": ")[1].split(",")[0] for process in both)
    assert said == ["already applied", "already applied", "applied"]
    assert read(tree) == patched(checkout)


# check


def check(patches: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    return run("check", "--patches", patches, "--archive", tmp_path / "small-1.0-py3-none-any.whl")


def test_check_proves_the_series_on_the_archive(patches, tmp_path):
    for path in (patches / "small").glob("*.patch"):  # Name a test that there is.
        path.write_text(path.read_text().replace("tests/test_a.py", "tests/patches/test_patches_tool.py"))
    done = check(patches, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "small: 3 patches, 3 files: apply to small-1.0-py3-none-any.whl and revert exactly\n"


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "add-a-file.patch",
            "Drop-When: never\n",
            "",
            "add-a-file.patch: the last paragraph of the message lacks Drop-When",
        ),
        ("add-a-file.patch", "Because.\n\n", "", "does not say why"),
        ("add-a-file.patch", "[PATCH]", "[PATCH 3/3]", "must exist and carry no number"),
        ("add-a-file.patch", "\n---\n", "\n", "git format-patch form"),
        ("UPSTREAM", "Tree-Before: ", "Tree-Before: 0", "UPSTREAM says Tree-Before: 0"),
        ("add-a-file.patch", "top/pkg", "elsewhere", "files outside of top/: elsewhere/new.py"),
        ("add-a-file.patch", "top/pkg", "top/../..", "files outside of top/: top/../../new.py"),
        ("add-a-file.patch", "new file mode 100644\n", "rename from x\n", "rename from x: only changes of text"),
        (
            "change-one-file-twice.patch",
            " a1 = 1\n",
            " a1 = 9\n",
            "change-one-file-twice.patch: patch failed: top/pkg/a.py:1",
        ),
        ("series", "add-a-file.patch", "", "disagree about: add-a-file.patch"),
        ("series", "add-a-file.patch", "add-a-file.patch\nadd-a-file.patch", "disagree about: add-a-file.patch"),
        ("UPSTREAM", "Root: top\n", "", "lacks Root"),
        ("UPSTREAM", "Root: top\n", "Root: top\nTypo: x\n", "line 6: Typo: repeated or unknown"),
        ("UPSTREAM", "small-1.0-py3", "small-9.9-py3", "is not pinned in small/UPSTREAM; known archives: small-9.9"),
        ("UPSTREAM", "sha256:", "sha256:0", "expected `Archive: FILE sha256:DIGEST`"),
    ],
)
def test_check_refuses_what_is_inconsistent(patches, tmp_path, file, old, new, message):
    for path in (patches / "small").glob("*.patch"):
        edit(path, "tests/test_a.py", "tests/patches/test_patches_tool.py")
    edit(patches / "small" / file, old, new)
    done = check(patches, tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_check_wants_the_tests_and_the_archive_that_are_named(patches, tmp_path):
    assert "tests named in trailers do not exist: tests/test_a.py" in check(patches, tmp_path).stderr
    for path in (patches / "small").glob("*.patch"):
        edit(path, "tests/test_a.py", "tests/patches/test_patches_tool.py")
    with zipfile.ZipFile(tmp_path / "small-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("top/pkg/evil.py", b"")
    done = check(patches, tmp_path)
    assert done.returncode == 2
    assert "UPSTREAM pins" in done.stderr


def test_a_run_notes_what_is_applied(patches):
    (told, *of_patches) = installed_status(REPOSITORY / "patches")
    series = megatron_core()
    assert told.startswith(f"{series.name} {series.pins['Version']} in ")
    noted = [line for line in of_patches if line.startswith(("  + ", "  - "))]
    marks = {patch.name: "-" if patch.purpose == "schedule" else "+" for patch in series.patches}
    noted = [line.removesuffix(" (for a whole checkout)") for line in noted]
    assert noted == [f"  {marks[patch.name]} {patch.name}: {patch.subject}" for patch in series.patches]
    # What cannot be read ends no run: `small` is not installed here.
    (problem,) = installed_status(patches)
    assert problem.startswith("unknown: small is not installed")


def test_unknown_names_are_refused(patches, tree):
    done = run("status", "--patches", patches, "smal")
    assert (done.returncode, done.stderr) == (2, "error: no such upstream: smal; there are: small\n")
    done = run("apply", "--patches", patches, "--tree", tree / "top", "small")
    assert done.returncode == 2
    assert "there is no top/ in it" in done.stderr
