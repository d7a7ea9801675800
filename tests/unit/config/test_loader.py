"""Reading recipes: inheritance, overrides, YAML's traps, errors in the user's terms, the schema for editors."""

import json
import subprocess
import sys
import warnings

import jsonschema
import pytest
import yaml

from megatron_rl.__main__ import main
from megatron_rl.config import Recipe, load_recipe
from megatron_rl.config.loader import is_base, read_yaml, recipe_schema
from megatron_rl.config.objective import ObjectiveWarning
from megatron_rl.errors import InputError
from megatron_rl.instruments.lab.jobs import is_study
from megatron_rl.run.prepare import check_recipe
from tests.support.slow import slow_but
from tests.support.small_recipe import error_of, minimal
from tests.support.tiny import DATA, MODEL, REPOSITORY

GRPO = REPOSITORY / "recipes" / "tiny" / "grpo.yaml"


def test_a_recipe_is_its_difference_from_its_base(write):
    write("base.yaml", minimal(seed=7, batch={"prompts": 4, "minibatches": 2}))
    recipe = load_recipe(write("r.yaml", "extends: base.yaml\nname: mine\nbatch: {minibatches: 1}\n"))
    assert (recipe.name, recipe.seed, recipe.batch.prompts, recipe.batch.minibatches) == ("mine", 7, 4, 1)


def test_another_policy_term_brings_its_own_numbers(write):
    write("base.yaml", minimal(objective={"policy_term": {"name": "ppo_clip", "clip_low": 0.1}}))
    with pytest.warns(ObjectiveWarning, match="gspo equals the paper's sequence objective only under"):
        recipe = load_recipe(write("r.yaml", "extends: base.yaml\nname: r\nobjective: {policy_term: {name: gspo}}\n"))
    assert recipe.objective.policy_term.clip_low == 3e-4
    kept = load_recipe(write("k.yaml", "extends: base.yaml\nname: k\nobjective: {policy_term: {clip_high: 0.5}}\n"))
    assert (kept.objective.policy_term.clip_low, kept.objective.policy_term.clip_high) == (0.1, 0.5)
    settings = ["name=s", "objective.policy_term={name: gspo}", "objective.aggregation=seq-mean-token-mean"]
    by_set = load_recipe(write("s.yaml", "extends: base.yaml"), settings)
    assert by_set.objective.policy_term.clip_low == 3e-4
    write("own.yaml", minimal(objective={"policy_term": {"name": "terms.py:f", "beta": 0.5}}))
    for name, left in (("terms.py:g", {}), ("terms.py:f", {"beta": 0.5})):
        own = load_recipe(
            write("o.yaml", "extends: own.yaml\nname: o\n"), [f"objective.policy_term={{name: '{name}'}}"]
        )
        assert own.objective.policy_term.parameters == left


def test_several_bases_merge_in_order(write):
    write("a.yaml", minimal(seed=1, num_steps=5))
    write("b.yaml", "seed: 2")
    assert load_recipe(write("r.yaml", "name: r\nextends: [a.yaml, b.yaml]")).seed == 2
    write("c.yaml", "extends: d.yaml")
    assert "extends itself" in error_of(write("d.yaml", "extends: c.yaml"))


def test_a_recipe_does_not_inherit_its_name(write):
    """Two recipes of one name share a run directory."""
    write("a.yaml", minimal())
    child = write("child.yaml", "extends: a.yaml\nseed: 2")
    message = error_of(child)
    assert f"recipe {child}: name: 'x' is inherited (child.yaml extends a.yaml)" in message
    assert load_recipe(child, ["name=y"]).name == "y"


@pytest.mark.parametrize(
    ("section", "temperature"), [("rollout", 0.01), ("rollout", 2), ("validation", 0), ("validation", 0.01)]
)
def test_the_least_and_the_highest_temperature_are_allowed(section, temperature):
    recipe = load_recipe(REPOSITORY / "recipes/tiny/grpo.yaml", [f"{section}.temperature={temperature}"])
    assert getattr(recipe, section).temperature == temperature


def test_overrides_win_and_are_yaml(write):
    recipe = load_recipe(
        GRPO, ["learner.optimizer.lr=3e-6", "batch.prompts=2", "data.validation=[]", "validation.every=0"]
    )
    assert recipe.learner.optimizer.lr == 3e-6
    assert recipe.data.validation == []
    assert "expected KEY.PATH=VALUE" in error_of(GRPO, "batch.prompts")
    assert "is a value, not a section" in error_of(GRPO, "name.x=1")


def test_paths_are_looked_up_beside_the_recipe_that_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(GRPO)
    assert recipe.model.path == MODEL
    assert recipe.data.train[0].path == str(DATA / "train.jsonl")


def test_the_objective_knows_the_longest_response(write):
    assert load_recipe(GRPO).objective.max_response_length == 24


def test_resolved_recipes_load_again(tmp_path):
    recipe = load_recipe(GRPO)
    file = tmp_path / "recipe.resolved.yaml"
    file.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(file) == recipe


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lerner.dtype=fp32", ["lerner: unknown key", "did you mean 'learner'?"]),
        ("learner.parallel.tensor=3", ["learner.parallel.tensor: 3 does not divide", "attention heads (4)"]),
        ("learner.parallel.expert=5", ["learner.parallel.expert: 5 does not divide", "experts (8)"]),
        ("learner.parallel.pipeline=3", ["tensor · pipeline · context = 3 does not divide the number of ranks (1)"]),
        ("learner.parallel.tensor=2", ["pipeline · context = 2 does not divide the number of ranks (1)"]),
        ("learner.parallel.context=2", ["tensor · pipeline · context = 2 does not divide the number of ranks (1)"]),
        ("learner.parallel.context=2\nrollout.engine=exact", ["learner.parallel.context: 2", "exact", "use 1"]),
        ("batch.minibatches=7", ["batch.minibatches: 7 does not divide the 128 sequences"]),
        ("rollout.max_response_length=4000", ["rollout.max_response_length", "max_position_embeddings is 2048"]),
        ("rollout.top_p=0.9", ["rollout.top_p: 0.9", "a mismatch that no correction removes"]),
        ("data.train=nowhere.jsonl", ["data.train", "nowhere.jsonl"]),
        ("model.path=nowhere", ["model.path", "no such folder"]),
        ("data.train={path: train.jsonl, answer_key: anser}", ["anser"]),
        ("learner.compile=true", ["learner.compile: removed", "leave it out"]),
        ("learner.loss_scale.growth_factor=4.0", ["learner.loss_scale.growth_factor: removed", "grows by 2"]),
        ("monitor.repetition_ngram=4", ["monitor.repetition_ngram: removed", "n-grams of 8 tokens"]),
        ("monitor.show_sample_every=2", ["monitor.show_sample_every: removed", "run samples RUN"]),
        ("learner.offload.during_passes=true", ["learner.offload.during_passes: true", "learner.offload.optimizer"]),
        ("learner.offload.weights=true\nrollout.engine=exact", ["learner.offload.weights: true", "use false"]),
        (
            "learner.offload={gradients: true, optimizer: true}\nrollout.engine=vllm_server",
            [
                "learner.offload.gradients: true",
                "offload.optimizer: true",
                "nothing is gained; use false or set learner",
            ],
        ),
        ("rollout.quantization.block=[1, null]", ["rollout.quantization.block: [1, None], but weights is null"]),
        ("rollout.quantization=fp8\nrollout.engine=exact", ["rollout.quantization: set, but rollout.engine exact"]),
        ("runtime.device=cuda\nrollout.quantization=int4", ["weights: int4 on CUDA", "use fp8, or runtime.device cpu"]),
        (
            "runtime.device=cuda\nrollout.quantization={weights: fp8, block: [1, 64]}",
            ["rollout.quantization.block: [1, 64]", "[128, 128], [1, null] and [null, null]"],
        ),
        (
            "runtime.device=cuda\nrollout.quantization=fp8",
            ["leaves experts of 128 × 64", "use another tensor_parallel", "rollout.dtype: fp32"],
        ),
        ("name=a/b", ["name: found 'a/b'"]),
        ("batch.max_generations=2", ["batch.max_generations: 2", "set filter_groups: true"]),
        ("batch.generation_prompts=20", ["batch.generation_prompts: 20", "set filter_groups: true"]),
        ("batch.filter_metric=raw_reward", ["batch.filter_metric: raw_reward", "set filter_groups: true"]),
        ("batch.filter_groups=true\nbatch.generation_prompts=15", ["15 in at most 1 rounds", "16 of batch.prompts"]),
        ("validation.top_p=0.7\nrollout.engine=exact", ["validation.top_p: 0.7", "use 1"]),
        (
            "objective.anchor=interpolate\nobjective.correction=tis",
            ["anchor: interpolate with rollout.max_staleness 0"],
        ),
        ("batch.minibatches=1\nschedule.staleness_bound=1e-6", ["staleness_bound: 1e-06 bounds nothing", "or null"]),
        ("batch.minibatches=1\nobjective.log_ratio_penalty=0.1", ["log_ratio_penalty: 0.1 adds nothing", "or 0"]),
        (
            "batch.minibatches=1\nobjective.correction=[{mode: opsm, pi_old: learner}]",
            ["opsm with pi_old: learner and batch.minibatches 1 never drops anything"],
        ),
    ],
)
def test_errors_name_key_value_and_remedy(override, expected):
    override = override.replace("path: train.jsonl", f"path: {DATA / 'train.jsonl'}")
    with pytest.raises(InputError) as caught:
        check_recipe(load_recipe(GRPO, override.split("\n")), world_size=1)
    for text in expected:
        assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("more", "is_fine"),
    [
        ([], False),
        (["batch.minibatches=2"], True),
        (["objective.anchor=bypass"], True),
        (["objective.anchor=bypass", "rollout.engine=exact"], False),
        (["objective.anchor=bypass", "rollout.engine=exact", "batch.minibatches=2"], True),
        (["objective.anchor=bypass", "rollout.engine=exact", "exact.noise_std=0.1"], True),
    ],
)
def test_a_penalty_needs_two_policies(more, is_fine):
    changes = ["batch.minibatches=1", "objective.log_ratio_penalty=0.1", *more]
    if is_fine:
        load_recipe(GRPO, changes)
    else:
        with pytest.raises(InputError, match=r"log_ratio_penalty: 0\.1 adds nothing"):
            load_recipe(GRPO, changes)


def test_all_problems_are_told_at_once():
    message = error_of(GRPO, "learner.parallel.tensor=3", "learner.parallel.expert=5", "rollout.top_k=5")
    assert all(text in message for text in ("parallel.tensor", "parallel.expert", "rollout.top_k"))


def test_another_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "model_type 'gpt2'; supported architectures: qwen3_moe, " in error_of(GRPO, f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "lacks the key" in error_of(GRPO, f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in error_of(GRPO, f"model.path={tmp_path}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_experts_per_tok": 1},
            "num_experts_per_tok is 1 of 8 experts; from 2 to 8 are supported; Megatron-Core's",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts; from 2 to 8 are supported"),
        ({"hidden_size": "wide"}, "hidden_size: 'wide'; allowed: a whole number from 1 to 1048576"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0; allowed: a whole number from 1 to 4096"),
        ({"num_hidden_layers": None}, "num_hidden_layers: None; allowed: a whole number from 1 to 1024"),
        ({"rope_parameters": "none"}, "rope_parameters: 'none'; allowed: an object of keys, or null"),
    ],
)
def test_a_config_json_that_no_learner_can_build(change, said, tmp_path):
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert said in error_of(GRPO, f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("[1]")
    assert "holds a list; expected an object of keys" in error_of(GRPO, f"model.path={tmp_path}")


def test_missing_recipe_names_a_near_one():
    message = error_of(GRPO.with_name("grp.yaml"))
    assert "no such file" in message
    assert "grpo.yaml" in message


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["check", str(GRPO), "--no-transformers"], 0, "16 prompts × 8 samples = 128 sequences"),
        (["check", "nowhere.yaml"], 2, "error: recipe"),
        (["check", str(GRPO), "--set", "seeed=1"], 2, "did you mean 'seed'?"),
        (["train", str(GRPO), "--set", "learner.parallel.expert=3"], 2, "does not divide"),
        (["schema"], 0, '"num_steps"'),
    ],
)
def test_command_line(arguments, status, text, capsys):
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert text in (captured.out if status == 0 else captured.err)
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("options", slow_but([["--no-transformers"]], [[], ["--no-transformers"]]), ids=len)
def test_check_needs_no_engine(options):
    """`check` loads tokenizer, prompts and reward, and no engine; it compares models in a process of its own."""
    program = (
        "import sys; from megatron_rl.__main__ import main; "
        f"status = main({['check', str(GRPO), *options]}); "
        "print([m for m in ('vllm', 'megatron') if m in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_every_field_of_the_schema_is_documented():
    def undocumented(schema: dict, path: str) -> list[str]:
        undocumented_keys = []
        for name, field in schema.get("properties", {}).items():
            if "description" not in field and name not in ("name", "mode"):
                undocumented_keys.append(f"{path}{name}")
        for definition, inner in schema.get("$defs", {}).items():
            undocumented_keys += undocumented(inner, f"{definition}.")
        return undocumented_keys

    assert undocumented(Recipe.model_json_schema(), "") == []


SCHEMA = recipe_schema()

VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

RECIPES = sorted(path for path in (REPOSITORY / "recipes").rglob("*.yaml") if not is_study(path))


def problems(values: dict) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(values)]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY / "recipes")))
def test_every_shipped_recipe_is_valid_as_written_and_resolved(path):
    assert problems(read_yaml(path, "recipe")) == []
    if not is_base(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert problems(load_recipe(path).model_dump(mode="json")) == []


@pytest.mark.parametrize(
    "values",
    [
        {"extends": "base.yaml"},
        {"extends": ["a.yaml", "b.yaml"], "num_steps": 3},
        {"extends": None},
        {"data": {"train": "a.jsonl"}},
        {"data": {"train": {"path": "a.jsonl", "limit": None}, "validation": None}},
        {"data": {"train": ["a.jsonl", {"path": "b.jsonl"}], "validation": []}},
        {"reward": "my.py:f"},
        {"reward": {"name": "math", "overlong": None}},
        {"objective": {"policy_term": "gspo", "correction": None}},
        {"objective": {"policy_term": {"clip_high": 0.5}, "correction": "tis"}},
        {"objective": {"correction": ["tis", {"mode": "veto"}], "distortion": None}},
        {"validation": {"every": None}, "checkpoint": {"every": None, "keep_last": None}, "rollout": {"top_k": None}},
        {"learner": {"lora": None, "optimizer": {"clip_grad": None, "lr": 1}}},
    ],
)
def test_what_the_loader_takes(values):
    assert problems(values) == []


@pytest.mark.parametrize(
    "values",
    [
        {"extnds": "base.yaml"},
        {"extends": 3},
        {"seed": -1},
        {"seed": "1"},
        {"seed": True},
        {"batch": None},
        {"data": {"train": 7}},
        {"data": {"train": [{"pth": "a"}]}},
        {"objective": {"policy_term": {"name": "gspo", "dual_clip": 3}}},
        {"objective": {"policy_term": {"name": "gsop"}}},
        {"objective": {"correction": [{"mode": "tis", "caps": 2}]}},
        {"learner": {"lr": 1e-6}},
        {"learner": {"dtype": "fp8"}},
        {"rollout": {"temperature": 0}},
    ],
)
def test_what_the_loader_refuses(values):
    assert problems(values) != []
