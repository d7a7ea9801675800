"""The rules between the section `teacher` and the others."""

from __future__ import annotations

from megatron_rl.config.second_model import TeacherModelConfig
from megatron_rl.config.sections import RecipeSections


def teacher_problems(recipe: RecipeSections) -> list[str]:
    """Why a teacher cannot teach, or something else of ``recipe`` cannot be had beside one; empty where all fits."""
    teacher, objective = recipe.teacher, recipe.objective
    teaches = teacher is not None and teacher.weight > 0
    problems = []
    if objective.advantage == "none" and not teaches:
        problems.append(
            "objective.advantage: none without a teacher that has a weight: every advantage would be 0; set teacher, "
            "or another advantage"
        )
    if objective.advantage == "none" and objective.kl_in_reward is not None:
        problems.append(
            "objective.kl_in_reward: set with objective.advantage: none, which learns nothing from rewards; use kl_loss"
        )
    for key, model in ({} if teacher is None else teacher.models).items():
        problems += _model_problems(recipe, model, f"{key}.engine: {model.engine}")
    if teacher is not None and teacher.tokens == "student" and recipe.rollout.sampled_head != teacher.top_k:
        problems.append(
            f"rollout.sampled_head: {recipe.rollout.sampled_head} with teacher.tokens: student and top_k: "
            f"{teacher.top_k}: the sampler returns the sets; use the same number for both"
        )
    if not teaches:
        return problems
    beside = {
        "batch.filter_groups: true": (recipe.batch.filter_groups, "groups with equal rewards teach, too; use false"),
        "acceptance: set": (recipe.acceptance is not None, "it judges updates by rewards alone; use null"),
    }
    of_advantages = {
        "objective.advantage: min_variance": (
            objective.advantage == "min_variance",
            "its baseline is best for one advantage a response; use another",
        ),
        "objective.correction: opsm": (
            any(item.mode == "opsm" for item in objective.correction),
            "it drops responses by the sign of their advantage, which differs from token to token; leave it out",
        ),
        "objective.correction: m2po": (
            objective.m2po_threshold is not None,
            "it chooses tokens by the signs of advantages before the teacher's part is in them; leave it out",
        ),
        "objective.correction: a function with renormalize": (
            any(item.mode == "function" and item.renormalize for item in objective.correction),
            "it is counted by advantages before the teacher's part is in them; use renormalize: false",
        ),
    }
    beside |= {} if teacher.top_k else of_advantages
    problems += [
        f"{key} with teacher.weight {teacher.weight:g}: {why}" for key, (is_set, why) in beside.items() if is_set
    ]
    return problems


def teacher_memory_problems(recipe: RecipeSections) -> list[str]:
    """Why engines of teachers do not fit on a GPU, whatever its size: each takes the share of its memory that the
    policy's takes, and vLLM starts none where less is free."""
    rollout, models = recipe.rollout, {} if recipe.teacher is None else recipe.teacher.models
    engines = sum(model.engine == "vllm" for model in models.values())
    share = rollout.gpu_memory_utilization
    if engines:
        engines += rollout.engine == "vllm"
    if engines * share < 1 or rollout.kv_cache_gib is not None:
        return []
    return [
        f"rollout.gpu_memory_utilization: {share:g} for each of {engines} engines on a GPU (those of teacher.engine "
        f"vllm take as much as the policy's) leaves nothing to the learner; use less than {1 / engines:.2g}, or "
        "teacher.engine: vllm_server"
    ]


def _model_problems(recipe: RecipeSections, model: TeacherModelConfig, named: str) -> list[str]:
    """Why the engine of one teacher cannot score what is sampled."""
    rollout, problems = recipe.rollout, []
    on_learner = model.engine == "learner"
    if rollout.temperature != 1 and not on_learner:
        problems.append(
            f"rollout.temperature: {rollout.temperature:g} with {named}, which scores at temperature 1: the difference "
            "would be of two temperatures; use 1, or engine: learner"
        )
    if (rollout.top_p < 1 or rollout.top_k) and not (on_learner and rollout.kept_sets):
        problems.append(
            f"rollout.top_p: {rollout.top_p:g}, top_k: {rollout.top_k} with {named}: the student's log-prob would be "
            "over the tokens that were kept and the teacher's over all; use top_p: 1 and top_k: 0, or engine: learner "
            "with rollout.kept_sets"
        )
    if model.engine != "vllm":
        return problems
    if rollout.engine == "exact":
        problems.append(f"{named} with rollout.engine exact, whose process has no vLLM; use vllm_server or learner")
    if rollout.tensor_parallel > 1 and rollout.engine == "vllm":
        problems.append(
            f"{named} with rollout.tensor_parallel {rollout.tensor_parallel}: an engine for each rank, which vLLM does "
            "not have beside one of several; use 1, or vllm_server"
        )
    if "tf32" in set.union(*recipe.fp32_products):
        problems.append(f"{named} with dtype tf32: one process multiplies all fp32 matrices alike; use vllm_server")
    return problems
