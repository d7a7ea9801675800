"""OpenAI's chat messages as tokens: what a template writes before and between a policy's answers, and the tool calls
in an answer. Answers themselves are never rendered: the tokens that were sampled stand in their places."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from megatron_rl.errors import shown

Message = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MARK = f"answer {secrets.token_hex(8)}"  # stands in an answer's place when a template is called
NO_REQUEST = "no request came"
THOUGHT_ENDS = "</think>"
THOUGHT = f"<think>\na thought\n{THOUGHT_ENDS}\n\n"


class ChatError(Exception):
    """What a client is told: OpenAI's form of an error."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Chat:
    """A tokenizer's chat template. ``arguments``: `data.prompt.chat_template_args`."""

    def __init__(self, tokenizer: Any, template: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer, self._settings = tokenizer, {"chat_template": template, **(arguments or {})}

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, opens: bool = True) -> str:
        """Return what the template writes. ``opens``: with the beginning of an answer. Raises `ChatError`."""
        settings = self._settings | ({"tools": tools} if tools else {})
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opens, **settings
            )
        except Exception as error:  # whatever a template raises
            raise ChatError(f"the chat template refuses these messages: {error or type(error).__name__}") from error

    @cached_property
    def _control(self) -> re.Pattern[str] | None:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        texts = {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None

    @cached_property
    def closing(self) -> str:
        """What the template writes behind an answer."""
        return self.render([{"role": "user", "content": "?"}, _answer(MARK)], opens=False).rpartition(MARK)[2]

    @cached_property
    def rewrites(self) -> dict[str, str]:
        """Role → why no message of it can follow an answer: the template then writes earlier answers otherwise than
        they were sampled, or refuses the role."""
        return {role: why for role in ("tool", "user", "system") if (why := self._rewrites(role))}

    def _rewrites(self, role: str) -> str:
        question, call = {"role": "user", "content": "a question"}, call_of("f", {})
        follows = {"role": role, "content": "what follows"} | ({"tool_call_id": call["id"]} if role == "tool" else {})
        for text in ("an answer", f"{THOUGHT}an answer"):
            answer = _answer(text, [call] if role == "tool" else [])
            try:
                held = self.render([question]) + text + ("" if role == "tool" else self.closing)
                written = self.render([question, answer, follows])
                self.following([question, answer], [follows], None)
            except ChatError as error:
                return str(error)
            if not written.startswith(held):
                place = len(os.path.commonprefix([held, written]))
                return (
                    f"once a message of role {role} follows, the chat template writes an earlier answer in another way "
                    f"than it was sampled: {written[place:][:40]!r} in place of {held[place:][:40]!r}. Give "
                    "data.prompt.chat_template the path of a template that keeps answers as they are"
                )
        return ""

    def first(self, messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """Return the tokens of the messages before the first answer."""
        return self._encoded(self.render(messages, tools), messages, tools)

    def following(self, held: Sequence[Message], new: Sequence[Message], tools: list[Any] | None) -> list[int]:
        """Return the tokens from the end of the answer, ``held[-1]``, up to the next one, with ``new`` between."""
        text = self.render([*held[:-1], _answer(MARK), *new], tools)
        _, mark, behind = text.rpartition(MARK)
        if not mark or not behind.startswith(self.closing):
            raise ChatError("the chat template does not write the last answer, or ends it in another way than others")
        return self._encoded(behind, new)

    def _encoded(self, text: str, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        given = json.dumps([*messages, tools], ensure_ascii=False, default=str)
        if self._control and (found := self._control.search(given)):
            raise ChatError(f"messages or tools hold {found.group()!r}, which is a token that only the template writes")
        place = 0
        for message in messages:
            if message["role"] == "assistant":
                continue
            content = message["content"].strip()
            spellings = (content, json.dumps(content, ensure_ascii=False)[1:-1])
            ahead = max(text.find(one, place) for one in spellings)  # most templates keep their order
            place = max(place, ahead)
            if ahead < 0 and not any(one in text for one in spellings):
                raise ChatError(f"the chat template leaves out or changes a message of role {message['role']}")
        return self._tokenizer.encode(text, add_special_tokens=False)


def _answer(text: str, calls: list[Message] | None = None) -> Message:
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def call_of(name: str, arguments: Any, number: int = 0) -> Message:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def message_of(given: Any, number: int) -> Message:
    """Return one message of a request as templates want it: texts joined, arguments of calls as mappings."""
    where = f"messages[{number}]"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or given["role"] not in ROLES:
        raise ChatError(f"{where}: a mapping with a role is wanted, one of {', '.join(ROLES)}", param=where)
    content = given.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else parts
    if content is not None and not isinstance(content, str):
        raise ChatError(f"{where}: text is all that a content may hold, found {shown(content, 60)}", param=where)
    message: Message = {"role": ROLES[given["role"]], "content": content or ""}
    for key in ("name", "tool_call_id"):
        if isinstance(given.get(key), str):
            message[key] = given[key]
    if message["role"] == "assistant" and (calls := given.get("tool_calls")):
        try:
            message["tool_calls"] = [_given_call(call) for call in calls]
        except (KeyError, TypeError) as error:
            raise ChatError(f"{where}: its tool_calls are not OpenAI's: {shown(calls, 60)}", param=where) from error
    return message


def _given_call(call: Any) -> Message:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError, RecursionError):  # else as it was written: no call of the policy's is like it
        arguments = json.loads(arguments)
    return {
        "id": str(call.get("id")),
        "type": "function",
        "function": {"name": call["function"]["name"], "arguments": arguments},
    }


def same(one: Message, other: Message) -> bool:
    """Whether two messages say the same. The ids of calls, and names of the speakers of answers, are not compared."""

    def said(message: Message) -> Message:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return {k: v for k, v in message.items() if k != "name"} | {"tool_calls": calls}

    return said(one) == said(other)


# Tool calls as Qwen3 writes them: JSON (Hermes), or XML (Qwen3-Coder).
# White space around what is between is not the patterns': two repetitions side by side take cubic time.
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def calls_in(text: str, tools: Sequence[Any]) -> tuple[str, list[Message]]:
    """Return the text before the calls of ``text``, and the calls; all of ``text`` and none where one is malformed.

    A call that is only thought of is none.
    """
    begin = text.find("<tool_call>", max(text.rfind(THOUGHT_ENDS), 0))
    if begin < 0:
        return text, []
    content, rest, calls = text[:begin], text[begin:], []
    while rest:
        block = _BLOCK.match(rest)
        call = _call(block.group(1).strip(), tools) if block else None
        if call is None:
            return text, []
        calls.append(call_of(*call, len(calls)))
        rest = rest[block.end() :]
    return content.rstrip(), calls


def _call(block: str, tools: Sequence[Any]) -> tuple[str, dict[str, Any]] | None:
    try:
        if function := _FUNCTION.fullmatch(block):
            return function.group(1), _parameters(function.group(2).strip(), _types(function.group(1), tools))
        call = json.loads(block, parse_constant=_refuse)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _parameters(text: str, types: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while text:
        parameter = _PARAMETER.match(text)
        if parameter is None or parameter.group(1) in found:
            raise ValueError("parameters")
        name, value = parameter.groups()
        found[name] = _value(value, types.get(name, "string"))
        text = text[parameter.end() :]
    return found


def _value(text: str, types: Any) -> Any:
    """What a parameter's text is under its schema's type or types. Raises ValueError."""
    if types == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except ValueError:
        if isinstance(types, list) and "string" in types:
            return text
        raise


def _types(name: str, tools: Sequence[Any]) -> dict[str, Any]:
    """Parameter → type that the tool's schema names."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type", "string") for key, value in properties.items() if isinstance(value, dict)}
    return {}


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
