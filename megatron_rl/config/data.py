"""The sections `data` (problems, prompts and their order) and `reward` (how a response earns its reward)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.base import LookedUp, Section, ShortList


class DataSourceConfig(Section):
    """One file of problems: `.jsonl` (one object a line) or `.parquet`; {problem, answer} or verl's columns."""

    path: Annotated[str, LookedUp(hub="dataset")]
    """The file. A relative path is looked up from the recipe's folder first, then from the working directory. Else a
    dataset of the Hugging Face hub in the local cache: OWNER/NAME where it has one file, or OWNER/NAME/FILE."""
    name: str | None = None
    """Prefix of prompt ids, and `data_source` of rows that do not name one. null: the file's name without extension."""
    prompt_key: str | None = None
    """Column of the problem: text or chat messages. null: `prompt`, `problem` or `question`, whichever comes first."""
    answer_key: str | None = None
    """Column of the gold answer; dots descend into nested objects. null: `reward_model.ground_truth`, `answer` or
    `ground_truth`, in this order."""
    limit: PositiveInt | None = None
    """Read only the first this many rows. null: all of them."""
    weight: PositiveFloat | None = None
    """Under `data.train`: this source's part of every batch, relative to the others' weights; each source then has
    epochs of its own. Every source has one, or none has. null: all rows are one set, each once an epoch."""

    @property
    def label(self) -> str:
        """What the ids of its prompts begin with, before a colon."""
        return self.name or Path(self.path).stem


class PromptConfig(Section):
    """How a problem becomes the token ids that the engine sees."""

    template: str = "{problem}"
    """Text around each problem: `{problem}` stands for it. With chat messages it wraps the last user message."""
    system: str | None = None
    """System message put before the chat, unless the row brings its own. Needs a chat template."""
    chat_template: Annotated[str, LookedUp()] = "auto"
    """`auto`: the tokenizer's own where it has one; `none`: plain text; anything else: path of a Jinja file."""
    chat_template_args: dict[str, Any] = {}
    """Extra variables for the chat template, for example {enable_thinking: false}. Each is one that it reads."""
    add_special_tokens: bool = True
    """Let the tokenizer add its first token to plain text. Never done after a chat template, which writes its own."""
    max_length: PositiveInt = 1024
    """Longest prompt in tokens."""
    overlong: Literal["error", "drop"] = "error"
    """A prompt longer than `max_length` ends the run before it starts, or is left out and counted."""

    @field_validator("template")
    @classmethod
    def _template_holds_the_problem(cls, template: str) -> str:
        if template.count("{problem}") != 1:
            raise ValueError(f"must contain {{problem}} exactly once, found {template!r}")
        return template

    @model_validator(mode="after")
    def _system_needs_a_chat(self) -> PromptConfig:
        if self.system is not None and self.chat_template == "none":
            raise ValueError("`system` needs a chat template, but `chat_template` is none; write it into `template`")
        if self.chat_template_args and self.chat_template == "none":
            names = ", ".join(self.chat_template_args)
            raise ValueError(
                f"`chat_template_args` ({names}) has no effect, because `chat_template` is none; remove it"
            )
        return self


Sources = Annotated[list[DataSourceConfig], ShortList("path")]


class DataConfig(Section):
    train: Sources = Field(min_length=1)
    """Problems to train on: one source or a list, concatenated. A bare path stands for {path: ...}."""
    validation: Sources = []
    """Held-out problems, kept apart by `data_source` in the `val/` metrics. Empty: no validation."""
    prompt: PromptConfig = PromptConfig()
    """How problems become prompts, the same for training and validation."""
    train_fraction: float = Field(1.0, gt=0, le=1)
    """Train on this share of the problems, drawn once from `seed`; a smaller share is part of every larger one."""
    shuffle: bool = True
    """A new order every epoch, drawn from (seed, epoch). false: file order every epoch."""
    seed: NonNegativeInt = 0
    """Seed of that order, and of what `train_fraction` draws."""

    @property
    def weights(self) -> dict[str, float]:
        """Name of each source under `data.train` → its weight; empty where none has one."""
        return {source.label: source.weight for source in self.train if source.weight is not None}

    @model_validator(mode="after")
    def _weights_fit(self) -> DataConfig:
        for source in self.validation:
            if source.weight is not None:
                raise ValueError(f"validation: {source.path} has weight {source.weight:g}; weights belong to `train`")
        without = [source.path for source in self.train if source.weight is None]
        if without and len(without) < len(self.train):
            raise ValueError(
                f"train: {', '.join(without)}: no weight, but other sources have one; give every one its own"
            )
        names = [source.label for source in self.train]
        if not without and (twice := sorted({name for name in names if names.count(name) > 1})):
            raise ValueError(f"train: two sources are named {twice[0]!r}; weights need a `name` for each")
        return self


BUILTIN_REWARDS = ("math", "modsum", "exact")
_CUSTOM = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


class OverlongConfig(Section):
    """Soft punishment of length [DAPO]: R += min(-(T - (L - buffer)) / buffer · penalty, 0)."""

    buffer: PositiveInt
    """Tokens before the maximum response length L over which the punishment grows from 0 to `penalty`."""
    penalty: PositiveFloat = 1.0
    """Punishment at the maximum length."""


class MaxErrorFracConfig(Section):
    """Share of a batch's responses whose scoring may fail. Above it the run is saved and ends with status 1."""

    first: float = Field(0.5, ge=0, le=1)
    """Of the first batch: a function that does not work at all fails everywhere."""
    later: float = Field(0.1, ge=0, le=1)
    """Of every later batch. 1: never end for it."""


class RewardConfig(Section):
    name: Annotated[str, LookedUp(is_function=True)] = "math"
    """`math`: equal to the gold answer as mathematics. `exact`: the same string. `modsum`: the digit-sum task.
    `by_source`: chosen per prompt. `file.py:function` or `module:function`: your own, run in worker processes, called
    as f(response, answer), or as f(data_source, solution_str, ground_truth, extra_info) if it names these arguments,
    or with lists if it names their plurals. An `async def` waits for many responses at once.
    A file, like all that a recipe names to be read, is looked up from the recipe's folder first, then from the working
    directory."""
    by_source: Annotated[dict[str, str], LookedUp(is_function=True)] = {}
    """With `name: by_source`: reward of each `data_source`, spelled like `name`. Every source needs an entry."""
    accept_unevaluated: bool = False
    """Under `math`: whether an answer counts that leaves a computation with numbers to the reader, such as
    `1234\\times 5678` or `\\log_2 1024` for their values. Fractions, roots, powers and sums like 2+√3 always count."""
    num_workers: PositiveInt = 2
    """Worker processes for `math` and custom rewards. The other rewards are computed in place."""
    timeout_s: float = Field(5.0, ge=0.1)
    """Processor seconds that one response may cost; then its reward has failed, counted in `reward/timeouts`. One
    that waits without computing is given four times this on the clock. For functions that are async or take lists,
    `wait_s` is the limit instead."""
    memory_limit_mib: PositiveInt = Field(1024, ge=256)
    """Memory that one worker may add to what it holds at start; the reward of a response that needs more has failed,
    also counted in `reward/timeouts`."""
    concurrency: PositiveInt = 64
    """Responses that an `async def` waits for at a time, on one rank, shared by the workers. A function that takes
    lists gets at most a worker's share in one call."""
    wait_s: float = Field(60.0, gt=0)
    """Seconds on the clock that one call may take of a function that is async or takes lists."""
    retries: NonNegativeInt = 2
    """How often a failed call of a function that is async or takes lists is made again, counted in `reward/retries`."""
    retry_wait_s: float = Field(1.0, ge=0)
    """Most seconds before the first of these, twice as many before each later one, up to 30. Chance takes away up to
    half, so that calls which failed together are not repeated together."""
    on_error: Literal["mask", "zero", "end"] = "mask"
    """What becomes of a response whose reward function failed, after all retries. `mask`: it leaves the loss and the
    statistics of its group, counted in `reward/unscored_frac`. `zero`: its reward is 0. `end`: the run is saved and
    ends. A response that breaks the verifier of `math` always scores 0: it has no answer that can be read."""
    max_error_frac: MaxErrorFracConfig = MaxErrorFracConfig()
    """How many responses may fail to be scored: their reward function raised or returned no number, or went over its
    limits. See `on_error` for what becomes of each; log.txt has an example of each kind."""
    overlong: OverlongConfig | None = None
    """Soft punishment of responses close to the length limit. null: none."""
    mask_truncated: bool = False
    """Leave responses cut at the length limit out of the loss. They keep their place in their group's baseline."""

    @model_validator(mode="after")
    def _by_source_is_used(self) -> RewardConfig:
        if (self.name == "by_source") != bool(self.by_source):
            raise ValueError(
                "`name: by_source` and the mapping `by_source` go together: "
                f"found name: {self.name} with {len(self.by_source)} entries"
            )
        for name in self.by_source.values() if self.by_source else [self.name]:
            if name not in BUILTIN_REWARDS and not _CUSTOM.fullmatch(name):
                raise ValueError(
                    f"{'by_source' if self.by_source else 'name'}: unknown reward {name!r}: allowed are "
                    f"{', '.join(BUILTIN_REWARDS)}, by_source, path/to/file.py:function and package.module:function"
                )
        return self
