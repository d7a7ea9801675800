"""Seeds, shares of requests, payload checks and checkpoint headers of the rollout side; no engine is started."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder, read_stop_token_ids, resolve_stop_token_ids
from megatron_rl.config.model_rules import rollout_problems
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from megatron_rl.rollout.generator import (
    RolloutError,
    Sampling,
    check_lengths,
    check_version,
    sampled_with_head,
    sampled_with_sets,
    sampling_params,
)
from megatron_rl.rollout.requests import (
    Request,
    elsewhere,
    make_groups,
    make_requests,
    make_rollout,
    request_seed,
    share_of,
)
from megatron_rl.rollout.weights import checked
from megatron_rl.types import Prompt
from tests.support.rounding import rounded

TINY_MODEL = Path(__file__).parents[3] / "recipes" / "tiny" / "model"
ARCHITECTURE = read_architecture(TINY_MODEL)
PROMPTS = [Prompt(id=f"toy:{row}", tokens=[1, 20 + row], answer="0") for row in range(5)]


def test_seeds_are_stable_and_differ_in_every_component():
    assert request_seed(0, 0, "toy:0", 0) == 978665020535351071  # a change would make old runs unrepeatable
    keys = [
        (seed, step, f"toy:{row}", sample)
        for seed in (0, 1)
        for step in range(9)
        for row in range(9)
        for sample in range(9)
    ]
    seeds = {request_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_cover_all_requests_once_and_differ_by_one_at_most(num_prompts, num_engines):
    prompts = [Prompt(id=str(row), tokens=[1], answer="") for row in range(num_prompts)]
    requests = make_requests(prompts, 3, seed=1, step=2)
    shares = [share_of(requests, engine, num_engines) for engine in range(num_engines)]
    dealt = [request for share in shares for request in share]
    assert sorted(map(requests.index, dealt)) == list(range(len(requests)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for prompt in prompts:  # its three samples are spread over as many engines as there are
        assert sum(any(request.prompt is prompt for request in share) for share in shares) == min(3, num_engines)


def test_calls_beyond_what_the_engine_has_are_refused():
    check_version("the servers hold", 3, 3)
    with pytest.raises(RolloutError, match=r"the servers hold the weights of policy version 3, rollouts of 2 .* refit"):
        check_version("the servers hold", 3, 2)
    check_lengths(PROMPTS, Sampling(24), max_prompt_length=2, max_response_length=24)
    with pytest.raises(InputError, match=r"'toy:0' has 2 tokens; 1 … 1 are allowed"):
        check_lengths(PROMPTS, Sampling(24), max_prompt_length=1, max_response_length=24)
    with pytest.raises(InputError, match=r"'lone' has 1 tokens; 2 … 4 are allowed \(vLLM would .*enforce_eager: true"):
        check_lengths([Prompt("lone", [3], "")], Sampling(24), 4, max_response_length=24, shortest=2)
    with pytest.raises(InputError, match="max_response_length 25 is above the engine's 24"):
        check_lengths(PROMPTS, Sampling(25), max_prompt_length=2, max_response_length=24)


def request(prompt_length: int = 3) -> Request:
    return Request(0, Prompt(id="toy:7", tokens=[1] * prompt_length, answer=""), 4, seed=0)


def routes(num_rows: int) -> np.ndarray:
    return np.arange(num_rows * 4 * 2, dtype=np.uint8).reshape(num_rows, 4, 2) % 8


def test_a_response_becomes_a_rollout():
    rollout = make_rollout(request(), [5, 6, 2], [-0.5, -1.25, 0.0], "stop", 9, routes(5), ARCHITECTURE, text="ab")
    assert (rollout.id, rollout.sample, rollout.tokens.tolist(), rollout.text) == ("toy:7/4", 4, [5, 6, 2], "ab")
    assert rollout.inference_logprobs.dtype == np.float32
    assert rollout.inference_logprobs.tolist() == [-0.5, -1.25, 0.0]
    assert rollout.policy_versions.tolist() == [9, 9, 9]
    assert (rollout.routed_experts == routes(5)).all()
    assert not rollout.truncated


def test_rows_of_dense_layers_are_dropped():
    architecture = replace(ARCHITECTURE, moe_layers=(False, True, False, True))
    rollout = make_rollout(request(), [5, 2], [-1.0, -1.0], "stop", 0, routes(4), architecture)
    assert (rollout.routed_experts == routes(4)[:, [1, 3]]).all()


def test_experts_beyond_a_byte_keep_their_number():
    architecture = replace(ARCHITECTURE, num_experts=512)
    recorded = np.full((4, 4, 2), 300, dtype=np.uint16)
    rollout = make_rollout(request(), [5, 2], [-1.0, -1.0], "stop", 0, recorded, architecture)
    assert rollout.routed_experts.dtype == np.uint16
    assert (rollout.routed_experts == 300).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "0 tokens came with 3 log-probs"),
        ({"logprobs": [-1.0, -1.0]}, "3 tokens came with 2 log-probs"),
        ({"logprobs": [-1.0, float("nan"), -1.0]}, "log-prob nan of response token 1"),
        ({"logprobs": [-1.0, -1.0, 0.5]}, "log-prob 0.5 of response token 2"),
        ({"logprobs": [-float("inf"), -1.0, -1.0]}, "log-prob -inf of response token 0"),
        ({"finish_reason": "error"}, "finish reason 'error'"),
        ({"routes": routes(6)}, r"shape \(5, 4, 2\) .* got \(6, 4, 2\)"),
        ({"routes": None}, "got none"),
        ({"routes": np.full((5, 4, 2), 8, dtype=np.uint8)}, "expert 8 of 8"),
    ],
)
def test_impossible_answers_name_prompt_and_sample(changes, message):
    answer = {"tokens": [5, 6, 2], "logprobs": [-1.0] * 3, "finish_reason": "stop", "routes": routes(5)} | changes
    with pytest.raises(RolloutError, match=f"prompt 'toy:7', sample 4: .*{message}"):
        make_rollout(request(), policy_version=0, architecture=ARCHITECTURE, **answer)


def test_groups_come_in_the_order_of_prompts():
    rollouts = [make_rollout(request, [2], [-1.0], "stop", 0) for request in make_requests(PROMPTS, 2, seed=0, step=0)]
    groups = make_groups(PROMPTS, 2, rollouts)
    assert [group.prompt for group in groups] == PROMPTS
    for group in groups:
        assert [rollout.id for rollout in group.rollouts] == [f"{group.prompt.id}/{sample}" for sample in range(2)]


WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
SHAPES = {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", WEIGHTS["a"])], "1 of 2 tensors were not sent, first ['b']"),
        ([("a", WEIGHTS["a"]), ("a", WEIGHTS["a"])], "a was sent twice"),
        ([("c", WEIGHTS["a"])], "c is not in the engine's checkpoint"),
        ([("a", WEIGHTS["b"])], "a has shape (4,), the engine expects (2, 3)"),
    ],
)
def test_an_incomplete_weight_stream_is_an_error(stream, message):
    with pytest.raises(RolloutError) as caught:
        list(checked(stream, SHAPES))
    assert message in str(caught.value)


def test_a_complete_stream_passes_unchanged_and_a_tied_head_may_come_along():
    stream = [("b", WEIGHTS["b"]), ("lm_head.weight", WEIGHTS["a"]), ("a", WEIGHTS["a"])]
    assert list(checked(stream, SHAPES)) == stream


def test_sharded_checkpoints_are_read_like_single_ones(tmp_path):
    for name in WEIGHTS:
        save_file({name: WEIGHTS[name]}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in WEIGHTS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert HFFolder(tmp_path).shapes() == SHAPES
    assert all((tensor == WEIGHTS[name]).all() for name, tensor in HFFolder(tmp_path).items())


def test_stop_tokens_come_from_the_checkpoint(tmp_path):
    assert read_stop_token_ids(TINY_MODEL) == [2]
    assert resolve_stop_token_ids(None, TINY_MODEL) == [2]
    assert resolve_stop_token_ids([], TINY_MODEL) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_stop_token_ids(tmp_path) == [7, 8]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="stop_token_ids"):
        read_stop_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        ({"max_response_length": 2040}, 1, "2056, but the model's max_position_embeddings is 2048"),
        ({"tensor_parallel": 8}, 8, "8 does not divide the 4 attention heads"),
        ({"tensor_parallel": 2}, 3, "2 does not divide the 3 ranks"),
        ({"stop_token_ids": [2, 128]}, 1, "[128] are outside the vocabulary (0 … 127)"),
    ],
)
def test_a_section_that_does_not_fit_the_model_says_why(fields, world_size, message):
    config = RolloutConfig.model_validate({"max_response_length": 24} | fields)
    (problem,) = rollout_problems(config, ARCHITECTURE, 16, world_size)
    assert message in problem


def test_a_section_that_fits_has_no_problems():
    assert rollout_problems(RolloutConfig(max_response_length=2032), ARCHITECTURE, 16, 4) == []


def test_shapes_without_a_cpu_kernel_are_refused_on_a_cpu_only():
    config = RolloutConfig(max_response_length=24)
    narrow = replace(ARCHITECTURE, head_dim=16, moe_ffn_hidden_size=48)
    assert rollout_problems(config, narrow, 16, 1, "cuda") == []
    head, experts = rollout_problems(config, narrow, 16, 1, "cpu")
    assert "head_dim is 16; vLLM on a CPU has attention for (32, 64," in head
    assert "experts are 48 wide over rollout.tensor_parallel 1" in experts
    wide = RolloutConfig(max_response_length=24, tensor_parallel=2)
    assert len(rollout_problems(wide, replace(ARCHITECTURE, moe_ffn_hidden_size=32), 16, 2, "cpu")) == 1


def test_a_prompt_that_comes_again_gets_other_seeds_and_names():
    """The first occurrence keeps the seeds that a run without repetition has."""
    once = make_requests(PROMPTS[:1], 2, seed=0, step=3)
    again = make_requests([PROMPTS[0]] * 3, 2, seed=0, step=3)
    assert [request.seed for request in again[:2]] == [request.seed for request in once]
    assert once[1].seed == request_seed(0, 3, PROMPTS[0].id, 1)
    assert len({request.seed for request in again}) == len({request.sequence_id for request in again}) == 6
    later = make_requests([replace(PROMPTS[0], occurrence=1), PROMPTS[0]], 2, seed=0, step=3)
    assert [(r.seed, r.sequence_id) for r in later] == [(r.seed, r.sequence_id) for r in again[2:]]
    rollout = make_rollout(again[2], [2], [-1.0], "stop", 0)
    assert rollout.id == elsewhere(again[2], 1, "stop").id == again[2].sequence_id == f"{PROMPTS[0].id}/0+1"


def completion(tokens: list[int], rows: list[list[tuple[int, float]]]):
    """As vLLM gives it: at each place the sampled token, then the candidates, most probable first."""
    pairs = [pair for row in rows for pair in row]
    logprobs = SimpleNamespace(
        token_ids=[i for i, _ in pairs], logprobs=[math.log(p) if p else -math.inf for _, p in pairs]
    )
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs)


def test_a_kept_set_is_what_has_a_probability():
    answer = completion([7, 4], [[(7, 0.6), (7, 0.6), (2, 0.4), (9, 0.0)], [(4, 1.0), (4, 1.0), (0, 0.0), (1, 0.0)]])
    tokens, logprobs, kept, of_kept = sampled_with_sets(answer, 3)
    assert tokens == [7, 4]
    assert logprobs.tolist() == [np.float32(math.log(0.6)), 0.0]
    assert kept.tolist() == [[7, 2, -1], [4, -1, -1]]
    assert np.exp(of_kept).ravel().tolist() == rounded([0.6, 0.4, 0.0, 1.0, 0.0, 0.0], dtype=torch.float32)
    assert (np.isneginf(of_kept) == (kept < 0)).all()


def test_where_more_tokens_tie_than_come_mu_is_given_over_those_at_hand():
    """Five tokens of probability 0.2, of which two come, and the sampled one that is not among them."""
    answer = completion([5, 1], [[(5, 0.2), (1, 0.2), (2, 0.2)], [(1, 0.2), (1, 0.2), (2, 0.2)]])
    _, logprobs, kept, of_kept = sampled_with_sets(answer, 2)
    assert kept.tolist() == [[1, 5], [1, 2]]
    assert np.exp(logprobs).tolist() == rounded([0.5, 0.5], dtype=torch.float32)
    assert np.exp(of_kept).ravel().tolist() == rounded([0.5] * 4, dtype=torch.float32)


def test_a_head_has_its_log_probs_over_the_whole_vocabulary():
    """The sampled token may be one of them or not; nothing is made to add up to 1."""
    answer = completion([7, 4], [[(7, 0.6), (7, 0.6), (2, 0.3)], [(4, 0.1), (1, 0.5), (0, 0.2)]])
    tokens, logprobs, head, of_head = sampled_with_head(answer, 2)
    assert (tokens, head.tolist()) == ([7, 4], [[7, 2], [1, 0]])
    assert np.exp(logprobs).tolist() == rounded([0.6, 0.1], dtype=torch.float32)
    assert np.exp(of_head).ravel().tolist() == rounded([0.6, 0.3, 0.5, 0.2], dtype=torch.float32)
    request = make_requests(PROMPTS[:1], 1, seed=0, step=3)[0]
    rollout = make_rollout(request, tokens, logprobs, "stop", 0, head_tokens=head, head_logprobs=of_head)
    assert (rollout.head_tokens == head).all()
    assert (rollout.head_logprobs == of_head).all()
    with pytest.raises(RolloutError, match=r"2 tokens came with heads of shape \(2, 2\) and log-probs of \(2, 1\)"):
        make_rollout(request, tokens, logprobs, "stop", 0, head_tokens=head, head_logprobs=of_head[:, :1])
    for wrong in (math.nan, 0.5):
        of_head[1, 1] = wrong
        with pytest.raises(RolloutError, match=f"log-prob {wrong} in a head is impossible"):
            make_rollout(request, tokens, logprobs, "stop", 0, head_tokens=head, head_logprobs=of_head)


def test_an_answer_with_other_candidates_is_an_error():
    answer = completion([7], [[(7, 0.6), (7, 0.6)]])
    with pytest.raises(RolloutError, match="prompt 'a': 2 log-probs of 1 tokens, not 4 of each"):
        sampled_with_sets(answer, 3, "prompt 'a': ")
    with pytest.raises(RolloutError, match="belong to other tokens"):
        sampled_with_sets(completion([3], [[(7, 0.6), (7, 0.6)]]), 1)


def test_candidates_are_asked_for_where_the_recipe_keeps_sets():
    config = RolloutConfig(top_k=5, top_p=0.9, kept_sets=True)
    assert Sampling.from_config(config, 1000).candidates == 21
    assert Sampling.from_config(config, 8).candidates == 8, "no more than there are tokens"
    assert Sampling.from_config(RolloutConfig(), 1000).num_logprobs == 0
    with_head = Sampling.from_config(RolloutConfig(sampled_head=32))
    assert (with_head.candidates, with_head.head, with_head.num_logprobs) == (0, 32, 32)
    both = Sampling.from_config(RolloutConfig(top_k=5, kept_sets=True, sampled_head=5), 1000)
    assert (both.candidates, both.num_logprobs) == (21, 21)
    fields = {"max_tokens": 9, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1, "stop_token_ids": [2]}
    assert sampling_params(fields, 21).logprobs == 21
    assert sampling_params(fields).logprobs == 0
