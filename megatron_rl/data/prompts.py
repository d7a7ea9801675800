"""Turns problems into prompts: template, chat template, token ids, length limit."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config.data import DataConfig, DataSourceConfig, PromptConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.data.source import Message, Problem, read_problems
from megatron_rl.data.table import PromptSet, TableWriter
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_ARGS = "data.prompt.chat_template_args"
# Arguments of `apply_chat_template` that change what it returns, or that this module sets.
_RESERVED = (
    *("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)
_SWITCHES = ("true", "false", "yes", "no", "on", "off")  # text that probably should be true or false
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # of transformers, unknown to Jinja
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BATCH, _BATCH_CHARACTERS = 2048, 64 << 20  # largest number of prompts, and of their characters, tokenized at a time
_FRACTION = 1  # number of the draw of `train_fraction` among the draws of a seed


def chat_template(tokenizer: Any, config: PromptConfig) -> str | None:
    """Return the chat template, or None for plain text. Raises InputError if it or its arguments are unusable."""
    template = _read_template(tokenizer, config)
    if config.chat_template_args:
        _check_arguments(config.chat_template_args, template)
    behind, between = _probe(tokenizer, template, json.dumps(config.chat_template_args))
    if between != behind and between.startswith(behind):
        raise InputError(
            f"data.prompt.chat_template: the template ignores add_generation_prompt: behind a question it writes "
            f"{behind!r}, before an answer {between!r}, so the policy would have to open its turn. Add the rest "
            "under {% if add_generation_prompt %}"
        )
    return template


def format_problem(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, config: PromptConfig, template: str | None
) -> str:
    """Return the text to tokenize. Raises InputError for a chat that cannot become a prompt."""
    if isinstance(problem.question, str):
        messages = [{"role": "user", "content": config.template.replace("{problem}", problem.question)}]
    else:
        messages = list(problem.question)
        _check_messages(messages, problem.where)
        messages[-1] = {"role": "user", "content": config.template.replace("{problem}", messages[-1]["content"])}
    _refuse_control(messages, tokenizer, config, template, problem.where)
    if template is None:
        if problem.tools:
            raise InputError(
                f"{problem.where}: column 'tools' is for a chat template, and there is none (data.prompt.chat_template)"
            )
        if len(messages) > 1:
            raise InputError(
                f"{problem.where}: a chat of {len(messages)} messages needs a chat template, but there is none "
                "(data.prompt.chat_template); give the path of one"
            )
        return messages[0]["content"]
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return _apply(tokenizer, messages, config, template, problem)


def _refuse_control(
    messages: list[Message], tokenizer: Any, config: PromptConfig, template: str | None, where: str
) -> None:
    """Raise InputError for a text that already is a prompt, or would become control tokens, unless `none` is set."""
    if config.chat_template == "none":
        return
    control, turn = _control(tokenizer), _probe(tokenizer, template, json.dumps(config.chat_template_args))[0]
    for message in messages:
        found = control and control.search(message["content"])
        marker = found.group() if found else turn if turn and message["content"].rstrip().endswith(turn) else None
        if marker is not None:
            raise InputError(
                f"{where}: the text of role {message['role']} holds {marker!r}, which the tokenizer or the chat "
                "template writes itself: the prompt would have it twice, or end there. Remove it from the file, or, if "
                "the file holds whole prompts, set data.prompt.chat_template: none and "
                "data.prompt.add_special_tokens: false"
            )


@functools.lru_cache(maxsize=8)
def _control(tokenizer: Any) -> re.Pattern[str] | None:
    """Return what matches the special tokens of ``tokenizer``; None if it has none."""
    tokens = {*tokenizer.all_special_tokens}
    tokens |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


@functools.lru_cache(maxsize=8)
def _probe(tokenizer: Any, template: str | None, arguments: str) -> tuple[str, str]:
    """Return what ``template`` writes behind a question of a prompt, and between question and answer of a chat.

    ``arguments``: `chat_template_args` as JSON. The two are the same where the template opens the answer's turn, and
    empty where it wants other messages.
    """
    question, answer = "a question of the probe", "an answer of the probe"
    user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    settings = {"chat_template": template, "tokenize": False, **json.loads(arguments)}
    if template is None:
        return "", ""
    try:
        prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, **settings)
        closed = tokenizer.apply_chat_template([user], add_generation_prompt=False, **settings)
        chat = tokenizer.apply_chat_template([user, assistant], add_generation_prompt=False, **settings)
    except Exception:  # noqa: BLE001 - whatever a template raises; `_apply` reports it for the messages of the file
        return "", ""
    behind = prompt.rpartition(question)[2].strip()
    return behind, chat.rpartition(question)[2].partition(answer)[0].strip() if closed == prompt else behind


def _read_template(tokenizer: Any, config: PromptConfig) -> str | None:
    if config.chat_template == "none":
        return None
    if config.chat_template != "auto":
        path = Path(config.chat_template)
        if not path.is_file():
            raise InputError(
                f"data.prompt.chat_template: no file {config.chat_template}; allowed are auto, none or the path of a "
                "Jinja template"
            )
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"data.prompt.chat_template: {path} cannot be read as UTF-8 text: {error}") from error
    if tokenizer.chat_template is None and config.system is not None:
        raise InputError("data.prompt.system: the tokenizer has no chat template; set data.prompt.chat_template")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        raise InputError(
            f"data.prompt.chat_template: the tokenizer has the templates {', '.join(tokenizer.chat_template)} and none "
            "that is named default; write the one to use to a file, and give its path"
        )
    return tokenizer.get_chat_template() if tokenizer.chat_template is not None else None


def _check_arguments(arguments: dict[str, Any], template: str | None) -> None:
    """Raise InputError for arguments without effect, or with an effect that differs from their text."""
    if template is None:
        raise InputError(
            f"{_ARGS}: {', '.join(arguments)}: without effect, because there is no chat template: the tokenizer has "
            "none, or data.prompt.chat_template is none; give the path of a template there, or remove the arguments"
        )
    names, texts = _names_and_texts(template)
    for name, value in arguments.items():
        if name in _RESERVED:
            raise InputError(f"{_ARGS}.{name}: cannot be set, because the trainer calls the template with its own")
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(
                f"{_ARGS}.{name}: the chat template reads no such variable, so {value!r} would have no effect; it "
                f"reads {', '.join(sorted(names))}{hint}"
            )
        if isinstance(value, str) and value.strip().lower() in _SWITCHES and value not in texts:
            means = "true" if value.strip().lower() in ("true", "yes", "on") else "false"
            raise InputError(
                f"{_ARGS}.{name}: {value!r} is text, which a template always reads as true; write {means} "
                "without quotes (yes, no, on and off are text in YAML 1.2)"
            )


@functools.lru_cache(maxsize=8)
def _names_and_texts(template: str) -> tuple[set[str], set[str]]:
    """Return the variables that ``template`` reads and its quoted texts. Raises InputError if it is not Jinja."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", template))
    except TemplateError as error:
        raise InputError(f"data.prompt.chat_template: not a Jinja template: {error}") from error
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    return names, {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _check_messages(messages: list[Message], where: str) -> None:
    """Raise InputError for a chat that does not end with a user's question."""
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{where}: the chat has no message of role user")
    for number, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            raise InputError(f"{where}: message {number}, of role user, is empty; write the question, or remove it")
    if messages[-1]["role"] != "user":
        shown = messages[-1]["content"][:40]
        raise InputError(
            f"{where}: the chat ends with a message of role {messages[-1]['role']} ({shown!r} …), which would put the "
            "answer into the prompt; remove that message from every row, or name another column with prompt_key"
        )


def _apply(tokenizer: Any, messages: list[Message], config: PromptConfig, template: str, problem: Problem) -> str:
    where, tools = problem.where, problem.tools or []
    if tools and "tools" not in _names_and_texts(template)[0]:
        raise InputError(
            f"{where}: column 'tools' has {len(tools)} tools, and the chat template reads none; set "
            "data.prompt.chat_template to one that does, or remove the column"
        )
    settings = config.chat_template_args | ({"tools": tools} if tools else {})
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **settings
        )
    except Exception as error:
        raise InputError(
            f"{where}: the chat template refuses these messages: {error or type(error).__name__}"
        ) from error
    for message in messages if text else ():  # an empty prompt raises later
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise InputError(
                f"{where}: the chat template leaves out or changes the message of role {message['role']} "
                f"({message['content'][:40]!r} …), so the prompt would differ from the file. Set "
                "data.prompt.chat_template to a template that writes it as it is"
            )
    for tool in tools if text else ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and str(function.get("name", "")) not in text:
            raise InputError(f"{where}: the chat template leaves out the tool {function['name']!r} of column 'tools'")
    return text


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a hash of ids, token ids and answers in order: equal only for the same prompts and tokenization."""
    return (prompts if isinstance(prompts, PromptSet) else PromptSet.of(prompts)).fingerprint


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of ids, tokens, answers, sources and extra columns, in order."""
    return (prompts if isinstance(prompts, PromptSet) else PromptSet.of(prompts)).digest


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint directory. Raises InputError if there is none."""
    from transformers import AutoTokenizer  # takes seconds to import, so only when a tokenizer is needed

    if not Path(path).is_dir():
        raise InputError(f"tokenizer {path}: no such directory; give a checkpoint in Hugging Face layout")
    # For a folder with only a config.json, transformers silently returns an empty tokenizer.
    if not any((Path(path) / name).is_file() for name in _VOCABULARY_FILES):
        raise InputError(f"tokenizer {path}: has none of {', '.join(_VOCABULARY_FILES)}; copy the model's files")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"tokenizer {path}: cannot be loaded (is tokenizer.json there?): {error}") from error


def load_prompts(
    sources: DataSourceConfig | Sequence[DataSourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    config: PromptConfig | None = None,
) -> PromptSet:
    """Read, format and tokenize the problems of all ``sources`` and return their prompts.

    Raises InputError for the errors of ``read_problems``; an id in two sources; a prompt longer than
    ``config.max_length`` with ``overlong: error``; no prompt left; a chat that no template can format.
    """
    sources = [sources] if isinstance(sources, DataSourceConfig) else list(sources)
    config = config or PromptConfig()
    template = chat_template(tokenizer, config)
    prompts = _written(sources, tokenizer, config, template)
    names = ", ".join(source.path for source in sources)
    if prompts.num_dropped:
        logger.warning("%s: dropped %d prompts longer than %d tokens", names, prompts.num_dropped, config.max_length)
    return prompts


def load_train(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Return the prompts of `data.train`, or the share `data.train_fraction` of them, in file order."""
    prompts = load_prompts(data.train, tokenizer, data.prompt)
    if data.train_fraction == 1:
        return prompts
    order = np.random.Generator(np.random.PCG64([data.seed, 0, _FRACTION])).permutation(len(prompts))
    chosen = np.sort(order[: max(1, round(data.train_fraction * len(prompts)))])
    logger.info("data.train_fraction: %d of %d prompts", len(chosen), len(prompts))
    return prompts.choose(chosen)


def load_validation(data: DataConfig, validation: ValidationConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Return the prompts of `data.validation`; of equal rows the first."""
    prompts = load_prompts(data.validation, tokenizer, data.prompt)
    if prompts.num_different == len(prompts):
        return prompts
    logger.warning(
        "data.validation: %d rows hold %d problems; each is sampled validation.num_samples times",
        len(prompts),
        prompts.num_different,
    )
    return prompts.choose(np.sort(np.unique(prompts.first_rows, return_index=True)[1]))


def check_vocabulary(prompts: PromptSet, vocab_size: int) -> None:
    """Raise InputError if a prompt has a token without embedding: the tokenizer belongs to another model."""
    if (prompt := prompts.beyond(vocab_size)) is not None:
        raise InputError(
            f"prompt {prompt.id!r}: token {max(prompt.tokens)}, but the model's vocabulary has {vocab_size} (0 … "
            f"{vocab_size - 1}); the tokenizer in model.path belongs to another model: copy this model's tokenizer"
        )


def _written(
    sources: Sequence[DataSourceConfig], tokenizer: Any, config: PromptConfig, template: str | None
) -> PromptSet:
    """Return every prompt of ``sources`` that is not too long."""
    where: dict[str, str] = {}
    writer = TableWriter()
    for problem, text, tokens in _tokenized(sources, tokenizer, config, template):
        if problem.id in where:
            raise InputError(
                f"{problem.where}: prompt id {problem.id!r} was already used in {where[problem.id]}; "
                "give each source its own `name`"
            )
        where[problem.id] = problem.where
        if tokens is None or len(tokens) > config.max_length:
            if config.overlong == "error":
                has = f"{len(text)} characters, which are" if tokens is None else f"{len(tokens)} tokens,"
                raise InputError(
                    f"{problem.where}: prompt {problem.id} has {has} more than data.prompt.max_length "
                    f"({config.max_length}); raise the limit, or set data.prompt.overlong: drop"
                )
            writer.num_dropped += 1
            continue
        writer.add(Prompt(problem.id, tokens, problem.answer, text, problem.data_source, problem.extra))
    if not writer.num_rows:
        names = ", ".join(source.path for source in sources)
        raise InputError(
            f"{names}: all {writer.num_dropped} prompts are longer than {config.max_length} tokens; none is left"
        )
    return writer.close()


def _tokenized(
    sources: Sequence[DataSourceConfig], tokenizer: Any, config: PromptConfig, template: str | None
) -> Iterator[tuple[Problem, str, list[int] | None]]:
    """Yield problem, text and token ids; None as ids of a text that is too long for any tokenization.

    A thread tokenizes a batch on all cores while the next one is read and formatted.
    """
    longest = config.max_length * max(map(len, tokenizer.get_vocab()), default=1)

    def formatted() -> Iterator[list[tuple[Problem, str]]]:
        problems = itertools.chain.from_iterable(read_problems(source) for source in sources)
        texts = ((problem, format_problem(problem, tokenizer, config, template)) for problem in problems)
        batch, characters = [], 0
        for problem, text in texts:
            batch.append((problem, text))
            characters += len(text)
            if len(batch) == _BATCH or characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    first = tokenizer("")["input_ids"][:1] if template is None and config.add_special_tokens else []

    def encode(batch: list[tuple[Problem, str]]) -> list[list[int] | None]:
        short = [text for _, text in batch if len(text) <= longest]
        special = template is None and config.add_special_tokens
        arguments = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
        ids = iter(tokenizer(short, **arguments)["input_ids"] if short else ())
        return [next(ids) if len(text) <= longest else None for _, text in batch]

    with ThreadPoolExecutor(1) as thread:
        before: tuple[list[tuple[Problem, str]], Future[list[list[int] | None]]] | None = None
        for batch in itertools.chain(formatted(), ([],)):
            begun = (batch, thread.submit(encode, batch))
            if before is not None:
                for (problem, text), tokens in zip(before[0], before[1].result()):
                    if tokens is not None and not tokens:
                        raise InputError(f"{problem.where}: the prompt is empty after tokenization")
                    if tokens is not None and first and tokens[:2] == 2 * first:
                        raise InputError(
                            f"{problem.where}: the text begins with {tokenizer.decode(first)!r}, which the tokenizer "
                            "adds itself; set data.prompt.add_special_tokens: false"
                        )
                    yield problem, text, tokens
            before = begun
