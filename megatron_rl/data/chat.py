"""Formats a problem as a prompt's text with the recipe's template and the chat template, and checks both."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.data import PromptConfig
from megatron_rl.data.source import Message, Problem
from megatron_rl.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ARGS = "data.prompt.chat_template_args"
# Arguments of `apply_chat_template` that change what it returns, or that this module sets.
_RESERVED = (
    *("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
)
_SWITCHES = ("true", "false", "yes", "no", "on", "off")  # text that probably should be true or false
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # of transformers, unknown to Jinja


def chat_template(tokenizer: Any, config: PromptConfig) -> str | None:
    """Return the chat template, or None for plain text. Raises InputError if it or its arguments are unusable."""
    template = _read_template(tokenizer, config)
    if config.chat_template_args:
        _check_arguments(config.chat_template_args, template)
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
    if template is None:
        if len(messages) > 1:
            raise InputError(
                f"{problem.where}: a chat of {len(messages)} messages needs a chat template, but there is none "
                "(data.prompt.chat_template); give the path of one"
            )
        return messages[0]["content"]
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return _apply(tokenizer, messages, config, template, problem.where)


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


def _apply(tokenizer: Any, messages: list[Message], config: PromptConfig, template: str, where: str) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **config.chat_template_args
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
    return text
