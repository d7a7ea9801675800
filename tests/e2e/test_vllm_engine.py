"""The real engine on the tiny trained checkpoint: what it reports is what it sampled from, and updates are exact."""

import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint.hf_folder import HFFolder
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.rewards.rewarder import modsum_reward
from megatron_rl.rollout import RolloutError, Sampling, vllm_engine, worker_extension
from megatron_rl.rollout.cpu_engine import UniformStream
from megatron_rl.rollout.requests import request_seed
from megatron_rl.rollout.vllm_engine import VllmGenerator
from megatron_rl.rollout.weights import parameter_checksums
from megatron_rl.rollout.worker_extension import load_stacks, stackable_blocks
from megatron_rl.types import Group, Prompt
from tests.e2e import hf_reference
from tests.e2e.hf_reference import TOKENIZER, flat, perturbed, prompts
from tests.support.rounding import bound_from_double
from tests.support.slow import slow_but
from tests.support.tiny import MODEL
from tools.dev.make_tiny_checkpoint import build_model, build_tiny_config, save_checkpoint

pytestmark = pytest.mark.usefixtures("cheap_engines")

MAX_RESPONSE_LENGTH = 24


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


@contextmanager
def engine(model: Path = MODEL, *, record_routes: bool = True, max_prompt_length: int = 12, **fields):
    config = RolloutConfig.model_validate(
        {"dtype": "fp32", "max_response_length": MAX_RESPONSE_LENGTH, "kv_cache_gib": 0.0625} | fields
    )
    generator = VllmGenerator(
        config, model, max_prompt_length=max_prompt_length, record_routes=record_routes, decode=decode
    )
    try:
        yield generator
    finally:
        generator.close()


def assert_same(first: list[Group], second: list[Group], *, same_batches: bool = True) -> None:
    """Equal; but for the rounding of products over batches of another shape where they had such."""
    tolerance = 0.0 if same_batches else 2 * hf_reference.rounding_bound(first, Sampling(MAX_RESPONSE_LENGTH))
    assert flat(first, "tokens") == flat(second, "tokens")
    for left, right in zip(flat(first, "inference_logprobs"), flat(second, "inference_logprobs"), strict=True):
        assert np.abs(left - right).max() <= tolerance


class TestSampling:
    @pytest.fixture(scope="class")
    def generator(self):
        with engine(max_num_seqs=128) as generator:
            yield generator

    @pytest.fixture(scope="class")
    def reference(self):
        return hf_reference.load(MODEL)

    @pytest.fixture(scope="class")
    def double_reference(self):
        return hf_reference.load(MODEL, torch.float64)

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(MAX_RESPONSE_LENGTH),
            Sampling(MAX_RESPONSE_LENGTH, temperature=0.7),
            Sampling(MAX_RESPONSE_LENGTH, temperature=1.3, top_k=3),
            Sampling(MAX_RESPONSE_LENGTH, top_p=0.8),
            Sampling(MAX_RESPONSE_LENGTH, temperature=0.9, top_k=4, top_p=0.9),
        ],
        ids=["plain", "T0.7", "T1.3-k3", "p0.8", "T0.9-k4-p0.9"],
    )
    def test_logprobs_and_routes_are_those_of_the_hf_model(self, generator, reference, double_reference, sampling):
        groups = generator.rollout(prompts(16), 4, policy_version=0, step=0, sampling=sampling)
        expected, routes = hf_reference.score(double_reference, groups, sampling)
        single, _ = hf_reference.score(reference, groups, sampling)
        expected, single, recorded = map(np.concatenate, (expected, single, flat(groups, "inference_logprobs")))
        bound = bound_from_double(single, expected, longest_sum=reference.config.hidden_size)
        assert np.abs(recorded - expected).max() <= bound
        for rollout_routes, expected_routes in zip(flat(groups, "routed_experts"), routes, strict=True):
            assert (np.sort(rollout_routes, -1) == expected_routes).all()

    def test_kept_sets_are_what_was_sampled_from(self, generator, double_reference):
        """Those of the HF model, but for tokens where the cumulated probability is within rounding of top_p."""
        sampling = Sampling(MAX_RESPONSE_LENGTH, 0.9, top_k=6, top_p=0.9, candidates=20)
        groups = generator.rollout(prompts(16), 4, policy_version=0, step=0, sampling=sampling)
        margin = 2 * hf_reference.rounding_bound(groups, sampling)
        sizes, uncut = [], 0.0
        for group in groups:
            for rollout in group.rollouts:
                tokens, first = torch.tensor([[*group.prompt.tokens, *rollout.tokens]]), len(group.prompt.tokens) - 1
                with torch.no_grad():
                    logits = double_reference(input_ids=tokens, use_cache=False).logits[0, first:-1]
                least, most = (
                    hf_reference.distribution(logits, replace(sampling, top_p=0.9 + sign * margin)).isfinite()
                    for sign in (-1, 1)
                )
                kept = torch.from_numpy(rollout.kept_tokens).long()
                in_set = torch.zeros(len(kept), logits.size(1) + 1, dtype=torch.bool)
                in_set = in_set.scatter_(1, kept.masked_fill(kept < 0, logits.size(1)), True)[:, :-1]
                assert (least <= in_set).all()
                assert (in_set <= most).all()
                sizes += in_set.sum(1).tolist()
                whole = hf_reference.distribution(logits, Sampling(MAX_RESPONSE_LENGTH, 0.9))
                chosen = whole[torch.arange(len(kept)), torch.from_numpy(rollout.tokens).long()]
                uncut = max(uncut, float((torch.from_numpy(rollout.inference_logprobs) - chosen).abs().max()))
        assert min(sizes) < max(sizes) <= 6
        assert uncut > 0.01, "a softmax over all tokens is another policy"

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_heads_are_the_most_probable_tokens_of_the_whole_distribution(
        self, generator, double_reference, temperature
    ):
        sampling = Sampling(MAX_RESPONSE_LENGTH, temperature, head=20)
        groups = generator.rollout(prompts(16), 2, policy_version=0, step=0, sampling=sampling)
        bound, mass = 2 * hf_reference.rounding_bound(groups, sampling), []
        for group in groups:
            for rollout in group.rollouts:
                tokens, first = torch.tensor([[*group.prompt.tokens, *rollout.tokens]]), len(group.prompt.tokens) - 1
                with torch.no_grad():
                    logits = double_reference(input_ids=tokens, use_cache=False).logits[0, first:-1]
                whole = hf_reference.distribution(logits, sampling)
                head, log_mu = torch.from_numpy(rollout.head_tokens).long(), torch.from_numpy(rollout.head_logprobs)
                assert (whole.gather(1, head) - log_mu).abs().max() <= bound
                assert (whole.topk(20).values - log_mu).abs().max() <= bound
                assert all(len(set(row)) == 20 for row in head.tolist())
                mass.append(log_mu.double().exp().sum(1))
        assert 0.5 < float(torch.cat(mass).min()) < 1.0
        plain = generator.rollout(prompts(16), 2, policy_version=0, step=0, sampling=replace(sampling, head=0))
        assert flat(plain, "tokens") == flat(groups, "tokens"), "a head changes what is sampled"

    @pytest.mark.parametrize("sampling", [Sampling(MAX_RESPONSE_LENGTH), Sampling(MAX_RESPONSE_LENGTH, 0.7, top_k=3)])
    def test_a_token_is_the_one_whose_interval_holds_its_random_number(
        self, generator, reference, double_reference, sampling
    ):
        """Cumulated probability before the token ≤ u ≤ the same with it: of the HF model, u from the request's seed."""
        groups = generator.rollout(prompts(16), 2, policy_version=0, step=7, sampling=sampling)
        edges, single = [], []  # cumulated probability before and with the token
        uniforms = []
        for group in groups:
            for rollout in group.rollouts:
                stream = UniformStream(request_seed(0, 7, group.prompt.id, rollout.sample))
                uniforms += [stream.next() for _ in rollout.tokens]
                tokens, first = torch.tensor([[*group.prompt.tokens, *rollout.tokens]]), len(group.prompt.tokens) - 1
                for model, intervals in ((double_reference, edges), (reference, single)):
                    with torch.no_grad():
                        output = model(input_ids=tokens).logits[0, first:-1]
                    cumulated = hf_reference.distribution(output, sampling).exp().cumsum(-1)
                    for after, token in zip(cumulated.numpy(), rollout.tokens, strict=True):
                        intervals.append((after[token - 1] if token else 0.0, after[token]))
        assert len(uniforms) > 200
        bound = bound_from_double(np.array(single), np.array(edges), longest_sum=reference.config.hidden_size)
        before, after = np.array(edges).T
        assert (before - bound <= uniforms).all()
        assert (uniforms <= after + bound).all()

    def test_greedy_decoding_takes_the_most_probable_token(self, generator, reference):
        sampling = Sampling(MAX_RESPONSE_LENGTH, temperature=0.0)
        for group in generator.rollout(prompts(8), 1, policy_version=0, step=0, sampling=sampling):
            (rollout,) = group.rollouts
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([[*group.prompt.tokens, *rollout.tokens]])).logits[0]
            assert logits[len(group.prompt.tokens) - 1 : -1].argmax(-1).tolist() == rollout.tokens.tolist()

    def test_a_response_ends_at_the_stop_token_or_at_the_limit(self, generator):
        groups = generator.rollout(prompts(32), 4, policy_version=0, step=1, sampling=Sampling(6))
        endings = set()
        for group in groups:
            for rollout in group.rollouts:
                endings.add(rollout.finish_reason)
                assert TOKENIZER.eos_token_id not in rollout.tokens[:-1]
                if rollout.finish_reason == "stop":
                    assert rollout.tokens[-1] == TOKENIZER.eos_token_id
                    assert rollout.text == decode(rollout.tokens[:-1].tolist())
                else:
                    assert len(rollout.tokens) == 6
                    assert rollout.tokens[-1] != TOKENIZER.eos_token_id
                assert len(rollout.inference_logprobs) == len(rollout.policy_versions) == len(rollout.tokens)
        assert endings == {"stop", "length"}

    def test_the_shipped_checkpoint_is_imperfect(self, generator):
        groups = generator.rollout(prompts(256), 4, policy_version=0, step=5)
        rewards = [modsum_reward(rollout.text, group.prompt.answer) for group in groups for rollout in group.rollouts]
        assert 0.36 < np.mean(rewards) <= 0.5
        assert generator.stats()["perf/rollout_tokens"] == sum(map(len, flat(groups, "tokens")))

    def test_global_random_states_are_left_alone(self, generator):
        before = torch.get_rng_state(), random.getstate()
        generator.rollout(prompts(4), 2, policy_version=0, step=6)
        assert (torch.get_rng_state() == before[0]).all()
        assert random.getstate() == before[1]

    def test_calls_that_cannot_be_right_are_refused(self, generator):
        with pytest.raises(
            RolloutError, match=r"holds the weights of policy version 0, rollouts of 1 .* a refit is missing"
        ):
            generator.rollout(prompts(1), 1, policy_version=1, step=0)
        long = Prompt(id="toy:long", tokens=[5] * 13, answer="")
        with pytest.raises(
            InputError, match=r"'toy:long' has 13 tokens; 1 … 12 are allowed \(data.prompt.max_length\)"
        ):
            generator.rollout([long], 1, policy_version=0, step=0)
        with pytest.raises(InputError, match=r"max_response_length 25 is above the engine's 24"):
            generator.rollout(prompts(1), 1, policy_version=0, step=0, sampling=Sampling(25))


def export(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    shutil.copytree(MODEL, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TestRefit:
    @pytest.mark.parametrize("dtype", slow_but(["bf16"], ["bf16", "fp16", "fp32"]))
    def test_after_every_update_the_engine_equals_a_fresh_one(self, dtype, tmp_path):
        checked_updates = {1, 3} if dtype == "fp32" else {3}
        seen = {}
        with engine(dtype=dtype) as generator:
            initial = generator.rollout(prompts(8), 4, policy_version=0, step=0)
            for version in (1, 2, 3):
                generator.refit(iter(perturbed(version).items()), version)
                groups = generator.rollout(prompts(8), 4, policy_version=version, step=0)
                assert all((versions == version).all() for versions in flat(groups, "policy_versions"))
                seen[version] = groups, generator._llm.apply_model(parameter_checksums)[0]
            generator.refit(HFFolder(MODEL).items(), 4)  # and back to where it began
            assert_same(initial, generator.rollout(prompts(8), 4, policy_version=4, step=0))
        assert flat(seen[1][0], "tokens") != flat(initial, "tokens")
        for version in checked_updates:
            folder = export(perturbed(version), tmp_path / f"v{version}")
            with engine(folder, dtype=dtype, verify_refit=False) as fresh:
                assert fresh._llm.apply_model(parameter_checksums)[0] == seen[version][1]
                assert_same(fresh.rollout(prompts(8), 4, policy_version=0, step=0), seen[version][0])

    def test_an_engine_that_forgot_everything_in_its_sleep(self, monkeypatch):
        """vLLM's own sleep of level 2 and waking by tags, down to the worker, which loses here what a GPU's would."""
        from vllm.v1.worker.cpu_worker import CPUWorker

        asked = []

        def sleep(worker, level):
            asked.append(level)
            for parameter in worker.model_runner.model.parameters():
                parameter.data.fill_(float("nan"))

        monkeypatch.setattr(CPUWorker, "sleep", sleep)
        monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags: asked.append(tags))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        with engine(verify_refit=False, enforce_eager=True) as generator:
            before = generator.rollout(prompts(8), 4, policy_version=0, step=0)
            own = generator._llm.apply_model(parameter_checksums)[0]
            core, generator._device = generator._llm.llm_engine.engine_core.engine_core, "cuda"
            generator.sleep()
            assert core.model_executor.sleeping_tags == {"weights", "kv_cache"}
            assert generator._llm.apply_model(parameter_checksums)[0] != own
            generator.wake()
            assert core.model_executor.sleeping_tags == {"kv_cache"}
            generator.refit(HFFolder(MODEL).items(), 1)
            assert core.is_scheduler_paused(), "requests are taken before there is a cache"
            assert_same(before, generator.rollout(prompts(8), 4, policy_version=1, step=0))
            assert not core.is_sleeping()
            assert generator._llm.apply_model(parameter_checksums)[0] == own
        assert asked == [2, ["weights"], ["kv_cache"]]

    def test_experts_are_loaded_a_projection_at_a_time(self, monkeypatch):
        stacks, load = [], worker_extension._load

        def watched(module, projection, stack):
            stacks.append((projection, stack))
            load(module, projection, stack)

        monkeypatch.setattr(worker_extension, "_load", watched)
        with engine(verify_refit=False, record_routes=False) as generator:
            generator.refit(HFFolder(MODEL).items(), 1)
            assert [projection for projection, _ in stacks].count("down") == 4
            assert len(stacks) == 12
            assert {tuple(stack.shape) for _, stack in stacks} == {(8, 64, 128), (8, 128, 64)}

            def incomplete(model):
                lost = "model.layers.0.mlp.experts.3.up_proj.weight"
                tensors = [(name, t) for name, t in HFFolder(MODEL).items() if ".layers.0.mlp.experts." in name]
                assert list(stackable_blocks(model)) == [f"model.layers.{i}.mlp.experts" for i in range(4)]
                with pytest.raises(RuntimeError, match=r"7 of 8 matrices of model.layers.0.mlp.experts.\*.up_proj"):
                    list(load_stacks(model, [item for item in tensors if item[0] != lost and "up_proj" in item[0]]))

            generator._llm.apply_model(incomplete)

    @pytest.mark.parametrize("times", slow_but([2], [0, 2]), ids=["never-packed", "packed-twice"])
    def test_an_engine_that_corrupts_experts_does_not_start(self, times, monkeypatch):
        pack = worker_extension.pack_cpu_experts
        monkeypatch.setattr(
            worker_extension, "pack_cpu_experts", lambda model: [pack(model) for _ in range(times)] and None
        )
        with pytest.raises(RolloutError, match=r"corrupts weights on updates: .* changed 8 of"), engine():
            pass

    def test_a_cached_prefix_of_the_old_weights_is_not_used(self, tmp_path):
        """Prompts longer than two cache blocks, asked twice: the second answer comes from cached keys and values."""
        rng = random.Random(0)
        long = [
            Prompt(id=f"long:{row}", tokens=[rng.randrange(3, 98) for _ in range(300)], answer="") for row in range(4)
        ]
        with engine(max_prompt_length=300) as generator:
            first, cached = (generator.rollout(long, 2, policy_version=0, step=0) for _ in range(2))
            assert_same(first, cached, same_batches=False)
            generator.refit(iter(perturbed(1).items()), 1)
            updated = generator.rollout(long, 2, policy_version=1, step=0)
        path, sampling = export(perturbed(1), tmp_path / "v1"), Sampling(MAX_RESPONSE_LENGTH)
        logprobs, routes = hf_reference.score(hf_reference.load(path, torch.float64), updated, sampling)
        bound = hf_reference.rounding_bound(updated, sampling, path)
        recorded = np.concatenate(flat(updated, "inference_logprobs"))
        assert np.abs(recorded - np.concatenate(logprobs)).max() <= bound
        old, _ = hf_reference.score(hf_reference.load(MODEL), updated, sampling)
        assert np.abs(recorded - np.concatenate(old)).max() > bound, "the old weights' log-probs would pass"
        assert all((np.sort(a, -1) == b).all() for a, b in zip(flat(updated, "routed_experts"), routes, strict=True))

    def test_an_incomplete_update_ends_generation(self):
        with engine(verify_refit=False, record_routes=False) as generator:
            weights = list(HFFolder(MODEL).items())
            with pytest.raises(RolloutError, match=r"1 of 135 tensors were not sent, first \['model.norm.weight'\]"):
                generator.refit(iter([item for item in weights if item[0] != "model.norm.weight"]), 1)
            with pytest.raises(RolloutError, match="a weight update did not finish"):
                generator.rollout(prompts(1), 1, policy_version=0, step=0)

    @pytest.mark.parametrize(
        ("family", "dtype", "tied"),
        slow_but(
            [("qwen3", "fp32", True), ("qwen2", "bf16", False)],
            [("qwen3", "fp32", True), ("qwen3", "bf16", True), ("qwen2", "bf16", False)],
        ),
    )
    def test_dense_models_are_updated_too(self, family, dtype, tied, tmp_path):
        for seed in (0, 1):
            config = build_tiny_config(family, "nano", tie_word_embeddings=tied)
            save_checkpoint(build_model(config, seed), tmp_path / str(seed))
        weights = dict(HFFolder(tmp_path / "1").items())
        assert ("lm_head.weight" not in weights) == tied
        weights["lm_head.weight"] = weights["lm_head.weight" if not tied else "model.embed_tokens.weight"]
        with engine(tmp_path / "0", record_routes=False, dtype=dtype) as generator:
            generator.refit(iter(weights.items()), 1)
            updated = generator.rollout(prompts(4), 4, policy_version=1, step=0)
        with engine(tmp_path / "1", record_routes=False, dtype=dtype, verify_refit=False) as fresh:
            assert_same(fresh.rollout(prompts(4), 4, policy_version=0, step=0), updated)

    def test_routes_of_a_dense_model_cannot_be_recorded(self, tmp_path):
        save_checkpoint(build_model(build_tiny_config("qwen3", "nano")), tmp_path / "dense")
        with pytest.raises(InputError, match=r"\(qwen3\) has no experts"), engine(tmp_path / "dense"):
            pass


def test_responses_are_announced_while_others_are_sampled():
    """Two at a time fit, so that the first are complete before the last begin. None waits for its group."""
    announced, left = [], []
    with engine(max_num_seqs=2, verify_refit=False, record_routes=False) as generator:
        core = generator._llm.llm_engine
        generator.announce_to(
            lambda prompt, rollouts: (announced.append((prompt, rollouts)), left.append(core.has_unfinished_requests()))
        )
        groups = generator.rollout(prompts(2), 4, policy_version=0, step=0)
    assert left[0]
    assert [len(rollouts) for _, rollouts in announced] == [1] * 8
    announced_ids = {(prompt.id, id(rollout)) for prompt, rollouts in announced for rollout in rollouts}
    assert announced_ids == {(group.prompt.id, id(rollout)) for group in groups for rollout in group.rollouts}


def test_preempted_responses_are_the_same_responses():
    """A cache too small for all running responses makes the engine drop some and start them again."""
    fields = {"max_response_length": 150, "stop_token_ids": [], "verify_refit": False}  # two blocks of 128 tokens
    with engine(**fields) as roomy:
        expected = roomy.rollout(prompts(4), 3, policy_version=0, step=0)
    assert {len(tokens) for tokens in flat(expected, "tokens")} == {150}
    block_gib = 128 * 4 * 2 * 2 * 32 * 4 / 2**30  # tokens · layers · (key, value) · heads · width · bytes
    with engine(kv_cache_gib=16.5 * block_gib, **fields) as tight:
        scheduler = tight._llm.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []
        scheduler._preempt_request = lambda request, *args, **kwargs: (
            preempted.append(request.request_id),
            preempt(request, *args, **kwargs),
        )[1]
        groups = tight.rollout(prompts(4), 3, policy_version=0, step=0)
    assert preempted
    assert_same(expected, groups, same_batches=False)
    assert all(
        (np.sort(a, -1) == np.sort(b, -1)).all()
        for a, b in zip(flat(expected, "routed_experts"), flat(groups, "routed_experts"), strict=True)
    )


@pytest.mark.slow
def test_prompts_in_chunks_have_their_own_routes(monkeypatch):
    """With shared prefixes and preemption. Greedy: vLLM's sampler for CPUs cannot resume a seeded request."""
    build, rng, num_tokens = vllm_engine.engine_arguments, random.Random(1), 60
    changes = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}
    monkeypatch.setattr(vllm_engine, "engine_arguments", lambda *args, **keys: build(*args, **keys) | changes)
    common = [rng.randrange(3, 98) for _ in range(160)]
    asked = [
        Prompt(id=f"{row}", tokens=common + [rng.randrange(3, 98) for _ in range(40)], answer="") for row in range(4)
    ]
    block_gib = 64 * 4 * 2 * 2 * 32 * 4 / 2**30  # tokens · layers · (key, value) · heads · width · bytes
    fields = {"max_response_length": num_tokens, "stop_token_ids": [], "verify_refit": False, "max_num_seqs": 4}
    with engine(max_prompt_length=200, kv_cache_gib=12.5 * block_gib, **fields) as generator:
        scheduler, steps, preempted = generator._llm.llm_engine.engine_core.engine_core.scheduler, [], []
        schedule, preempt = scheduler.schedule, scheduler._preempt_request
        scheduler.schedule = lambda *args, **keys: (steps.append(schedule(*args, **keys)), steps[-1])[1]
        scheduler._preempt_request = lambda request, *args, **keys: (
            preempted.append(request.request_id),
            preempt(request, *args, **keys),
        )[1]
        groups = generator.rollout(asked, 1, policy_version=0, step=0, sampling=Sampling(num_tokens, temperature=0.0))
    first = [
        (new.num_computed_tokens, step.num_scheduled_tokens[new.req_id])
        for step in steps
        for new in step.scheduled_new_reqs
    ]
    assert any(start + number < 200 for start, number in first), "no prompt was cut"
    assert max(start for start, _ in first) >= 128, "no prefix was shared"
    assert preempted
    whole = Sampling(num_tokens)
    logprobs, routes = hf_reference.score(hf_reference.load(MODEL, torch.float64), groups, whole)
    logprobs_of_vllm = np.concatenate(flat(groups, "inference_logprobs"))
    assert np.abs(logprobs_of_vllm - np.concatenate(logprobs)).max() <= hf_reference.rounding_bound(groups, whole)
    for recorded, expected in zip(flat(groups, "routed_experts"), routes, strict=True):
        assert (np.sort(recorded, -1) == expected).all()


def test_failures_are_one_line_and_final(monkeypatch):
    with engine(deadline_s=1e-6, stop_token_ids=[], verify_refit=False, record_routes=False) as generator:
        with pytest.raises(RolloutError, match=r"passed rollout.deadline_s \(1e-06 s\) with . of 4 responses finished"):
            generator.rollout(prompts(2), 2, policy_version=0, step=0)
        with pytest.raises(RolloutError, match="cannot go on: rank 0: generation passed"):
            generator.rollout(prompts(2), 2, policy_version=0, step=0)
    threads, environment = torch.set_num_threads, torch.get_rng_state()
    with engine(verify_refit=False, record_routes=False) as generator:
        assert torch.set_num_threads is threads
        assert (torch.get_rng_state() == environment).all()

        def broken_step():
            raise KeyError("out of\norder")

        monkeypatch.setattr(generator._llm.llm_engine, "step", broken_step)
        with pytest.raises(
            RolloutError, match=r"vLLM failed on prompts validation-0000, .* KeyError: 'out of\\norder'"
        ):
            generator.rollout(prompts(2), 2, policy_version=0, step=0)
