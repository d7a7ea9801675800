"""Hugging Face folders: which files count for learner, engine and converter, and what an export holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_rl.checkpoint import hf_folder
from megatron_rl.checkpoint.hf_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    HFFolder,
    Sampling,
    check_weights,
    copy_companions,
    model_shapes,
    model_weights,
    read_stop_token_ids,
    write_hf_checkpoint,
)
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from tests.support.families import save_family, save_wrapper
from tests.support.plain_training import load
from tests.support.rounding import bound_from_double
from tests.support.tiny import MODEL


def write(folder: Path, files: dict[str, dict[str, float]], index: dict[str, str] | None = None) -> Path:
    """``files``: file name → tensor name → value of its two elements."""
    for file, tensors in files.items():
        save_file({name: torch.full((2,), value) for name, value in tensors.items()}, folder / file)
    if index is not None:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder


def values(folder: HFFolder) -> dict[str, float]:
    return {name: float(tensor[0]) for name, tensor in folder.items()}


def test_a_stray_file_beside_an_index_is_not_read(tmp_path):
    """A left-over file sorts behind the real ones; a reader of all files would take its tensors."""
    files = {
        "model-00001.safetensors": {"a": 1.0},
        "model-00002.safetensors": {"b": 2.0},
        "old.safetensors": {"a": 9.0},
    }
    index = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    folder = HFFolder(write(tmp_path, files, index))
    assert values(folder) == {"a": 1.0, "b": 2.0}
    assert float(folder("a")[0]) == 1.0
    assert [file.name for file in folder.files] == ["model-00001.safetensors", "model-00002.safetensors"]


def test_a_tensor_that_two_files_hold_is_ambiguous(tmp_path):
    """vLLM loads all tensors of every file that the index names, so the later file's would win."""
    files = {"x.safetensors": {"a": 1.0, "b": 2.0}, "y.safetensors": {"a": 9.0, "c": 3.0}}
    write(tmp_path, files, {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"})
    with pytest.raises(InputError, match=r"x.safetensors and y.safetensors both hold a; .* names x.safetensors"):
        HFFolder(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_read_with_its_file(tmp_path):
    folder = HFFolder(write(tmp_path, {"x.safetensors": {"a": 1.0, "b": 2.0}}, {"a": "x.safetensors"}))
    assert values(folder) == {"a": 1.0, "b": 2.0}


def test_a_single_file_needs_no_index(tmp_path):
    folder = HFFolder(write(tmp_path, {SINGLE_FILE: {"a": 1.0}}))
    assert folder.shapes() == {"a": (2,)}
    assert folder.dtype("a") == torch.float32
    assert "a" in folder
    assert "b" not in folder
    with pytest.raises(InputError, match="has no tensor b; is it complete"):
        folder("b")


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({}, None, f"holds neither {SINGLE_FILE} nor {INDEX_FILE}"),
        ({"part.safetensors": {"a": 1.0}}, None, f"holds neither {SINGLE_FILE}"),
        ({SINGLE_FILE: {"a": 1.0}, "old.safetensors": {"a": 9.0}}, None, "also old.safetensors, and no .* says which"),
        ({}, {"a": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"x.safetensors": {"b": 1.0}}, {"a": "x.safetensors"}, "names x.safetensors for a, which is not in it"),
    ],
)
def test_what_is_missing_or_ambiguous_is_an_error(tmp_path, files, index, message):
    with pytest.raises(InputError, match=message):
        HFFolder(write(tmp_path, files, index))


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"weight_map": [1]}',
        '{"weight_map": null}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        "[" * 200000,
        "[]",
        '{"weight_map": {"a": "../x.safetensors"}}',
    ],
)
def test_an_index_of_another_kind_is_an_error(tmp_path, text):
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(InputError, match=INDEX_FILE):
        HFFolder(tmp_path)


def folder_of(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    """A copy of ``model`` whose tensors ``change`` altered, with other keys of config.json."""
    tensors = load_file(model / SINGLE_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))
    return folder


def check(folder: Path) -> list[str]:
    return check_weights(HFFolder(folder), read_architecture(folder))


def scaled_fp8(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[name.replace("weight", "weight_scale_inv")] = torch.ones(1, 1)


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


def cast(part: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items() if part in n})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled_fp8, r"no place for: model.layers.0.self_attn.q_proj.weight_scale_inv"),
        (scaled_fp8, r"holds F8_E4M3 \(model.layers.0.self_attn.q_proj.weight\); allowed: F32, F16, BF16"),
        (cast("gate_proj", torch.int8), r"holds I8 \(.* and 27 more\)"),
        (cast("norm", torch.float64), r"holds F64"),
        (add("model.layers.0.self_attn.o_proj.bias", 128), r"no place for: model.layers.0.self_attn.o_proj.bias"),
        (add("model.layers.0.mlp.shared_expert_gate.weight", 1, 128), "no place for"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"lacks lm_head.weight \(config.json says tie_word_embeddings"),
        (
            lambda tensors: tensors.pop("model.layers.3.mlp.experts.7.up_proj.weight"),
            "lacks model.layers.3.mlp.experts.7",
        ),
        (add("model.norm.weight", 64), r"model.norm.weight has shape \(64,\), config.json says \(128,\)"),
        (add("model.norm.weight", 128, 1), r"model.norm.weight has shape \(128, 1\)"),
    ],
)
def test_a_change_of_one_tensor_is_refused(tmp_path, change, said):
    with pytest.raises(InputError, match=said):
        check(folder_of(MODEL, tmp_path, change))


def test_tensors_that_every_engine_computes_anew_pass(tmp_path):
    change = add("model.layers.1.self_attn.rotary_emb.inv_freq", 16)
    assert check(MODEL) == []
    (note,) = check(folder_of(MODEL, tmp_path, change))
    assert "rotary_emb.inv_freq: stored, and computed anew" in note
    a = read_architecture(tmp_path)
    assert dict(model_weights(HFFolder(tmp_path), a)).keys() == model_shapes(a).keys()


def test_a_stored_tied_head_passes_where_it_is_the_embedding(tmp_path):
    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    (note,) = check(folder_of(MODEL, tmp_path, tie, tie_word_embeddings=True))
    assert "with the same values" in note
    with pytest.raises(InputError, match=r"ties lm_head.weight to the embedding, but the two differ"):
        check(folder_of(MODEL, tmp_path, lambda tensors: None, tie_word_embeddings=True))


@pytest.mark.parametrize("place", [0, 31, 32, 127])
def test_a_stored_tied_head_is_compared_to_its_last_row(tmp_path, monkeypatch, place):
    monkeypatch.setattr(hf_folder, "_COMPARED_ROWS", 32)

    def almost_tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][place, -1] += 1.0

    with pytest.raises(InputError, match=r"ties lm_head.weight to the embedding, but the two differ"):
        check(folder_of(MODEL, tmp_path, almost_tie, tie_word_embeddings=True))


@pytest.mark.parametrize("name", ["consolidated.safetensors", "hf_quant_config.json", "adapter_config.json"])
def test_a_file_that_an_engine_would_obey_is_refused(tmp_path, name):
    folder = folder_of(MODEL, tmp_path, lambda tensors: None)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(HFFolder(MODEL).names, SINGLE_FILE)}))
    assert check(folder) == []
    (folder / name).write_text("{}")
    with pytest.raises(InputError, match=f"holds {name}"):
        check(folder)


def test_files_that_did_not_arrive_whole_are_errors(tmp_path):
    file, whole = tmp_path / SINGLE_FILE, (MODEL / SINGLE_FILE).read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole + b"x", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot be read .* is the download complete"):
            HFFolder(tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    with pytest.raises(InputError, match=r"a pointer of Git LFS; `git lfs pull`"):
        HFFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"[]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b"{", "not valid JSON"),
        (b'{"a":"\xe9"}', "not valid JSON"),
        (b"[" * 200000, "not valid JSON"),
        (
            b'{"eos_token_id": "<eos>"}',
            r"eos_token_id: '<eos>'; allowed: the number of a token below vocab_size \(128\)",
        ),
        (b'{"eos_token_id": [2, 500]}', r"eos_token_id: \[2, 500\]"),
        (b'{"eos_token_id": [[2]]}', r"eos_token_id: \[\[2\]\]"),
        (b'{"eos_token_id": []}', r"eos_token_id: \[\]"),
        (b'{"eos_token_id": true}', "eos_token_id: True"),
        (b'{"eos_token_id": 2.0}', "eos_token_id: 2.0"),
        (b'{"eos_token_id": -1}', "eos_token_id: -1"),
        (b'{"eos_token_id": 128}', "eos_token_id: 128"),
        (b'{"eos_token_id": {"a": 1}}', "eos_token_id: {'a': 1}"),
    ],
)
def test_ends_of_sequences_that_are_no_tokens_are_errors(tmp_path, content, said):
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_stop_token_ids(tmp_path)


def test_layers_for_guesses_of_later_tokens_are_named_and_not_loaded(tmp_path):
    model = save_family(tmp_path / "model", "glm4_moe")
    tensors = load_file(model / SINGLE_FILE)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, model / SINGLE_FILE)
    with pytest.raises(InputError, match=r"no place for: model\.layers\.3\.eh_proj\.weight"):
        check_weights(HFFolder(model), read_architecture(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (note,) = check_weights(HFFolder(model), read_architecture(model))
    assert note == "model.layers.3.eh_proj.weight: layers for guesses of later tokens; neither loaded nor trained"


def test_a_tensor_of_all_experts_is_one_for_each_until_it_is_written(tmp_path):
    model = save_family(tmp_path / "model", "gpt_oss")
    folder, a = HFFolder(model), read_architecture(model)
    stored = load_file(model / SINGLE_FILE)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert name not in folder
    for expert in range(4):
        part = f"model.layers.1.mlp.experts.{expert}.gate_up_proj"
        assert torch.equal(folder(part), stored[name][expert])
        assert folder.shape(part) == tuple(stored[name].shape[1:])
        assert (folder.dtype(part), folder.stored_dtype(part)) == (torch.float32, "F32")
    assert check_weights(folder, a) == []
    write_hf_checkpoint(tmp_path / "again", model_weights(folder, a), model, file_bytes=2**17)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    again = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)


def test_an_expert_that_a_tensor_of_all_lacks_is_named(tmp_path):
    model = save_family(tmp_path / "model", "gpt_oss")
    tensors = load_file(model / SINGLE_FILE)
    name = "model.layers.0.mlp.experts.down_proj_bias"
    save_file(tensors | {name: tensors[name][:3].clone()}, model / SINGLE_FILE)
    with pytest.raises(InputError, match=r"lacks model\.layers\.0\.mlp\.experts\.3\.down_proj_bias"):
        check_weights(HFFolder(model), read_architecture(model))


def test_the_text_model_of_a_wrapper_is_read_and_written_by_itself(tmp_path):
    """Under transformers' names of that model; what reads pictures, and guesses of later tokens, are named."""
    import transformers

    model = save_wrapper(tmp_path / "model")
    folder, a = HFFolder(model), read_architecture(model)
    pictures, later = sorted(check_weights(folder, a), key=lambda note: "mtp." in note)
    assert "the part that reads pictures; neither loaded nor trained" in pictures
    assert later.startswith("mtp.layers.0.mlp.experts.0.gate_proj.weight, ")
    stored = load_file(model / SINGLE_FILE)
    whole = stored["model.language_model.layers.1.mlp.experts.gate_up_proj"]
    for part, rows in (("gate_proj", whole[2, :32]), ("up_proj", whole[2, 32:])):
        name = f"model.layers.1.mlp.experts.2.{part}.weight"
        assert torch.equal(folder(name), rows)
        assert folder.shape(name) == tuple(rows.shape)
    assert read_stop_token_ids(model) == [2]
    write_hf_checkpoint(tmp_path / "again", model_weights(folder, a), model)
    assert read_architecture(tmp_path / "again") == a
    assert check_weights(HFFolder(tmp_path / "again"), a) == []
    wrapper = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(model)
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(text).__name__ == "Qwen3_5MoeForCausalLM"
    weights = {name.removeprefix("language_model."): tensor for name, tensor in wrapper.model.state_dict().items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in text.model.state_dict().items())
    tokens = torch.arange(3, 40)[None]
    logits, others = (model(tokens).logits.detach() for model in (wrapper, text))
    double = load(tmp_path / "again", torch.float64)(tokens).logits.detach()
    assert (logits - others).abs().max() <= 2 * bound_from_double(others, double, text.config.hidden_size)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, "architectures: "),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "text_config: "),
        ({"text_config": None}, "text_config: None"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: True, but False in text_config"),
        ({"tie_word_embeddings": True, "text_config": {}}, "tie_word_embeddings: True, but False in text_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_key_beside_the_text_model_that_matters_is_refused(change, said, tmp_path):
    kept = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {"tie_word_embeddings": False}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", **kept, **change}))
    with pytest.raises(InputError) as refused:
        read_architecture(tmp_path)
    assert said in str(refused.value)


NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.fixture(scope="module", params=["glm4_moe", "bailing_moe"])
def model(request, tmp_path_factory):
    return save_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("dtype", NAMES)
def test_config_names_the_dtype_of_the_weights_whatever_that_of_buffers(model, dtype, tmp_path):
    read = HFFolder(model)
    bias = {name for name in read.names if name.endswith(("correction_bias", "gate.expert_bias"))}
    assert bias
    weights = [(name, tensor.float() if name in bias else tensor.to(dtype)) for name, tensor in read.items()]
    write_hf_checkpoint(tmp_path / "hf", weights, model)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {config[key] for key in ("dtype", "torch_dtype") if key in config} == {NAMES[dtype]}


SOURCES = {"none": {}, "one": {"chat_template.jinja": "own"}, "in its config": {"tokenizer_config.json": "own"}}

NAMED = {"additional_chat_templates/tool_use.jinja": "tools"}


@pytest.mark.parametrize("named", [{}, NAMED])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("trained", [None, "of the run"])
def test_templates(source, named, trained, tmp_path):
    model, hf = tmp_path / "model", tmp_path / "hf"
    copy_companions(MODEL, model)
    for name, text in (SOURCES[source] | named).items():
        (model / name).parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            text = json.dumps(json.loads((model / name).read_text()) | {"chat_template": text})
        (model / name).write_text(text)
    if trained is not None:
        (tmp_path / "run.jinja").write_text(trained)
    given = "auto" if trained is None else str(tmp_path / "run.jinja")
    write_hf_checkpoint(hf, HFFolder(MODEL).items(), model, sampling=Sampling.of(given, None))
    found, before = (AutoTokenizer.from_pretrained(folder).chat_template for folder in (hf, model))
    if trained is None:
        assert found == before
    elif named:
        assert found == {"default": trained, "tool_use": "tools"}
    else:
        assert found == trained


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize("stop", [None, [5], [5, 7]])
def test_ends_of_responses(has_file, stop, tmp_path):
    model = tmp_path / "model"
    copy_companions(MODEL, model)
    file = model / "generation_config.json"
    before = json.loads(file.read_text()) | {"max_length": 9} if has_file else {}
    file.write_text(json.dumps(before)) if has_file else file.unlink()
    write_hf_checkpoint(tmp_path / "hf", HFFolder(MODEL).items(), model, sampling=Sampling.of("none", stop))
    file = tmp_path / "hf" / "generation_config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    assert found == before | ({} if stop is None else {"eos_token_id": stop})
