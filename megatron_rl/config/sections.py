"""All sections of a recipe in one model. `recipe` and `model_rules` have the rules between them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_rl.config.base import AnyPath, LookedUp, OffCount, Section, Short
from megatron_rl.config.data import DataConfig, RewardConfig
from megatron_rl.config.learner import LearnerConfig, PrecisionConfig, RoutingConfig, ScheduleConfig, fp32_products
from megatron_rl.config.monitor import MonitorConfig
from megatron_rl.config.objective import ObjectiveConfig
from megatron_rl.config.rollout import ExactConfig, RolloutConfig
from megatron_rl.config.second_model import ReferenceConfig, ScoringConfig, TeacherConfig
from megatron_rl.errors import printable
from megatron_rl.process.fp32_products import Fp32Product

# The `model` and `runtime` sections: what is trained, and where.


class ModelConfig(Section):
    path: Annotated[AnyPath, LookedUp(hub="model")]
    """Folder of the starting checkpoint in Hugging Face layout (config.json, *.safetensors, tokenizer files).
    A relative path is looked up from the recipe's folder first, then from the working directory. Else a name of the
    Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, that `hf download` has brought into the local cache."""


class RuntimeConfig(Section):
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto` is CUDA where PyTorch sees a device. The only switch between a laptop and a cluster."""


# The `recorder` section: which batches go to disk.


class EvidenceConfig(Section):
    """Batches that are on disk before an alarm asks for them (docs/reading-a-run.md)."""

    batches: PositiveInt = 12
    """Those of the newest so many steps. Most rules on levels look back ten steps, or ask for five in a row."""
    max_gib: float = Field(128.0, gt=0)
    """Most that they take: of larger batches fewer are kept, but always the newest."""


class RecorderConfig(Section):
    record_batches: Literal["off", "on_alarm", "last_n", "all"] = "on_alarm"
    """Batches written to batches/ with tokens, log-probs, routes, rewards and versions, for `megatron-rl batch replay`.
    off: none. on_alarm: those of `evidence`, and of steps in which an alarm with record_batch goes off. last_n: also
    those of the newest `keep` steps, whatever their size. all: every step's."""
    keep: PositiveInt = 4
    """Batches that last_n keeps. From a checkpoint on, the weights of a step can be had again by repeating the
    updates in between: for that, at least as many as checkpoint.every."""
    evidence: EvidenceConfig | None = EvidenceConfig()
    """What explains an alarm: the batches of the newest steps. When the first alarm goes off they stay, and so does,
    beside checkpoint.keep_last, the newest checkpoint from before the alarm's onset. null: nothing of this. With
    record_batches off: only the checkpoint."""

    @property
    def is_every_step(self) -> bool:
        """Whether each step's batch is written, whatever becomes of it later."""
        by_evidence = self.evidence is not None and self.record_batches == "on_alarm"
        return by_evidence or self.record_batches in ("last_n", "all")


FilterMetric = Literal["reward", "raw_reward"]


class BatchConfig(Section):
    """How many sequences a step has and how many updates are made of them."""

    prompts: PositiveInt = 64
    """Prompts per step; each is sampled rollout.num_samples times."""
    minibatches: PositiveInt = 1
    """Optimizer steps per rollout batch; its sequences are dealt into this many parts. 1 is strictly on-policy and
    needs no pass for old log-probs."""
    filter_groups: bool = False
    """Leave out prompts whose samples all earned the same reward: they carry no advantage [DAPO]."""
    filter_metric: FilterMetric = "reward"
    """What filter_groups compares. reward: the one that is learned from, length punishment included. raw_reward: before
    shaping, whether the answer is right (verl's `acc`); an all-wrong group is left out though one response was
    punished for its length."""
    max_generations: PositiveInt = 1
    """With filter_groups: sample further prompts until `prompts` groups are left, at most this many rounds in all."""
    generation_prompts: PositiveInt | None = None
    """With filter_groups: prompts sampled in each round (verl's `gen_batch_size`); of the groups left the first
    `prompts` are learned from. null: in the first round `prompts`, then as many as are missing."""

    @property
    def prompts_of_a_round(self) -> int:
        """Prompts of the first round of sampling of a step."""
        return self.generation_prompts or self.prompts


class CheckpointConfig(Section):
    every: OffCount = 0
    """Steps between checkpoints; 0 or null: only at the end of the run."""
    keep_last: OffCount = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete. 0 or null keeps all."""
    async_save: bool = False
    """Write the periodic checkpoints while training goes on, from a copy of the state in host memory."""
    export_hf: bool = False
    """Also write the final weights in Hugging Face layout to checkpoints/hf."""


class ValidationConfig(Section):
    every: OffCount = 0
    """Steps between validations on data.validation, the last after training; 0 or null: never."""
    at_start: bool | None = None
    """Validate before the first step. null: where `every` is not 0."""
    num_samples: PositiveInt = 1
    """Responses per held-out prompt (n of avg@n and pass@n). Rows that make the same prompt with the same answer are
    one (AIME-2024's public file holds each problem 32 times)."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Sampling temperature of validation; 0 is greedy. Other values below 0.01 are refused: vLLM would raise them."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Validation samples from the smallest set of tokens whose probabilities reach this sum. 1: from all."""
    limit: PositiveInt | None = None
    """Use only the first this many held-out prompts. null: all."""

    def is_due(self, step: int) -> bool:
        """Whether to validate before ``step``."""
        if step == 0 and self.at_start is not None:
            return self.at_start
        return self.every > 0 and step % self.every == 0

    @field_validator("temperature")
    @classmethod
    def _at_least_vllms_least(cls, temperature: float) -> float:
        if 0 < temperature < 0.01:
            raise ValueError(f"found {temperature:g}; vLLM would raise it to 0.01; use 0 (greedy) or at least 0.01")
        return temperature


class AcceptanceConfig(Section):
    """The update of a step is proposed: the engine samples held-out prompts with it, and it is kept or undone by how
    the learner's probabilities of these responses differ from the engine's (arXiv 2606.29526)."""

    tolerance: NonNegativeFloat
    """c: an update is kept where T_post >= -c. The paper ends at 0 and 1e-3, for two models."""
    start_tolerance: NonNegativeFloat | None = None
    """c of the first step; it comes down to `tolerance` over anneal_steps. null: `tolerance` throughout."""
    anneal_steps: PositiveInt = 100
    """Steps until c is `tolerance`."""
    prompts: PositiveInt = 32
    """Prompts of data.validation that are sampled, the first so many, in every step."""
    num_samples: PositiveInt = 8
    """Responses to each, whose advantages are those of `objective.advantage`."""


class RecipeSections(Section):
    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name of the run, and of its folder below `run_root`."""
    seed: NonNegativeInt = 0
    """Seed of sampling and of every other random choice that has none of its own."""
    num_steps: PositiveInt | None = None
    """Rollout steps of the run. null: as many as `num_epochs` takes."""
    num_epochs: PositiveFloat | None = None
    """In place of `num_steps`: passes over data.train, rounded up to whole steps of batch.prompts prompts."""
    run_root: AnyPath = Path("runs")
    """Folder that run directories go to; a relative path counts from the working directory."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Where it runs."""
    model: ModelConfig
    """What is trained."""
    data: DataConfig
    """On which problems."""
    reward: Annotated[RewardConfig, Short("name")] = RewardConfig()
    """What earns a reward; the name alone stands for {name: ...}."""
    batch: BatchConfig = BatchConfig()
    """Arithmetic of a step."""
    rollout: RolloutConfig = RolloutConfig()
    """How responses are sampled."""
    exact: ExactConfig = ExactConfig()
    """The zero-mismatch arm."""
    learner: LearnerConfig = LearnerConfig()
    """Layout, precision and optimizer."""
    precision: PrecisionConfig = PrecisionConfig()
    """What is computed in fp32, and which weights the rollout engine gets."""
    routing: RoutingConfig = RoutingConfig()
    """Router replay, and what is measured of routes."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is optimized."""
    reference: ReferenceConfig | None = None
    """A policy that is not trained, for the divergence from it. null: none."""
    teacher: TeacherConfig | None = None
    """A model that the policy learns from, token by token. null: none."""
    scoring: Annotated[ScoringConfig | None, Short("dtype")] = None
    """The policy in another precision: what of the mismatch is the learner's. null: none."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate moves."""
    acceptance: AcceptanceConfig | None = None
    """Which updates are kept. null: all of them."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out evaluation during the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    monitor: MonitorConfig = MonitorConfig()
    """What is recorded and alarmed on."""
    recorder: RecorderConfig = RecorderConfig()
    """Which batches are kept on disk."""

    @model_validator(mode="after")
    def _has_one_length(self) -> RecipeSections:
        if self.num_steps is None and self.num_epochs is None:
            raise ValueError("num_steps: missing; give the number of steps, or num_epochs")
        if self.num_steps is not None and self.num_epochs is not None:
            both = f"num_epochs: {self.num_epochs:g} beside num_steps: {self.num_steps}"
            raise ValueError(f"{both}; give one, and null for the other")
        return self

    @field_validator("run_root")
    @classmethod
    def _run_root_can_be_printed(cls, root: Path) -> Path:
        if str(root) != printable(str(root)) or "\n" in str(root):
            raise ValueError(
                f"{str(root)!r} holds a control character, which scripts cannot pass on; rename the folder"
            )
        return root

    @property
    def run_dir(self) -> Path:
        return self.run_root / self.name

    @property
    def may_record_batches(self) -> bool:
        """Whether any step's batch can come to be written to disk."""
        return self.recorder.is_every_step or any("record_batch" in rule.then for rule in self.monitor.alarms)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run; 0 while `num_epochs` stands in the place of `num_steps`."""
        return (self.num_steps or 0) * self.batch.minibatches

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        if self.num_steps is None:
            return f"{self.num_epochs:g} epochs"
        return f"{self.num_steps} steps, {self.num_updates} updates"

    @property
    def num_sequences(self) -> int:
        """Sequences sampled per step, before filtering."""
        return self.batch.prompts * self.rollout.num_samples

    @property
    def scored_by_learner(self) -> dict[str, Path | None]:
        """The folders of the models that score tokens on the learner's ranks, by the field of `Rollout` that they fill;
        None: the policy without its adapters."""
        folders: dict[str, Path | None] = {}
        if self.reference is not None:
            is_policy = self.reference.path is None and self.learner.lora is not None
            folders["reference_logprobs"] = None if is_policy else self.reference.path or self.model.path
        if self.teacher is not None and self.teacher.engine == "learner":
            folders["teacher_logprobs"] = self.teacher.path or self.model.path
        return folders

    @property
    def fp32_products(self) -> tuple[set[Fp32Product], set[Fp32Product]]:
        """`learner.fp32_products` of the run, those of `scoring` among the learner's."""
        own, engine = fp32_products(self.learner.dtype, self.rollout.dtype, self.precision)
        if self.scoring is not None:
            own = own | fp32_products(self.scoring.dtype, self.rollout.dtype, self.scoring.of(self.precision))[0]
        return own, engine

    @property
    def makes_old_logprobs(self) -> bool:
        """Whether a step has a pass for old log-probs before its first update.

        A step with fewer sequences than `batch.minibatches` has fewer updates, and then may have none.
        """
        return self.needs_old_logprobs(self.batch.minibatches)

    def needs_old_logprobs(self, num_updates: int) -> bool:
        """Whether a batch with so many updates has that pass: for the objective, R2's routes or a teacher."""
        compares_po = self.teacher is not None and self.teacher.student == "recompute" and num_updates > 1
        return self.routing.replay == "r2" or compares_po or self.objective.needs_old_logprobs(num_updates)
