"""Chats without an engine: a tokenizer whose tokens overlap, templates like Qwen3's, and what answers in the policy's
place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

from megatron_rl.rollout.chat import Chat
from megatron_rl.rollout.conversation import Client, Conversation, Talk, Turn, converse
from megatron_rl.rollout.generator import Sampling
from megatron_rl.rollout.requests import Request
from megatron_rl.types import Prompt

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPACED = TEMPLATE.replace("{{ message.content }}", "{{ message.content | trim }} ")
"""Answers that are rendered again get a space, and lose those at their ends."""
CLOSE = TEMPLATE.replace('": {{', '":{{').replace(', "arg', ',"arg')
"""Calls are written without spaces."""
CUTS = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content.split('</think>')[-1].lstrip() if message.role == 'assistant' and not loop.last "
    "and messages[-1].role == 'user' else message.content }}",
)
"""Thinking is cut out when a user goes on, as by Qwen3."""

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
MERGES = [("a", "b"), ("ab", "c"), (" ", "a"), ("1", "2"), ("<", "t"), ('"', ":"), (" ", " "), ("\n", "<")]
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def tokenizer() -> Any:
    """One token a character, and some of two or three: text has several spellings in tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTERS, *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=MERGES))
    backend.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    whole.add_special_tokens({"additional_special_tokens": SPECIAL})
    return whole


TOKENIZER = tokenizer()
START, END = TOKENIZER.convert_tokens_to_ids(SPECIAL)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "why": {"type": "string"},
                    "or": {"type": ["string", "null"]},
                },
            },
        },
    }
]


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Policy:
    """`TurnSource` that gives ``answers``, token ids, one by one; each token's log-prob is one of its own."""

    def __init__(self, answers: Iterable[list[int]]) -> None:
        self._answers = iter(answers)
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.turns: list[Turn] = []

    async def answer(self, tokens: list[int], fields: dict[str, Any], first_row: int) -> Turn:
        self.asked.append((list(tokens), fields))
        sampled = next(self._answers)[: fields["max_tokens"]]
        ended = bool(sampled) and sampled[-1] in fields["stop_token_ids"]
        logprobs = [-1.0 - 0.001 * (len(self.turns) * 100 + place) for place in range(len(sampled))]
        turn = Turn(list(tokens), sampled, logprobs, "stop" if ended else "length")
        self.turns.append(turn)
        return turn


def said(*texts: str) -> list[list[int]]:
    """Answers that end as the template's do."""
    return [[*TOKENIZER.encode(text, add_special_tokens=False), END] for text in texts]


def client_of(
    policy: Any, function: Callable[..., Any], prompt: list[int], room: int = 2000, template: str = TEMPLATE
) -> tuple[Talk, Client, Request]:
    encode = lambda text: TOKENIZER.encode(text, add_special_tokens=False)  # noqa: E731
    decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)  # noqa: E731
    talk = Talk("f", function, encode, decode, Chat(TOKENIZER, template))
    request = Request(0, Prompt("p:0", prompt, "", ""), 0, seed=7)
    return talk, Client(talk, request, policy, Sampling(room), [END], len(TOKENIZER)), request


def conversation_of(policy: Any, function: Callable[..., Any], **options: Any) -> Conversation:
    """What ``function`` returns, whose first messages may be any."""
    options.setdefault("prompt", [START])
    return asyncio.run(converse(*client_of(policy, function, **options)))
