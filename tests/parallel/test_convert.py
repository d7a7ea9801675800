"""Conversion of checkpoints: both ways, between layouts, bit for bit; and what it refuses."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint import conversion
from megatron_rl.errors import InputError
from tests.parallel.pool import Jobs
from tests.support.tiny import MODEL
from tests.support.zygote import run_command

MIXED = {"tensor": 2, "expert": 2, "pipeline": 2}
EXPERTS_SPLIT = {"tensor": 2, "expert_tensor": 2, "pipeline": 2}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [n for n in got if got[n].dtype != wanted[n].dtype or not torch.equal(got[n], wanted[n])] == []


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The tiny model with other weights: a learner that starts from the tiny model must get them from a conversion."""
    folder = tmp_path_factory.mktemp("other")
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    moved = {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in tensors(MODEL).items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A dense model with biases, tied embeddings and a vocabulary that two ranks cannot share evenly."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(other, dense, tmp_path_factory):
    """Checkpoints that four ranks wrote, under several layouts, of weights that were converted for them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    conversion.to_megatron(other, folder / "other")
    conversion.to_megatron(dense, folder / "dense")

    def job(model: Path, name: str, parallel: dict) -> tuple[str, dict]:
        target = folder / "-".join([name, *parallel])
        sections = {"learner": {"dtype": "fp32", "parallel": parallel}}
        return "load_and_save", {"model": str(model), "weights": str(folder / name), "folder": str(target), **sections}

    jobs = {
        "mixed": job(MODEL, "other", MIXED),
        "experts split": job(MODEL, "other", EXPERTS_SPLIT),
        "dense": job(dense, "dense", {"tensor": 2, "pipeline": 2}),
        "trained": (
            "train_and_save",
            {"folder": str(folder / "bf16"), "learner": {"dtype": "bf16", "parallel": MIXED}},
        ),
    }
    with Jobs({4: jobs}, module="tests.parallel.programs.convert") as results:
        yield results.of_rank(0)


@pytest.mark.parametrize("layout", ["mixed", "experts split"])
def test_weights_survive_both_conversions_and_a_change_of_layout(layout, saved, other, tmp_path):
    digests = conversion.to_hf(Path(saved[layout]), tmp_path / "hf", MODEL)
    assert_equal(tensors(tmp_path / "hf"), tensors(other))
    # One hash for equal weights, whichever format they lie in.
    again = conversion.to_megatron(tmp_path / "hf", tmp_path / "megatron")
    assert conversion.total(again) == conversion.total(digests)
    new = tmp_path / "new"
    new.touch()
    assert {file.stat().st_mode for file in (tmp_path / "hf").glob("*.safetensors")} == {new.stat().st_mode}
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()


def test_dense_model_through_the_command_line(saved, dense, tmp_path):
    arguments = ["convert", "to-hf", saved["dense"], str(tmp_path / "out"), "--model", str(dense)]
    done = run_command("megatron_rl", arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "read back and equal" in done.stdout
    assert_equal(tensors(tmp_path / "out"), tensors(dense))


def test_a_trained_checkpoint_gives_its_weights_or_its_masters(saved, tmp_path):
    path, own, masters = saved["trained"]
    conversion.to_hf(Path(path), tmp_path / "own", MODEL)
    assert_equal(tensors(tmp_path / "own"), own)
    conversion.to_hf(Path(path), tmp_path / "masters", MODEL, master=True)
    assert_equal(tensors(tmp_path / "masters"), masters)
    assert any((own[name].float() != masters[name]).any() for name in own)
    conversion.to_hf(Path(path), tmp_path / "rounded", MODEL, master=True, dtype=torch.float16)
    assert_equal(tensors(tmp_path / "rounded"), {name: tensor.half() for name, tensor in masters.items()})
    for folder, dtype in (("own", "bfloat16"), ("masters", "float32"), ("rounded", "float16")):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == dtype


# What is refused, before anything has the target's name


def test_a_broken_source_is_refused(tmp_path):
    shutil.copytree(MODEL, tmp_path / "hf")
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    kept = {each: tensor for each, tensor in tensors(MODEL).items() if each != name}
    save_file(kept, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"lacks {name}"):
        conversion.to_megatron(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_another_architecture_is_refused(saved, dense, tmp_path):
    with pytest.raises(InputError, match=r"weights of a qwen2 as config.json describes it: lacks decoder\.layers\.0"):
        conversion.to_hf(Path(saved["mixed"]), tmp_path / "out", dense)
    with pytest.raises(InputError, match="holds no master weights"):
        conversion.to_hf(Path(saved["mixed"]).parents[1] / "other", tmp_path / "out", MODEL, master=True)
    with pytest.raises(InputError, match="expected a run's checkpoint"):
        conversion.to_hf(MODEL, tmp_path / "out", MODEL)


@pytest.mark.parametrize("kind", ["of a run", "of to-megatron"])
def test_an_altered_checkpoint_is_refused(kind, saved, other, tmp_path):
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(saved["mixed"] if kind == "of a run" else conversion_of(other, tmp_path / "megatron"), copy)
    shard = max(copy.glob("__*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match=rf"copy: {shard.name} has another SHA-256; this checkpoint is not what was"):
        conversion.to_hf(copy, out, MODEL)
    shard.unlink()
    with pytest.raises(InputError, match=f"{shard.name} is missing"):
        conversion.to_hf(copy, out, MODEL)
    if kind == "of a run":
        (copy / "manifest.json").unlink()
        with pytest.raises(InputError, match=r"no manifest\.json"):
            conversion.to_hf(copy, out, MODEL)
    assert not out.exists()


def conversion_of(hf: Path, target: Path) -> Path:
    conversion.to_megatron(hf, target)
    return target


def test_no_room_no_overwriting_and_no_silent_damage(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="exists already"):
        conversion.to_megatron(MODEL, tmp_path / "there")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(2**20, 0, 2**20))
        with pytest.raises(InputError, match=r"needs 0\.0 GiB, .* free; choose another place"):
            conversion.to_megatron(MODEL, tmp_path / "out")
    monkeypatch.setattr(conversion, "join_qkv", lambda parts, a: torch.cat(parts))
    with pytest.raises(InputError, match=r"differs from what was read: model\.layers\.0\.self_attn"):
        conversion.to_megatron(MODEL, tmp_path / "out")
    assert not (tmp_path / "out").exists()
