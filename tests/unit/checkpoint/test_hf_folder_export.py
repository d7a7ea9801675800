"""An exported folder serves what the run sampled: dtype, chat templates, ends of responses."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from megatron_rl.checkpoint.hf_folder import HFFolder, Sampling, copy_companions, write_hf_checkpoint
from tests.support.families import save_family
from tests.support.tiny import MODEL

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
