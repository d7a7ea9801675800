"""Functions of users: found without running anything, imported once, and named in errors."""

from __future__ import annotations

import pickle
import sys

import pytest

from megatron_rl.errors import InputError
from megatron_rl.process.user_functions import check_function, load_function


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A function that writes the file `ran` beside it when it is imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "import pathlib\n"
        "pathlib.Path(__file__).with_name('ran').open('a').write('x')\n"
        "def double(x): return 2 * x\n"
        "number = 7\n"
    )
    yield path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_check_runs_nothing(file):
    check_function(f"{file}:double", "reward.function")
    assert not file.with_name("ran").exists()


def test_a_file_is_imported_once_and_its_function_can_be_sent(file):
    function = load_function(f"{file}:double")
    assert function(4) == 8
    assert load_function(f"{file}:double") is function
    assert pickle.loads(pickle.dumps(function)) is function
    assert file.with_name("ran").read_text() == "x"


def test_a_module_is_found_by_its_name():
    check_function("math:sqrt", "reward.function")
    assert load_function("math:sqrt")(9.0) == 3.0


def test_a_value_is_no_function(file):
    with pytest.raises(TypeError, match="number is a int, not a function"):
        load_function(f"{file}:number")


def test_a_file_with_the_name_of_another_module_does_not_replace_it(file):
    other = file.with_name("json.py")
    other.write_text("def double(x): return -x\n")
    assert load_function(f"{other}:double")(4) == -4
    assert not hasattr(sys.modules["json"], "double")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{file}:duoble", "defines no function 'duoble' .*did you mean double\\?"),
        ("{file}x.py:double", "there is no file"),
        ("no_such_module_here:double", "there is no module 'no_such_module_here'; is its folder on PYTHONPATH\\?"),
    ],
)
def test_what_is_not_there_is_named(file, name, said):
    with pytest.raises(InputError, match=f"^reward.function .*{said}"):
        check_function(name.format(file=file), "reward.function")


def test_a_file_that_is_no_python_is_named(file):
    file.write_text("def double(x:\n")
    with pytest.raises(InputError, match="is not valid Python"):
        check_function(f"{file}:double", "reward.function")
