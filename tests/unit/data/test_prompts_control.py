"""Chat templates: a text that already is a prompt, a template that opens no turn, names without default, tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataSourceConfig, PromptConfig
from megatron_rl.data import load_prompts, load_tokenizer
from megatron_rl.errors import InputError

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny" / "model"
BODY = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}%s{%% endif %%}"
TEMPLATES = {  # of chat models, by what a message and the answer's turn look like
    "chatml": BODY % ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n"),
    "thinking": BODY % ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n<think>\n"),
    "words": BODY % ("{{ m.role }}: {{ m.content }}\n", "assistant: "),
    "gemma": BODY % ("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n", "<start_of_turn>model\n"),
    "mistral": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{% endif %}{% endfor %}",
}


@pytest.fixture
def prompt_of(tmp_path):
    """(question, chat template, settings of data.prompt, columns of the row) → its prompt."""

    def make(question, template=None, columns=None, **config):
        tokenizer = load_tokenizer(str(TINY))
        tokenizer.chat_template = template
        file = tmp_path / "x.jsonl"
        file.write_text(json.dumps({"prompt": question, "answer": "1", **(columns or {})}) + "\n")
        return load_prompts(DataSourceConfig(path=str(file)), tokenizer, PromptConfig(max_length=4000, **config))[0]

    return make


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.sampled_from(sorted(TEMPLATES)), st.text("^=0123456789 \n", min_size=1).filter(str.strip))
def test_a_text_that_already_is_a_prompt_is_refused(prompt_of, name, question):
    once = prompt_of(question, TEMPLATES[name])
    assert once.text.count(question) >= 1
    with pytest.raises(InputError, match="which the tokenizer or the chat template writes itself"):
        prompt_of(once.text, TEMPLATES[name])
    again = prompt_of(once.text, TEMPLATES[name], chat_template="none", add_special_tokens=False)
    assert (again.text, again.tokens) == (once.text, once.tokens)


@pytest.mark.parametrize("text", ["<bos>1=", "1=<eos>2", "<eos>"])
def test_special_tokens_in_a_problem_are_refused(prompt_of, text):
    for template in (None, TEMPLATES["words"]):
        with pytest.raises(InputError, match=r"line 1: the text of role user holds '<(bos|eos)>'"):
            prompt_of(text, template)
    assert prompt_of(text, chat_template="none", add_special_tokens=False).text == text


def test_a_first_token_is_not_doubled(prompt_of):
    with pytest.raises(InputError, match="the text begins with '<bos>', which the tokenizer adds itself"):
        prompt_of("<bos>1=", chat_template="none")


def test_a_template_that_opens_no_turn_for_the_answer(prompt_of):
    closed = TEMPLATES["chatml"].partition("{% if")[0]
    with pytest.raises(InputError, match=r"ignores add_generation_prompt: .*<\|im_start\|>assistant"):
        prompt_of("1=", closed)
    for template in TEMPLATES.values():  # that of mistral needs none
        assert prompt_of("1=", template).text


def test_named_templates_without_default(prompt_of):
    with pytest.raises(InputError, match="has the templates rag, tool_use and none that is named default"):
        prompt_of("1=", {"rag": TEMPLATES["words"], "tool_use": TEMPLATES["words"]})
    assert prompt_of("1=", {"default": TEMPLATES["words"], "rag": "x"}).text == "user: 1=\nassistant: "


TOOLS = [{"type": "function", "function": {"name": "add"}}]
WITH_TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + TEMPLATES["words"]


def test_tools_of_a_row_are_in_the_prompt(prompt_of):
    assert prompt_of("1=", WITH_TOOLS, {"tools": TOOLS}).text == "<add>user: 1=\nassistant: "
    assert prompt_of("1=", WITH_TOOLS, {"tools": []}).text == "user: 1=\nassistant: "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "column 'tools' is for a chat template, and there is none"),
        (TEMPLATES["words"], "column 'tools' has 1 tools, and the chat template reads none"),
        ("{% if tools %}{% endif %}" + TEMPLATES["words"], "leaves out the tool 'add'"),
    ],
)
def test_tools_that_the_template_cannot_use_are_refused(prompt_of, template, message):
    with pytest.raises(InputError, match=message):
        prompt_of("1=", template, {"tools": TOOLS})


def test_a_system_column_needs_a_template(prompt_of):
    columns = {"system": "be brief"}
    assert prompt_of("1=", TEMPLATES["words"], columns).text == "system: be brief\nuser: 1=\nassistant: "
    with pytest.raises(InputError, match="a chat of 2 messages needs a chat template"):
        prompt_of("1=", None, columns)
