"""Terms, corrections, advantages and aggregations of a user's file: they act as the built-in ones do, and are tried."""

from pathlib import Path

import pytest
import torch
import yaml

from megatron_rl.config import ObjectiveConfig, load_recipe
from megatron_rl.config.objective import ObjectiveWarning, user_functions
from megatron_rl.errors import InputError
from megatron_rl.objective import compute_advantages, compute_objective
from megatron_rl.objective.trial import check_user_functions
from megatron_rl.run.identity import contents
from tests.unit.objective.batches import packed, padded, random_batch

REPOSITORY = Path(__file__).parents[3]

OWN = """
import torch
from megatron_rl.objective.corrections import Effect
from megatron_rl.objective.inputs import safe_exp
from megatron_rl.objective.policy_terms import Term


def sapo(tokens, tau_positive=1.0, tau_negative=1.05):
    tau = torch.full_like(tokens.weight, tau_positive).masked_fill_(tokens.advantages < 0, tau_negative)
    return -torch.sigmoid(tau * (safe_exp(tokens.log_ratio) - 1)) * (4 / tau) * tokens.advantages


def cispo(tokens, clip_high):
    ratio = safe_exp(tokens.log_ratio.detach())
    return Term(-ratio.clamp(max=1 + clip_high) * tokens.advantages * tokens.current, ratio > 1 + clip_high)


def tis(ratios, cap=2.0):
    return Effect(weight=ratios.token.clamp(max=cap), bounds=(0.0, cap))


def weight(ratios, cap=2.0):
    return ratios.token.clamp(max=cap)


def keep(ratios, threshold):
    low = (ratios.token < threshold) & ratios.tokens.mask
    return ratios.expand(ratios.tokens.layout.sum(low.to(ratios.tokens.weight.dtype)) == 0)


def centred(groups):
    return groups.centred


def token_mean(lengths, counts, config):
    return 1 / max(float(counts.num_tokens), 1.0)


def batch_mean(tokens):
    return -(tokens.log_ratio.exp() - tokens.log_ratio.mean()) * tokens.advantages


def width_mean(tokens):
    return -tokens.log_ratio.exp() * tokens.advantages / tokens.current.shape[-1]


def packed_twice(tokens):
    return -tokens.log_ratio.exp() * tokens.advantages * (2 if tokens.current.dim() == 1 else 1)


def per_sequence(tokens):
    return tokens.sequence_mean(tokens.current)


def single(tokens):
    return (-tokens.log_ratio.exp() * tokens.advantages).float()


def constant(tokens):
    return -tokens.log_ratio.detach().exp() * tokens.advantages


def not_finite(tokens):
    return tokens.current / tokens.current * tokens.advantages


def number(tokens):
    return 1.0


def raises(tokens):
    return tokens.no_such_thing


def short_advantage(groups):
    return groups.centred[:1]


not_a_function = 3
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("own") / "my_objective.py"
    file.write_text(OWN)
    return file


def config(**values) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(values)


def loss_and_gradient(values: dict, form) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    inputs, _ = form(random_batch(3))
    result = compute_objective(inputs, config(**values))
    result.loss.backward()
    return result.loss, inputs.current_logprobs.grad, result.metrics


@pytest.mark.parametrize("form", [padded, packed])
@pytest.mark.parametrize(
    ("built_in", "by_file"),
    [
        (
            {"policy_term": {"name": "sapo", "tau_negative": 1.3}},
            {"policy_term": {"name": "{}:sapo", "tau_negative": 1.3}},
        ),
        ({"policy_term": "sapo"}, {"policy_term": "{}:sapo"}),
        ({"policy_term": {"name": "cispo"}}, {"policy_term": {"name": "{}:cispo", "clip_high": 5.0}}),
        ({"correction": [{"mode": "tis", "cap": 1.1}]}, {"correction": [{"mode": "{}:tis", "cap": 1.1}]}),
        ({"correction": ["tis"]}, {"correction": "{}:tis"}),
        (
            {"correction": [{"mode": "veto", "threshold": 0.7, "renormalize": True}]},
            {"correction": [{"mode": "{}:keep", "threshold": 0.7, "is_weight": False, "renormalize": True}]},
        ),
        ({"aggregation": "token-mean"}, {"aggregation": "{}:token_mean"}),
    ],
    ids=["sapo", "defaults", "cispo", "tis", "tis-short", "veto", "token-mean"],
)
def test_a_function_acts_as_the_built_in_one(own, built_in, by_file, form):
    named = yaml.safe_load(yaml.safe_dump(by_file).replace("{}", str(own)))
    expected, of_function = loss_and_gradient(built_in, form), loss_and_gradient(named, form)
    assert torch.equal(of_function[0], expected[0])
    assert torch.equal(of_function[1].nan_to_num(), expected[1].nan_to_num())
    assert of_function[2] == expected[2]


def test_a_weight_without_bounds_has_no_metrics_of_its_own(own):
    with_bounds = loss_and_gradient({"correction": [f"{own}:tis"]}, padded)
    bare = loss_and_gradient({"correction": [f"{own}:weight"]}, padded)
    assert torch.equal(bare[0], with_bounds[0])
    assert set(with_bounds[2]) - set(bare[2]) == {name for name in with_bounds[2] if "rollout_is" in name}


def test_an_advantage_acts_as_the_built_in_one(own):
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    advantages = compute_advantages(rewards, groups, f"{own}:centred")
    assert torch.equal(advantages, compute_advantages(rewards, groups, "dr_grpo"))


def test_what_a_term_says_of_itself_counts_as_for_built_in_ones(own):
    with pytest.raises(ValueError, match=r"my_objective.py:cispo, which already carries w"):
        config(policy_term={"name": f"{own}:cispo", "clip_high": 1.0, "carries_w": True}, correction=["tis"])
    with pytest.raises(ValueError, match=r"correction mode .*:tis on policy term minirl"):
        config(policy_term="minirl", correction=[f"{own}:tis"])
    config(policy_term="minirl", correction=[{"mode": f"{own}:keep", "threshold": 0.1, "is_weight": False}])
    anchored = config(policy_term={"name": f"{own}:sapo", "is_anchored_on_rollout": True})
    assert anchored.anchored_on_rollout
    assert not anchored.needs_old_logprobs(4)
    assert config(policy_term=f"{own}:sapo").needs_old_logprobs(4)
    with pytest.warns(ObjectiveWarning, match=r"my_objective.py:sapo.* only under aggregation seq-mean-token-mean"):
        config(policy_term={"name": f"{own}:sapo", "has_sequence_ratio": True}, aggregation="token-mean")


def test_a_function_by_its_own_key_is_the_one_by_the_short_name(own):
    term, correction = {"function": f"{own}:cispo"}, {"function": f"{own}:tis"}
    parameters = {"clip_high": 1.0}, {"cap": 1.5}
    long = config(
        policy_term={"name": "function", **term, "parameters": parameters[0]},
        correction=[{"mode": "function", **correction, "parameters": parameters[1]}],
    )
    short = config(
        policy_term={"name": f"{own}:cispo", **parameters[0]}, correction=[{"mode": f"{own}:tis", **parameters[1]}]
    )
    assert long == short


MASK = {"mode": "{}:keep", "threshold": 0.5, "is_weight": False, "renormalize": True}
GOOD = [
    {"policy_term": "{}:sapo"},
    {"policy_term": {"name": "{}:cispo", "clip_high": 0.3}, "aggregation": "seq-mean-token-mean"},
    {"correction": [{"mode": "{}:tis", "cap": 1.5}, MASK]},
    {"advantage": "{}:centred", "aggregation": "{}:token_mean"},
    {"policy_term": "{}:sapo", "variance": {"sigma": 0.2}, "distortion": {"delta": 2.0}},
    {"policy_term": "{}:sapo", "kl_loss": {"coef": 0.1}},
]
BAD = [
    ({"policy_term": "{}:sap"}, r"defines no function 'sap'.*did you mean sapo"),
    ({"policy_term": "{}:not_a_function"}, r"not_a_function is a int, not a function"),
    ({"policy_term": "elsewhere.py:term"}, r"there is no file elsewhere.py"),
    ({"policy_term": "{}:cispo"}, r"policy_term .*:cispo: takes \(tokens, clip_high\).*missing.*'clip_high'"),
    ({"policy_term": {"name": "{}:sapo", "tau": 1.0}}, r"takes .*parameters tau: got an unexpected.*'tau'"),
    ({"policy_term": "{}:raises"}, r"policy_term .*:raises: raised AttributeError on a small batch.*no_such_thing"),
    ({"policy_term": "{}:per_sequence"}, r"returned torch.float64 \[6\], expected torch.float64 \[6, 7\]"),
    ({"policy_term": "{}:single"}, r"returned torch.float32 .*expected torch.float64"),
    ({"policy_term": "{}:number"}, r"returned float, expected a tensor of shape \[6, 7\]"),
    ({"policy_term": "{}:constant"}, r"its loss has no gradient"),
    ({"policy_term": "{}:not_finite"}, r"returned NaN or an infinite number"),
    ({"policy_term": "{}:batch_mean"}, r"the loss is another where the batch is split into micro-batches"),
    ({"policy_term": "{}:width_mean"}, r"the loss is another where the batch is padded to a greater width"),
    ({"policy_term": "{}:packed_twice"}, r"the loss is another where the batch is packed"),
    ({"correction": [{"mode": "{}:keep"}]}, r"objective.correction.0 .*:keep: takes .*'threshold'"),
    ({"advantage": "{}:short_advantage"}, r"objective.advantage .*returned torch.float64 \[1\], expected .* \[6\]"),
    ({"aggregation": "{}:centred"}, r"objective.aggregation .*:centred: takes .groups., and is called with 3"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_what_would_do_passes_the_trial(own, values):
    check_user_functions(config(**yaml.safe_load(yaml.safe_dump(values).replace("{}", str(own)))))


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(case[0]) for case in BAD])
def test_what_would_not_do_is_refused(own, values, message):
    with pytest.raises(InputError, match=message):
        check_user_functions(config(**yaml.safe_load(yaml.safe_dump(values).replace("{}", str(own)))))


def recipe_with(tmp_path: Path, objective: dict) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        yaml.safe_dump(
            {"name": "own", "extends": str(REPOSITORY / "recipes" / "tiny" / "grpo.yaml"), "objective": objective}
        )
    )
    return file


def test_a_recipe_finds_the_file_beside_it_and_its_content_is_in_the_identity(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(REPOSITORY)
    objective = {
        "policy_term": {"name": "mine.py:sapo", "tau_negative": 1.2},
        "correction": [{"mode": "mine.py:tis", "cap": 3.0}],
        "advantage": "mine.py:centred",
        "aggregation": "mine.py:token_mean",
    }
    recipe = load_recipe(recipe_with(tmp_path, objective))
    names = [f"{tmp_path / 'mine.py'}:{name}" for name in ("centred", "sapo", "tis", "token_mean")]
    assert user_functions(recipe.objective) == names
    assert recipe.objective.policy_term.parameters == {"tau_negative": 1.2}
    assert recipe.objective.correction[0].parameters == {"cap": 3.0}
    before = contents(recipe, [], [])["objective"]
    assert list(before) == names
    (tmp_path / "mine.py").write_text(OWN + "\n")
    after = contents(recipe, [], [])["objective"]
    assert all(after[name] != before[name] for name in names)
    assert "objective" not in contents(load_recipe(REPOSITORY / "recipes" / "tiny" / "grpo.yaml"), [], [])


def test_another_policy_term_on_the_command_line_replaces_the_function(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    path = recipe_with(tmp_path, {"policy_term": {"name": "mine.py:sapo", "tau_negative": 1.2}})
    assert load_recipe(path, ["objective.policy_term=sapo"]).objective.policy_term.name == "sapo"
    changed = load_recipe(path, ["objective.policy_term.parameters.tau_negative=1.4"]).objective.policy_term
    assert changed.parameters == {"tau_negative": 1.4}


def test_parameters_beside_the_name_need_a_mapping_of_the_others(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    term = {"name": "mine.py:sapo", "tau_negative": 1.2, "parameters": 3}
    with pytest.raises(InputError, match=r"policy_term.parameters: found 3"):
        load_recipe(recipe_with(tmp_path, {"policy_term": term}))
    term["parameters"] = {"tau_positive": 0.9}
    recipe = load_recipe(recipe_with(tmp_path, {"policy_term": term}))
    assert recipe.objective.policy_term.parameters == {"tau_positive": 0.9, "tau_negative": 1.2}


def test_a_misspelt_name_lists_what_there_is(tmp_path):
    with pytest.raises(InputError, match=r"policy_term.name: found 'ppo'.*fipo, path/to/file.py:function"):
        load_recipe(recipe_with(tmp_path, {"policy_term": "ppo"}))
    with pytest.raises(InputError, match=r"aggregation.*'token-mean'.*path/to/file.py:function"):
        load_recipe(recipe_with(tmp_path, {"aggregation": "token_mean"}))
