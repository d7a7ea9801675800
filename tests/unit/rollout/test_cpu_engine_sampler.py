"""What is sampled inside vLLM on a CPU: the right distribution, from one number per token, whatever else is sampled."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import random_sample

from megatron_rl.exact.generator import Draws
from megatron_rl.rollout import cpu_engine
from megatron_rl.rollout.cpu_engine import BLOCK, UniformStream, forward_cpu, gather_logprobs, select
from tests.support.rounding import assert_rounded

VLLM_GATHER = cpu_engine._gather_with_ranks
LARGEST = 1.0 - 2.0**-53
SAMPLER = SimpleNamespace(logprobs_mode="processed_logprobs")


def seeded(*seeds: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def logits(rows: int, vocabulary: int = 11) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(7))


class TestUniformStream:
    def test_is_the_philox_sequence_of_its_seed_however_many_are_drawn_at_a_time(self):
        stream, number = UniformStream(2**63 - 1), 2 * BLOCK + 3
        expected = np.random.Generator(np.random.Philox(key=2**63 - 1)).random(number)
        assert [stream.next() for _ in range(number)] == expected.tolist()

    def test_is_what_the_exact_engine_draws(self):
        stream, draws = UniformStream(5), Draws(None, [[1]], [5], 1.0, SimpleNamespace(is_on_logits=False))
        numbers = np.concatenate([draws.ahead([0], np.zeros(1), steps)[0] for steps in (1, 16, 23)])
        assert [stream.next() for _ in range(40)] == numbers.tolist()


class TestSelect:
    def test_takes_the_token_whose_interval_holds_the_number(self):
        probs = torch.tensor([0.25, 0.5, 0.25]).expand(6, 3)
        uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, LARGEST], dtype=torch.float64)
        assert select(probs, uniforms).tolist() == [0, 0, 1, 1, 2, 2]

    def test_never_takes_a_token_of_probability_0(self):
        probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
        uniforms = torch.tensor([0.0, 0.3 - 1e-9, LARGEST], dtype=torch.float64)
        assert select(probs.expand(3, 6), uniforms).tolist() == [1, 1, 3]

    def test_the_largest_number_stays_below_every_total(self):
        """Totals around powers of two too, where the spacing of float64 changes."""
        generator = torch.Generator().manual_seed(0)
        probs = torch.rand(2000, 3, generator=generator).softmax(-1)
        probs[:4] = torch.tensor([[0.25, 0.25, 0.0], [0.5, 0.5, 0.0], [1.0, 1.0, 0.0], [1.0, 2.0**-23, 0.0]])
        probs[:, 2] = 0.0
        chosen = select(probs, torch.full((2000,), LARGEST, dtype=torch.float64))
        assert chosen.tolist() == [1] * 2000

    def test_a_large_vocabulary_is_added_up_in_float64(self):
        """In float32 the sum of 151,936 probabilities is off by more than many of them are."""
        generator = torch.Generator().manual_seed(0)
        probs = torch.randn(1, 151_936, generator=generator).softmax(-1)
        uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
        cumulated = np.cumsum(probs[0].double().numpy())
        expected = np.searchsorted(cumulated, uniforms.numpy() * cumulated[-1], side="right")
        assert select(probs.expand(200, -1), uniforms).tolist() == expected.tolist()

    def test_nan_gives_some_token_of_the_vocabulary(self):
        chosen = select(torch.full((2, 5), torch.nan), torch.tensor([0.0, LARGEST], dtype=torch.float64))
        assert ((chosen >= 0) & (chosen < 5)).all()

    def test_has_the_frequencies_of_the_probabilities_and_of_vllm(self):
        """χ² with 10 degrees of freedom: 37.7 is passed once in 23,000 times."""
        number = 200_000
        probs = logits(1).softmax(-1).expand(number, -1)
        uniforms = torch.rand(number, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ours = torch.bincount(select(probs, uniforms), minlength=11).double()
        torch.manual_seed(2)
        theirs = torch.bincount(random_sample(probs.clone(), {}), minlength=11).double()
        expected = number * probs[0].double()
        assert ((ours - expected) ** 2 / expected).sum() < 37.7
        assert ((ours - theirs) ** 2 / (ours + theirs)).sum() < 37.7


class TestForward:
    def test_a_row_depends_on_nothing_but_its_seed(self):
        batch, seeds = logits(6), [11, 12, 13, 14, 15, 16]
        generators = seeded(*seeds)
        together = torch.stack([forward_cpu(SAMPLER, batch.clone(), generators, None, None)[0] for _ in range(5)])
        for row, seed in enumerate(seeds):
            alone = seeded(seed)
            tokens = [int(forward_cpu(SAMPLER, batch[row : row + 1].clone(), alone, None, None)[0]) for _ in range(5)]
            assert tokens == together[:, row].tolist()

    def test_rows_without_a_seed_follow_the_global_generator_and_leave_the_others_alone(self):
        batch, draws = logits(3), []
        for seed in (1, 1, 2):
            generators = {1: torch.Generator().manual_seed(5)}
            torch.manual_seed(seed)
            draws.append([forward_cpu(SAMPLER, batch.clone(), generators, None, None)[0].tolist() for _ in range(20)])
        assert draws[0] == draws[1] != draws[2]
        assert [tokens[1] for tokens in draws[0]] == [tokens[1] for tokens in draws[2]]

    def test_seeded_rows_leave_the_global_generator_alone(self):
        before = torch.get_rng_state()
        forward_cpu(SAMPLER, logits(2), seeded(1, 2), None, None)
        assert (torch.get_rng_state() == before).all()

    def test_top_k_and_top_p_are_applied_and_seen_in_the_logprobs(self):
        batch = logits(40)
        k, p = torch.full((40,), 3), torch.full((40,), 0.9)
        tokens, logprobs = forward_cpu(SAMPLER, batch.clone(), seeded(*range(40)), k, p)
        best = batch.topk(3).indices
        assert (tokens[:, None] == best).any(1).all()
        assert logprobs.gather(1, tokens[:, None]).isfinite().all()
        assert_rounded(logprobs.exp().sum(1), torch.ones(40), dtype=torch.float32)
        assert (logprobs.isneginf().sum(1) >= 11 - 3).all()

    @pytest.mark.parametrize(("mode", "kind"), [("raw_logprobs", None), ("processed_logits", "logits")])
    def test_returns_what_the_mode_asks_for(self, mode, kind):
        batch = logits(2)
        _, returned = forward_cpu(SimpleNamespace(logprobs_mode=mode), batch.clone(), seeded(1, 2), None, None)
        assert returned is None if kind is None else (returned == batch).all()

    def test_a_stream_ends_with_its_request(self):
        generators = seeded(1, 2, 3)
        gc.collect()
        before = len(cpu_engine._streams)
        forward_cpu(SAMPLER, logits(3), generators, None, None)
        assert len(cpu_engine._streams) == before + 3
        del generators
        gc.collect()
        assert len(cpu_engine._streams) == before


@pytest.mark.parametrize("others", [0, 2])
def test_log_probs_of_sampled_tokens_are_those_that_vllm_gathers(others):
    logprobs, tokens = logits(5).log_softmax(-1), torch.tensor([0, 10, 3, 3, 7])
    ours, vllm = (gather(logprobs.clone(), others, tokens) for gather in (gather_logprobs, VLLM_GATHER))
    assert ours.logprob_token_ids.dtype == vllm.logprob_token_ids.dtype
    assert (ours.logprob_token_ids == vllm.logprob_token_ids).all()
    assert (ours.logprobs == vllm.logprobs).all()
    assert ours.selected_token_ranks.shape == vllm.selected_token_ranks.shape
