"""The exact engine on a policy of fixed logits: where a dose falls, what it is a function of, and how large it is."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from megatron_rl.config.rollout import ExactConfig, NoiseConfig, RolloutConfig
from megatron_rl.exact.doses import make_dose
from megatron_rl.exact.generator import ExactGenerator, GivenTokens, sample
from megatron_rl.exact.turns import Responses
from megatron_rl.rollout.generator import Sampling
from megatron_rl.types import Prompt
from tests.support.rounding import rounded

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0])


class FixedPolicy:
    """The same distribution after every prefix; one replica."""

    stats = {"perf/rollout_running": 8.0}
    vocab_size = len(LOGITS)

    def run(self, prompts, limits, chooser, stop):
        responses = Responses.empty(len(prompts), max(limits), chooser.head)
        everyone = np.arange(len(prompts))
        for place in range(max(limits)):
            needed = chooser.ahead(everyone.tolist(), np.full(len(prompts), place), 1)
            columns = chooser.choose(LOGITS.expand(len(prompts), -1), torch.from_numpy(needed[:, 0]))
            responses.add(everyone, place, *(column.numpy() for column in columns))
        responses.lengths = np.array(limits)
        return range(len(prompts)), responses

    def logprobs(self, logits, tokens, temperature, head):
        of_all = (logits / temperature).log_softmax(-1)
        return of_all.gather(1, tokens[:, None])[:, 0], *([] if head is None else [of_all.gather(1, head)])

    def whole_vocabulary(self, logits):
        return logits

    def owners(self, number):
        return [0] * number

    def dosed(self, dose, seeds, prompt_seeds):
        return nullcontext()


def generator_of(exact: ExactConfig, head: int = 0) -> ExactGenerator:
    return ExactGenerator(
        RolloutConfig(engine="exact", max_response_length=8, sampled_head=head),
        make_dose(exact, seed=3),
        FixedPolicy(),
        stop_token_ids=[],
        decode=str,
        describe=dict,
    )


def rollouts_of(generator: ExactGenerator, step: int = 0, sampling: Sampling | None = None) -> list:
    prompts = [Prompt(f"p:{i}", [1], "0") for i in range(4)]
    groups = generator.rollout(prompts, 2, policy_version=0, step=step, sampling=sampling)
    return [rollout for group in groups for rollout in group.rollouts]


def differences(rollouts: list) -> np.ndarray:
    """log rho in float64."""
    return np.concatenate([r.exact_logprobs.astype(np.float64) - r.inference_logprobs for r in rollouts])


@pytest.mark.parametrize(
    "exact", [ExactConfig(noise_std=0.5), ExactConfig(noise=NoiseConfig(kind="frozen", std=0.5))], ids=["std", "frozen"]
)
def test_the_dose_falls_on_training_alone(exact):
    generator = generator_of(exact)
    assert np.abs(differences(rollouts_of(generator, sampling=Sampling(8)))).max() == 0
    assert "exact/log_rho_std" not in generator.stats(), "of validation"
    trained = rollouts_of(generator)
    assert np.abs(differences(trained)).min() > 0
    count = differences(trained).size  # of terms in each sum; the root halves what the squares add
    assert generator.stats()["exact/log_rho_std"] == rounded(differences(trained).std(ddof=1), 4 * count)
    total = np.mean([np.abs(differences([rollout])).sum() for rollout in trained])
    assert generator.stats()["exact/abs_log_rho_sum"] == rounded(total, 2 * count)


@pytest.mark.parametrize("noise_std", [0.0, 0.5])
def test_a_head_is_of_what_was_sampled_from(noise_std):
    """Most probable first, log mu with the dose and equal to the sampled token's own; none in validation."""
    generator = generator_of(ExactConfig(noise_std=noise_std), head=3)
    rollouts = rollouts_of(generator)
    tokens, log_mu = (np.concatenate([getattr(r, f"head_{name}") for r in rollouts]) for name in ("tokens", "logprobs"))
    assert (tokens.dtype, log_mu.dtype, tokens.shape) == (np.int32, np.float32, (64, 3))
    assert (np.diff(log_mu, axis=1) < 0).all()
    row, place = (tokens == np.concatenate([r.tokens for r in rollouts])[:, None]).nonzero()
    of_sampled = np.concatenate([r.inference_logprobs for r in rollouts])
    assert len(row) > 32
    assert log_mu[row, place].tolist() == of_sampled[row].tolist()
    clean = LOGITS.log_softmax(-1).numpy()[tokens]
    assert (log_mu == clean).all() if noise_std == 0 else (log_mu != clean).all()
    assert rollouts_of(generator, sampling=Sampling(8))[0].head_logprobs is None


def test_a_held_dose_moves_after_training_alone_and_is_kept():
    noise = NoiseConfig(kind="logits", std=0.5, hold=0.1)
    generator = generator_of(ExactConfig(noise=noise))
    rollouts_of(generator, sampling=Sampling(8))
    assert generator.state_dict() == {"dose": 0.5}
    rollouts_of(generator)
    stats = generator.stats()
    assert stats["exact/dose"] == 0.5
    moved = 0.5 * max((0.1 / stats["exact/log_rho_std"]) ** 0.25, 0.5)
    assert generator.state_dict() == {"dose": rounded(moved)}
    rollouts_of(generator)  # again in the same step, as `acceptance` samples
    assert generator.state_dict() == {"dose": rounded(moved)}
    resumed = generator_of(ExactConfig(noise=noise))
    resumed.load_state_dict(generator.state_dict())
    again, after = rollouts_of(resumed, step=1), rollouts_of(generator, step=1)
    assert [r.inference_logprobs.tolist() for r in again] == [r.inference_logprobs.tolist() for r in after]
    free = generator_of(ExactConfig(noise=NoiseConfig(kind="logits", std=0.5)))
    free.load_state_dict({"dose": 0.1})
    assert free.state_dict() == {"dose": 0.5}, "the recipe's, where nothing is held"


@pytest.mark.parametrize("context", [1, 2])
def test_frozen_noise_is_a_function_of_the_last_tokens(context):
    """The same dose after the same tokens, in every response and step; another after others."""
    generator = generator_of(ExactConfig(noise=NoiseConfig(kind="frozen", std=0.5, context=context)))
    seen: dict[tuple[int, ...], set[float]] = {}
    for step in range(6):
        for rollout in rollouts_of(generator, step):
            tokens = [1, *rollout.tokens.tolist()]
            for i, size in enumerate(rollout.inference_logprobs - rollout.exact_logprobs):
                seen.setdefault((*tokens[max(0, i + 1 - context) : i + 1], tokens[i + 1]), set()).add(float(size))
    assert {len(sizes) for sizes in seen.values()} == {1}
    assert len(seen) > 4**context
    assert len(set.union(*seen.values())) == len(seen)


def test_a_token_of_probability_0_is_never_drawn():
    """Its cumulated probability is that of the token before it, which a number that is as large exceeds."""
    halves = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]], dtype=torch.float64).expand(3, -1)
    assert sample(halves, torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)).tolist() == [1, 1, 3]


def test_given_tokens_follow_what_each_sequence_has_made():
    given = GivenTokens([np.array([5, 6, 7]), np.array([8])], torch.device("cpu"))
    assert given.ahead([1, 0], np.array([0, 1]), 2).tolist() == [[8, 0], [6, 7]]


def test_independent_noise_is_another_one_at_every_token():
    apart = differences(rollouts_of(generator_of(ExactConfig(noise_std=0.5))))
    assert len(set(apart.tolist())) > len(apart) // 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "weights", "std": 0.1}, "kind weights needs bits"),
        ({"kind": "router"}, "kind router needs std"),
        ({"kind": "stale", "updates": 4, "bits": "int4"}, "bits: int4 has no effect with kind stale"),
        ({"kind": "router", "std": 0.1, "operator": "mlp"}, "operator: mlp has no effect with kind router; remove it"),
        ({"std": 0.1, "layers": [1]}, r"layers: \[1\] has no effect with kind logits; remove it"),
        (
            {"kind": "logits", "std": 0.1, "context": 2},
            "context: 2 has no effect with kind logits; remove it",
        ),
    ],
)
def test_a_dose_has_the_size_of_its_kind_and_no_other(values, message):
    with pytest.raises(ValueError, match=message):
        ExactConfig(noise=NoiseConfig(**values))


def test_the_short_form_stands_alone():
    with pytest.raises(ValueError, match=r"noise_std: 0\.1 beside noise"):
        ExactConfig(noise_std=0.1, noise=NoiseConfig(std=0.2))
