"""Turns problems into prompts: template, chat template, token ids, length limit."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from megatron_rl.config.data import DataConfig, DataSourceConfig, PromptConfig
from megatron_rl.config.sections import ValidationConfig
from megatron_rl.data.source import Problem, read_problems
from megatron_rl.errors import InputError
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BATCH = 512  # prompts tokenized at a time
_FRACTION = 1  # names the draw of `train_fraction` among those of one seed


@dataclass(frozen=True)
class PromptSet(Sequence[Prompt]):
    """Prompts in file order. ``num_dropped``: how many were longer than the limit and left out."""

    prompts: tuple[Prompt, ...]
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def data_sources(self) -> list[str]:
        """Every `data_source` that occurs, sorted."""
        return sorted({prompt.data_source for prompt in self.prompts})


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of ids, token ids and answers, in order: equal only for the same prompts, tokenized alike."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.id, list(prompt.tokens), prompt.answer)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory. InputError where there is none."""
    from transformers import AutoTokenizer  # seconds to import: only where a tokenizer is needed

    if not Path(path).is_dir():
        raise InputError(f"tokenizer {path}: no such directory; give a checkpoint in Hugging Face layout")
    # transformers makes an empty tokenizer of a folder that only has a config.json, and says nothing.
    if not any((Path(path) / name).is_file() for name in _VOCABULARY_FILES):
        raise InputError(f"tokenizer {path}: none of {', '.join(_VOCABULARY_FILES)} is there; copy the model's own")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"tokenizer {path}: cannot be loaded (is tokenizer.json there?): {error}") from error


def load_prompts(
    sources: DataSourceConfig | Sequence[DataSourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    config: PromptConfig | None = None,
) -> PromptSet:
    """Read, format and tokenize the problems of ``sources``, concatenated.

    InputError: whatever ``read_problems`` finds; one id in two sources; a prompt longer than ``config.max_length``
    with ``overlong: error``; no prompt left; a chat that no template can format.
    """
    sources = [sources] if isinstance(sources, DataSourceConfig) else list(sources)
    config = config or PromptConfig()
    template = _chat_template(tokenizer, config)
    prompts: list[Prompt] = []
    where: dict[str, str] = {}
    num_dropped = 0
    for problem, text, tokens in _tokenized(sources, tokenizer, config, template):
        if problem.id in where:
            raise InputError(
                f"{problem.where}: prompt id {problem.id!r} was already used in {where[problem.id]}; "
                "give each source its own `name`"
            )
        where[problem.id] = problem.where
        if len(tokens) > config.max_length:
            if config.overlong == "error":
                raise InputError(
                    f"{problem.where}: prompt {problem.id} has {len(tokens)} tokens, more than data.prompt.max_length "
                    f"({config.max_length}); raise the limit or set data.prompt.overlong: drop"
                )
            num_dropped += 1
            continue
        prompts.append(Prompt(problem.id, tokens, problem.answer, text, problem.data_source, problem.extra))
    names = ", ".join(source.path for source in sources)
    if num_dropped:
        logger.warning("%s: dropped %d prompts longer than %d tokens", names, num_dropped, config.max_length)
    if not prompts:
        raise InputError(f"{names}: all {num_dropped} prompts are longer than {config.max_length} tokens; none is left")
    return PromptSet(tuple(prompts), num_dropped)


def load_train(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.train`, or the share of them that `data.train_fraction` names, in file order."""
    prompts = load_prompts(data.train, tokenizer, data.prompt)
    if data.train_fraction == 1:
        return prompts
    order = np.random.Generator(np.random.PCG64([data.seed, 0, _FRACTION])).permutation(len(prompts))
    kept = np.sort(order[: max(1, round(data.train_fraction * len(prompts)))])
    logger.info("data.train_fraction: %d of %d prompts", len(kept), len(prompts))
    return replace(prompts, prompts=tuple(prompts[int(i)] for i in kept))


def load_validation(data: DataConfig, validation: ValidationConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The prompts of `data.validation`; of rows that repeat one (`validation.repeated_rows: merge`) the first."""
    prompts = load_prompts(data.validation, tokenizer, data.prompt)
    if validation.repeated_rows == "keep":
        return prompts
    first: dict[tuple[object, ...], Prompt] = {}
    for prompt in prompts:
        first.setdefault((tuple(prompt.tokens), prompt.answer, prompt.data_source), prompt)
    if len(first) < len(prompts):
        logger.warning(
            "data.validation: %d rows hold %d problems; each is sampled validation.num_samples times "
            "(validation.repeated_rows: keep samples every row)",
            len(prompts),
            len(first),
        )
    return replace(prompts, prompts=tuple(first.values()))


def check_vocabulary(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """InputError where a prompt holds a token that the model has no embedding for: the tokenizer is another model's."""
    for prompt in prompts:
        if (largest := max(prompt.tokens)) >= vocab_size:
            raise InputError(
                f"prompt {prompt.id!r}: token {largest}, but the model's vocabulary has {vocab_size} (0 … "
                f"{vocab_size - 1}); the tokenizer in model.path belongs to another model: copy the model's own"
            )


def _tokenized(
    sources: Sequence[DataSourceConfig], tokenizer: Any, config: PromptConfig, template: str | None
) -> Iterator[tuple[Problem, str, list[int]]]:
    def batches() -> Iterator[list[Problem]]:
        batch: list[Problem] = []
        for source in sources:
            for problem in read_problems(source):
                batch.append(problem)
                if len(batch) == _BATCH:
                    yield batch
                    batch = []
        if batch:
            yield batch

    special = template is None and config.add_special_tokens
    for batch in batches():
        texts = [_format(problem, tokenizer, config, template) for problem in batch]
        ids = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]
        for problem, text, tokens in zip(batch, texts, ids):
            if not tokens:
                raise InputError(f"{problem.where}: the prompt is empty after tokenization")
            yield problem, text, tokens


def _chat_template(tokenizer: Any, config: PromptConfig) -> str | None:
    """The chat template in force, or None for plain text."""
    if config.chat_template == "none":
        return None
    if config.chat_template != "auto":
        path = Path(config.chat_template)
        if not path.is_file():
            raise InputError(
                f"data.prompt.chat_template: no file {config.chat_template}; allowed are auto, none or the path of a "
                "Jinja template"
            )
        return path.read_text(encoding="utf-8")
    if tokenizer.chat_template is None and config.system is not None:
        raise InputError("data.prompt.system: the tokenizer has no chat template; set data.prompt.chat_template")
    return tokenizer.get_chat_template() if tokenizer.chat_template is not None else None


def _format(problem: Problem, tokenizer: Any, config: PromptConfig, template: str | None) -> str:
    if isinstance(problem.question, str):
        messages = [{"role": "user", "content": config.template.replace("{problem}", problem.question)}]
    else:
        messages = list(problem.question)
        last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if last_user < 0:
            raise InputError(f"{problem.where}: the chat has no message of role user")
        asked = config.template.replace("{problem}", messages[last_user]["content"])
        messages[last_user] = {"role": "user", "content": asked}
    if template is None:
        if len(messages) > 1:
            raise InputError(
                f"{problem.where}: a chat of {len(messages)} messages needs a chat template, and there is none "
                "(data.prompt.chat_template); give the path of one"
            )
        return messages[0]["content"]
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return _apply(tokenizer, messages, config, template, problem.where)


def _apply(tokenizer: Any, messages: list[dict[str, str]], config: PromptConfig, template: str, where: str) -> str:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **config.chat_template_args
        )
    except TemplateError as error:
        raise InputError(f"{where}: the chat template refuses these messages: {error}") from error
