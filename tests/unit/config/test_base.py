"""What every section of a recipe shares: nothing is converted, short forms, names of the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import pytest
from huggingface_hub import constants
from pydantic import ValidationError

from megatron_rl.config import load_recipe
from megatron_rl.config.base import (
    AnyPath,
    OffCount,
    Section,
    Short,
    ShortList,
    cached,
    how_to_download,
    is_function_path,
)
from megatron_rl.errors import InputError
from megatron_rl.run.prepare import check_recipe


class Part(Section):
    name: str | None
    size: int = 1


class Whole(Section):
    part: Annotated[Part, Short("name", or_null=True)] = Part(name="usual")
    parts: Annotated[list[Part], ShortList("name")] = []
    share: float = 0.5
    on: bool = False
    path: AnyPath = Path()
    every: OffCount = 3


def test_a_short_form_stands_for_the_full_one():
    assert Whole(part="a").part == Part(name="a") == Whole(part={"name": "a"}).part
    assert Whole(part=None).part == Part(name=None)


def test_a_list_may_be_written_as_one_item_or_null():
    a, b = Part(name="a"), Part(name="b", size=2)
    assert Whole(parts="a").parts == [a]
    assert Whole(parts={"name": "b", "size": 2}).parts == [b]
    assert Whole(parts=["a", {"name": "b", "size": 2}]).parts == [a, b]
    assert Whole(parts=None).parts == []


@pytest.mark.parametrize(
    "keys",
    [{"share": "0.5"}, {"share": float("nan")}, {"on": 1}, {"share": True}, {"unknown": 1}, {"part": {"nam": "a"}}],
)
def test_nothing_is_converted_and_no_key_is_passed_over(keys):
    with pytest.raises(ValidationError):
        Whole(**keys)


def test_null_is_a_count_of_0():
    assert (Whole(every=None).every, Whole().every) == (0, 3)
    with pytest.raises(ValidationError):
        Whole(every=-1)


def test_a_path_is_written_as_text():
    assert Whole(path="a/b").path == Path("a/b")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("my/reward.py:score", True),
        ("reward.py:_score1", True),
        ("reward.py", False),
        ("reward:score", False),
        ("reward.py:1score", False),
        (".py:score", False),
        (7, False),
    ],
)
def test_a_function_is_a_file_and_a_name(text, is_one):
    assert is_function_path(text) == is_one


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that puts files into an empty cache, as `hf download` lays them out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(kind: str, name: str, **files: str):
        repo = tmp_path / "hub" / f"{kind}s--{name.replace('/', '--')}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        for file, text in files.items():
            blob, link = repo / "blobs" / file.replace("/", "-"), repo / "snapshots" / COMMIT / file
            blob.parent.mkdir(exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(text)
            link.symlink_to(blob)
        return repo / "snapshots" / COMMIT

    return put


def recipe(tmp_path, model: str, train: str):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"name: hub\nnum_steps: 1\nmodel: {{path: {model}}}\n"
        f"data: {{train: [{{path: {train}}}]}}\nbatch: {{prompts: 2}}\nrollout: {{num_samples: 2}}\n"
    )
    return load_recipe(file)


def test_a_recipe_names_a_model_and_a_dataset_of_the_cache(tmp_path, hub):
    model = hub("model", "Qwen/Qwen3-30B-A3B-Base", **{"config.json": "{}"})
    data = hub("dataset", "org/math", **{"README.md": "", "data/train.jsonl": '{"problem": "1", "answer": "1"}\n'})
    loaded = recipe(tmp_path, "Qwen/Qwen3-30B-A3B-Base", "org/math")
    assert loaded.model.path == model  # with its commit: the run's record says which one it was
    assert loaded.data.train[0].path == str(data / "data/train.jsonl")
    assert cached(f"Qwen/Qwen3-30B-A3B-Base@{COMMIT}", "model") == model
    assert cached("Qwen/Qwen3-30B-A3B-Base@another", "model") is None


def test_a_folder_of_that_name_counts_first(tmp_path, hub):
    hub("model", "org/net", **{"config.json": "{}"})
    (tmp_path / "org" / "net").mkdir(parents=True)
    assert recipe(tmp_path, "org/net", "x.jsonl").model.path == tmp_path / "org" / "net"


def test_a_dataset_of_several_files_wants_the_file_named(tmp_path, hub):
    folder = hub("dataset", "org/math", **{"a/test.parquet": "", "a/train.parquet": ""})
    with pytest.raises(InputError, match=r"2 files of data; write org/math/FILE, with one of: a/test.parquet, a/train"):
        recipe(tmp_path, "model", "org/math")
    with pytest.raises(InputError, match=r"no file b.parquet; write org/math/FILE, with one of: a/test.parquet"):
        recipe(tmp_path, "model", "org/math/b.parquet")
    assert recipe(tmp_path, "model", "org/math/a/train.parquet").data.train[0].path == str(folder / "a/train.parquet")


def test_what_the_cache_does_not_hold_comes_with_the_command_that_brings_it(tmp_path, hub):
    with pytest.raises(InputError) as caught:
        check_recipe(recipe(tmp_path, "Qwen/Qwen3-30B-A3B-Base", "org/math"))
    assert "`hf download Qwen/Qwen3-30B-A3B-Base`" in str(caught.value)
    with pytest.raises(InputError, match=r"into its cache with `hf download other/net`"):
        check_recipe(recipe(tmp_path, "other/net", "org/math"))
    files = {
        "org/math@v2/a.jsonl": "hf download org/math a.jsonl --repo-type dataset --revision v2",
        "data/dapo.parquet": "hf download OWNER/NAME dapo.parquet --repo-type dataset",
        "org/math": "hf download org/math --repo-type dataset",
    }
    assert {file: how_to_download(file, "dataset") for file in files} == files


@pytest.mark.parametrize("text", ["/a/b", "./a/b", "a", "a/b/c", "a b/c", "a/../b", ""])
def test_paths_are_no_names(text, hub):
    assert cached(text, "model") is None
    assert how_to_download(text, "model") == ""
