"""Problems become token ids: templates, chat, tools, special tokens, the length limit."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig, PromptConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.data import fingerprint, load_prompts, load_tokenizer, load_train, load_validation
from megatron_rl.errors import InputError

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny" / "model"

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{{ style | default('') }}"
)


@pytest.fixture
def tokenizer():
    return load_tokenizer(str(TINY))


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def source(tmp_path):
    def make(*questions, name="x") -> DataSourceConfig:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"problem": q, "answer": i}) + "\n" for i, q in enumerate(questions)))
        return DataSourceConfig(path=str(path))

    return make


def test_plain_text_gets_the_tokenizers_first_token(tokenizer, source):
    (prompt,) = load_prompts(source("^12="), tokenizer)
    assert (prompt.id, prompt.text, prompt.answer, prompt.data_source) == ("x:0", "^12=", "0", "x")
    assert tokenizer.decode(prompt.tokens) == "<bos>^12="
    (bare,) = load_prompts(source("^12="), tokenizer, PromptConfig(add_special_tokens=False))
    assert bare.tokens == prompt.tokens[1:]


def test_the_template_surrounds_the_problem_whatever_it_contains(tokenizer, source):
    config = PromptConfig(template="Q: {problem} A:")
    (prompt,) = load_prompts(source("{x} {problem} {0}"), tokenizer, config)
    assert prompt.text == "Q: {x} {problem} {0} A:"


def test_a_chat_template_writes_its_own_special_tokens(chat_tokenizer, source):
    config = PromptConfig(template="{problem}!", system="be brief")
    (prompt,) = load_prompts(source("hi"), chat_tokenizer, config)
    assert prompt.text == "<system>be brief<user>hi!<assistant>"
    assert chat_tokenizer.decode(prompt.tokens) == prompt.text  # no <bos> added in front


def test_messages_keep_their_own_system_and_only_the_last_user_is_wrapped(chat_tokenizer, source):
    chat = [{"role": r, "content": c} for r, c in [("system", "own"), ("user", "a"), ("assistant", "b"), ("user", "c")]]
    (prompt,) = load_prompts(source(chat), chat_tokenizer, PromptConfig(template="[{problem}]", system="mine"))
    assert prompt.text == "<system>own<user>a<assistant>b<user>[c]<assistant>"


def test_a_template_file_and_its_arguments(tokenizer, source, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    config = PromptConfig(chat_template=str(tmp_path / "chat.jinja"), chat_template_args={"style": "~"})
    (prompt,) = load_prompts(source("hi"), tokenizer, config)
    assert prompt.text == "<user>hi<assistant>~"


def test_no_template_wanted_though_there_is_one(chat_tokenizer, source):
    (prompt,) = load_prompts(
        source([{"role": "user", "content": "hi"}]), chat_tokenizer, PromptConfig(chat_template="none")
    )
    assert prompt.text == "hi"


def test_a_chat_that_nothing_can_format_is_refused(tokenizer, source):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with pytest.raises(InputError, match=r"x\.jsonl, line 1: a chat of 2 messages needs a chat template"):
        load_prompts(source(chat), tokenizer)
    with pytest.raises(InputError, match=r"data\.prompt\.system: the tokenizer has no chat template"):
        load_prompts(source("hi"), tokenizer, PromptConfig(system="s"))
    with pytest.raises(InputError, match=r"no file nowhere\.jinja"):
        load_prompts(source("hi"), tokenizer, PromptConfig(chat_template="nowhere.jinja"))


def test_messages_that_the_template_refuses_name_the_row(chat_tokenizer, source):
    chat = [{"role": "tool", "content": "t"}, {"role": "user", "content": "u"}]
    with pytest.raises(InputError, match=r"line 2: the chat template refuses these messages: no tools here"):
        load_prompts(source("fine", chat), chat_tokenizer)
    with pytest.raises(InputError, match="line 1: the chat has no message of role user"):
        load_prompts(source([{"role": "system", "content": "s"}]), chat_tokenizer)


def test_prompts_over_the_limit_are_an_error_or_dropped(tokenizer, source, caplog):
    questions = ["1" * n for n in (3, 9, 4, 30)]  # tokens: one more each, the <bos>
    with pytest.raises(InputError, match=r"line 2: prompt x:1 has 10 tokens, more than data\.prompt\.max_length \(9\)"):
        load_prompts(source(*questions), tokenizer, PromptConfig(max_length=9))
    kept = load_prompts(source(*questions), tokenizer, PromptConfig(max_length=9, overlong="drop"))
    assert [prompt.id for prompt in kept] == ["x:0", "x:2"]
    assert kept.num_dropped == 2
    assert "dropped 2 prompts longer than 9 tokens" in caplog.text
    assert len(load_prompts(source(*questions), tokenizer, PromptConfig(max_length=10, overlong="drop"))) == 3
    with pytest.raises(InputError, match="all 4 prompts are longer than 2 tokens"):
        load_prompts(source(*questions), tokenizer, PromptConfig(max_length=2, overlong="drop"))


def test_a_text_beyond_any_number_of_tokens_is_refused_untokenized(tokenizer, source, monkeypatch):
    """A token of this tokenizer is 5 characters or fewer: more than 5 · max_length characters are too many tokens."""
    seen, call = [], type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **kw: seen.extend(texts) or call(self, texts, **kw)
    )
    assert max(map(len, tokenizer.get_vocab())) == 5
    questions = ["1" * 45, "1" * 46, "1"]
    with pytest.raises(
        InputError, match=r"line 1: prompt y:0 has 46 characters, which are more than .*max_length \(9\)"
    ):
        load_prompts(source(*questions[1:], name="y"), tokenizer, PromptConfig(max_length=9))
    kept = load_prompts(source(*questions), tokenizer, PromptConfig(max_length=9, overlong="drop"))
    assert [prompt.text for prompt in kept] == ["1"]
    assert kept.num_dropped == 2
    assert sorted(set(seen)) == ["1", "1" * 45]


def test_sources_are_concatenated_and_ids_stay_unique(tokenizer, source):
    one, two = source("1", "2", name="one"), source("3", name="two")
    prompts = load_prompts([one, two], tokenizer)
    assert [prompt.id for prompt in prompts] == ["one:0", "one:1", "two:0"]
    assert prompts.data_sources == ["one", "two"]
    with pytest.raises(InputError, match=r"prompt id 'one:0' was already used in .*give each source its own `name`"):
        load_prompts([one, two.model_copy(update={"name": "one"})], tokenizer)


def test_many_prompts_keep_their_order(tokenizer, source):
    prompts = load_prompts(source(*[f"^{n}=" for n in range(1300)]), tokenizer)
    assert [prompt.text for prompt in prompts] == [f"^{n}=" for n in range(1300)]
    assert all(tokenizer.decode(prompt.tokens) == f"<bos>{prompt.text}" for prompt in prompts)


def test_a_prompt_of_no_tokens_is_refused(chat_tokenizer, source, tmp_path):
    (tmp_path / "empty.jinja").write_text("")
    with pytest.raises(InputError, match="line 1: the prompt is empty"):
        load_prompts(source("hi"), chat_tokenizer, PromptConfig(chat_template=str(tmp_path / "empty.jinja")))


def test_the_fingerprint_sees_tokens_answers_and_order(tokenizer, source):
    base = load_prompts(source("1", "2"), tokenizer)
    assert fingerprint(base) == fingerprint(load_prompts(source("1", "2"), tokenizer))
    others = [
        load_prompts(source("1", "3"), tokenizer),
        load_prompts(source("1", "2"), tokenizer, PromptConfig(add_special_tokens=False)),
        base[::-1],
        base[:1],
    ]
    assert fingerprint(base) not in {fingerprint(other) for other in others}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(InputError, match=r"none of tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


def validation_of(sources, **section) -> tuple[DataConfig, ValidationConfig]:
    return DataConfig(train=sources, validation=sources), ValidationConfig(**section)


def test_rows_that_repeat_a_problem_are_one_problem(tokenizer, tmp_path, caplog):
    """As AIME-2024's public file: every problem on several rows. Another answer or source makes another problem."""
    rows = [("^1=", 1), ("^2=", 2), ("^1=", 1), ("^1=", 3), ("^2=", 2)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"problem": q, "answer": a}) + "\n" for q, a in rows))
    data, validation = validation_of([DataSourceConfig(path=str(path))])
    loaded = load_validation(data, validation, tokenizer)
    assert [prompt.id for prompt in loaded] == ["x:0", "x:1", "x:3"]
    assert "5 rows hold 3 problems" in caplog.text


def test_a_fraction_of_the_training_problems_is_drawn_once_and_nested(tokenizer, source):
    sources = [source(*(f"^{i}=" for i in range(40)))]
    everything = load_train(DataConfig(train=sources), tokenizer)

    def ids(fraction, seed=0):
        return [p.id for p in load_train(DataConfig(train=sources, train_fraction=fraction, seed=seed), tokenizer)]

    assert len(everything) == 40
    quarter, half = ids(0.25), ids(0.5)
    assert (len(quarter), len(half), len(ids(0.025)), len(ids(0.001))) == (10, 20, 1, 1)
    assert set(quarter) < set(half) < {prompt.id for prompt in everything}
    assert quarter == sorted(quarter, key=lambda name: int(name[2:])), "in file order"
    assert ids(0.25) == quarter != ids(0.25, seed=1)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([("user", "u"), ("assistant", "it is 4")], r"ends with a message of role assistant \('it is 4' …\)"),
        ([("user", "u"), ("system", "s")], "ends with a message of role system"),
        ([("user", "u"), ("user", " ")], "message 1, of role user, is empty"),
        ([("critic", "so not"), ("user", "u")], "leaves out or changes the message of role critic"),
    ],
)
def test_a_chat_that_would_ask_something_else_is_refused(tokenizer, source, tmp_path, chat, message):
    template = "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    config = PromptConfig(chat_template=str(tmp_path / "chat.jinja"))
    messages = [{"role": role, "content": content} for role, content in chat]
    with pytest.raises(InputError, match=f"line 1: .*{message}"):
        load_prompts(source(messages), tokenizer, config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stlye": "~"}, r"args\.stlye: the chat template reads no such variable.*did you mean style\?"),
        ({"style": "no"}, "'no' is text, which a template always reads as true; write false"),
        ({"style": "True"}, "'True' is text.* write true"),
        ({"add_generation_prompt": False}, "cannot be set"),
        ({"tokenize": True}, "cannot be set"),
    ],
)
def test_arguments_of_the_template_without_their_effect_are_refused(chat_tokenizer, source, arguments, message):
    with pytest.raises(InputError, match=message):
        load_prompts(source("hi"), chat_tokenizer, PromptConfig(chat_template_args=arguments))


def test_arguments_that_no_template_reads_are_refused(tokenizer, source, tmp_path):
    with pytest.raises(InputError, match="without effect, because there is no chat template"):
        load_prompts(source("hi"), tokenizer, PromptConfig(chat_template_args={"style": "~"}))
    file = tmp_path / "chat.jinja"
    # A word that the template compares with is meant as text.
    file.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}{% if style == 'on' %}+{% endif %}")
    config = PromptConfig(chat_template=str(file), chat_template_args={"style": "on"})
    assert load_prompts(source("hi"), tokenizer, config)[0].text == "hi+"
    for content, message in [(b"\xff", "UTF-8"), (b"{% if %}", "not a Jinja template")]:
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_prompts(source("hi"), tokenizer, config)


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
