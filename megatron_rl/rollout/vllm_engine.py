"""vLLM inside the learner's process, one engine in every rank.

Placement. Every rank (every ``rollout.tensor_parallel`` ranks) runs an engine of its own. Requests are dealt to the
engines in turn (`requests.share_of`). Each response stays on one rank of the engine that sampled it (its owner), with
its tokens, log-probs, routes and text. All ranks learn its length and how it ended, and return the same groups in the
order of the prompts.
The alternative, one engine on one rank, would leave the other ranks idle for the longest phase of a step. Engines
start inside the world that the learner has initialised: vLLM's ``external_launcher`` executor then adds groups of its
own to that world and opens no second one (tests/e2e/test_vllm_ranks.py holds Megatron's groups to it). A child
process per rank would need shared memory for weights and a second copy of every library.

Weights go in through `worker_extension`; see there. Random numbers are keyed per response (`requests`), so that a
response does not depend on which engine samples it, except for the rounding of matrix products over batches of another
shape.

Left out: stop strings (stop tokens are what a policy can learn to emit) and speculative decoding.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_rl.checkpoint.hf_folder import (
    HFFolder,
    check_weights,
    model_shapes,
    model_weights,
    resolve_stop_token_ids,
)
from megatron_rl.config.learner import PrecisionConfig, only_product, rollout_fp32_products
from megatron_rl.config.model_rules import rollout_problems
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import InputError
from megatron_rl.model.architecture import read_architecture
from megatron_rl.process import fp32_products
from megatron_rl.process.devices import leave_default_stream, local_gpu
from megatron_rl.process.host import limited
from megatron_rl.process.ranks import gather_objects, world_rank, world_size
from megatron_rl.rollout import process_state
from megatron_rl.rollout.conversation import Client, Conversation, Requests, Talk, Turn, converse, hold
from megatron_rl.rollout.engine_arguments import engine_arguments, runs_eagerly
from megatron_rl.rollout.generator import (
    Listener,
    RolloutError,
    Sampling,
    check_lengths,
    check_version,
    checked_scores,
    prompt_scores,
    sampled_tokens,
    sampled_with_head,
    sampled_with_sets,
    sampling_fields,
    sampling_params,
    scoring_params,
    shortest_prompt,
    throughput,
)
from megatron_rl.rollout.requests import (
    Request,
    consecutive_ranks,
    known_everywhere,
    make_groups,
    make_requests,
    make_rollout,
    owners_of,
    share_of,
)
from megatron_rl.rollout.weights import check_own_refit, checked, parameter_checksums
from megatron_rl.types import Group, Prompt, Rollout, Scores

STEPS_PER_DEADLINE_CHECK = 8  # one step is one token of every running response


class VllmGenerator:
    """`Generator` on vLLM. Start it after the learner has joined its world; see `Generator` for the methods.

    ``max_prompt_length``: longest prompt that will come, in tokens. ``record_routes``: fill ``routed_experts``.
    ``decode``: token ids → text, for ``Rollout.text``; without it the text stays empty. ``precision``: what to compute
    in fp32; None: nothing beyond ``config.dtype``. ``talk``: what holds conversations of several turns; None: one turn.
    ``sleeps``: whether `sleep` gives a GPU's memory back. vLLM has one such engine in a process, also after its end:
    whoever starts several in a row has engines that do not sleep.
    Raises `InputError` where the configuration does not fit the checkpoint, `RolloutError` where vLLM does not start.
    """

    _talk: Talk | None = None
    _num_reread = 0  # tokens that this engine computed again for a later turn of the last rollout
    _runner: asyncio.Runner | None = None  # its loop lasts, so that functions can keep connections open

    def __init__(
        self,
        config: RolloutConfig,
        model_path: Path,
        *,
        max_prompt_length: int,
        record_routes: bool = False,
        device: Literal["cpu", "cuda"] = "cpu",
        decode: Callable[[list[int]], str] | None = None,
        precision: PrecisionConfig | None = None,
        talk: Talk | None = None,
        sleeps: bool = True,
    ) -> None:
        self._config, self._decode, self._device, self._sleeps = config, decode, device, sleeps
        self._precision = precision or PrecisionConfig()
        self._architecture = read_architecture(model_path)
        self._rank, world_size = _rank_in_world()
        problems = rollout_problems(config, self._architecture, max_prompt_length, world_size, device)
        if record_routes and not self._architecture.is_moe:
            problems.append(f"routes were asked for, but {model_path} ({self._architecture.model_type}) has no experts")
        if problems:
            raise InputError("; ".join(problems))
        self._max_prompt_length, self._record_routes = max_prompt_length, record_routes
        self._sampling = Sampling.from_config(config, self._architecture.vocab_size)
        self._stop_token_ids = resolve_stop_token_ids(config.stop_token_ids, model_path)
        self._num_engines, self._engine = world_size // config.tensor_parallel, self._rank // config.tensor_parallel
        check_weights(HFFolder(model_path), self._architecture)
        self._shapes = model_shapes(self._architecture)
        self._policy_version, self._broken, self._stats = 0, "", {}
        self._listener: Listener | None = None
        self._shortest = shortest_prompt(self._architecture, runs_eagerly(config, device))
        self._talk = talk and replace(talk, shortest=self._shortest)
        self._wants_weights = self._wants_cache = False  # since they were given up in `sleep`
        start = time.perf_counter()
        kinds = rollout_fp32_products(config.dtype, self._precision)
        fp32_products.settle(kinds, device)
        self._llm: Any = self._start(model_path)
        try:
            self._hold_products(only_product(kinds))
            if config.verify_refit:
                self._verify_refit(model_path)
        except (InputError, RolloutError):
            self.close()
            raise
        self.start_s = time.perf_counter() - start

    def _hold_products(self, kind: fp32_products.Fp32Product | None) -> None:
        """Raise `InputError` where the started engine multiplies fp32 matrices in another way than ``kind``."""
        if kind is not None and self._device == "cuda":
            measured = fp32_products.measured_products("cuda", transformer_engine=False, triton=True)
            fp32_products.hold(kind, measured, "rollout engine")

    # ---------------------------------------------------------------- generation

    def rollout(
        self,
        prompts: list[Prompt],
        num_samples: int,
        *,
        policy_version: int,
        step: int,
        sampling: Sampling | None = None,
    ) -> list[Group]:
        sampling = sampling or self._sampling
        if self._broken:
            raise RolloutError(f"the engine cannot go on: {self._broken}")
        if self._wants_weights:
            raise RolloutError("the engine gave up its weights while it slept: `wake`, then `refit`")
        check_version("the engine holds", self._policy_version, policy_version)
        check_lengths(prompts, sampling, self._max_prompt_length, self._config.max_response_length, self._shortest)
        requests = make_requests(prompts, num_samples, seed=self._config.seed, step=step)
        self._take_cache()
        start = time.perf_counter()
        owners = owners_of(len(requests), consecutive_ranks(self._num_engines, self._config.tensor_parallel))
        own_requests = share_of(requests, self._engine, self._num_engines)
        records = self._record_routes and sampling.wants_routes
        rollouts = self._tell(requests, owners, self._generate(own_requests, sampling, records))
        self._stats |= throughput(rollouts, time.perf_counter() - start)
        if self._talk is not None:
            self._stats["rollout/turns_mean"] = sum(rollout.num_turns for rollout in rollouts) / len(rollouts)
            self._stats["rollout/reread_tokens"] = float(sum(gather_objects(self._num_reread)))
        return make_groups(prompts, num_samples, rollouts)

    def score(self, rollouts: Sequence[Rollout], top_k: int = 0) -> list[Scores]:
        """What these weights say of the tokens of ``rollouts`` (`TokenScorer`); one rank an engine.

        Prompt, response and one more token must fit.
        """
        self._take_cache()
        prompts = [{"prompt_token_ids": rollout.whole.tolist()} for rollout in rollouts]
        scores: dict[int, Scores] = {}
        with self._at_work():
            names = self._llm.enqueue(prompts, [scoring_params(top_k)] * len(prompts), use_tqdm=False)
            places = {name.partition("-")[0]: place for place, name in enumerate(names)}  # vLLM appends to our names
            while self._llm.llm_engine.has_unfinished_requests():
                for output in (output for output in self._llm.llm_engine.step() if output.finished):
                    rollout = rollouts[place := places[output.request_id]]
                    found = prompt_scores(output, rollout.prompt_length, top_k)
                    scores[place] = checked_scores(rollout, found, top_k)
        return [scores[place] for place in range(len(rollouts))]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A context for steps of the engine."""
        with (
            process_state.global_rng_untouched(),
            process_state.compilation(not runs_eagerly(self._config, self._device)),
            limited(self._config.hang_limit_s, "the rollout engine (rollout.deadline_s)"),
        ):
            yield

    def announce_to(self, listener: Listener) -> None:
        """Call ``listener`` with every response that this rank owns, between two steps of the engine."""
        self._listener = listener

    def _generate(
        self, requests: list[Request], sampling: Sampling, records: bool
    ) -> list[Rollout | None] | RolloutError:
        """This engine's share, in order; None for what another of its ranks owns.

        ``records``: with routes. An error is returned, not raised, because other ranks wait to hear of it.
        """
        ids = ", ".join(dict.fromkeys(request.prompt.id for request in requests[:: max(1, len(requests) // 8)]))
        try:
            with self._at_work():
                run = self._run_engine if self._talk is None else self._converse
                return run(requests, sampling, records)
        except RolloutError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
            failure = RolloutError(f"vLLM failed on prompts {ids} …: {type(error).__name__}: {_one_line(error)}")
            failure.__cause__ = error
            return failure

    def _run_engine(self, requests: list[Request], sampling: Sampling, records: bool) -> list[Rollout | None]:
        fields = [sampling_fields(sampling, request.seed, self._stop_token_ids) for request in requests]
        params = [sampling_params(of_request, sampling.num_logprobs) for of_request in fields]
        prompts = [{"prompt_token_ids": request.prompt.tokens} for request in requests]
        engine, num_steps = self._llm.llm_engine, 0
        request_ids = self._llm.enqueue(prompts, params, use_tqdm=False) if requests else []
        places = {name.partition("-")[0]: place for place, name in enumerate(request_ids)}  # vLLM appends to our names
        size = self._config.tensor_parallel  # ranks of one engine have the same outputs, and own every size-th
        owned = [place % size == self._rank % size for place in range(len(requests))]
        rollouts: list[Rollout | None] = [None] * len(requests)
        num_finished, problem = 0, None
        deadline = time.monotonic() + (self._config.deadline_s or math.inf)
        while engine.has_unfinished_requests():
            finished = [(places[output.request_id], output) for output in engine.step() if output.finished]
            num_steps, num_finished = num_steps + 1, num_finished + len(finished)
            for place, output in finished:
                if not owned[place]:
                    continue
                request = requests[place]
                try:
                    rollouts[place] = rollout = self._to_rollout(request, output, records, sampling)
                except Exception as error:  # noqa: BLE001 - the other ranks of the engine go on with the next step
                    problem = problem or error
                    continue
                if self._listener is not None:
                    self._listener(request.prompt, [rollout])
            if num_steps % STEPS_PER_DEADLINE_CHECK == 0 and self._any_tensor_rank(time.monotonic() > deadline):
                engine.abort_request(request_ids, internal=True)
                raise RolloutError(
                    f"generation passed rollout.deadline_s ({self._config.deadline_s} s) with {num_finished} of "
                    f"{len(requests)} responses finished"
                )
        if problem is not None:
            raise problem
        assert num_finished == len(requests), f"{num_finished} responses to {len(requests)} requests"
        return rollouts

    def _converse(self, requests: list[Request], sampling: Sampling, records: bool) -> list[Rollout | None]:
        """`_run_engine` where a user's function holds each response's conversation; one rank an engine."""
        talk = self._talk
        assert talk is not None
        assert self._config.tensor_parallel == 1
        rollouts: list[Rollout | None] = [None] * len(requests)
        vocab_size, self._num_reread = self._architecture.vocab_size, 0

        async def one(place: int, under_way: Requests) -> None:
            request = requests[place]
            client = Client(talk, request, under_way, sampling, self._stop_token_ids, vocab_size)
            conversation = await converse(talk, client, request)
            rollouts[place] = rollout = self._to_response(request, conversation, records)
            self._num_reread += conversation.num_reread
            if self._listener is not None:
                self._listener(request.prompt, [rollout])

        async def all_of_them() -> None:
            under_way = Requests(_Steps(self._llm, sampling))
            deadline = time.monotonic() + (self._config.deadline_s or math.inf)
            await hold([partial(one, place, under_way) for place in range(len(requests))], under_way, deadline)

        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            self._runner.run(all_of_them())
        except TimeoutError:
            num_finished = sum(rollout is not None for rollout in rollouts)
            raise RolloutError(
                f"generation passed rollout.deadline_s ({self._config.deadline_s} s) with {num_finished} of "
                f"{len(requests)} conversations finished; give tools of rollout.function a time-out of their own"
            ) from None
        return rollouts

    def _to_response(self, request: Request, conversation: Conversation, records: bool) -> Rollout:
        architecture, text = self._architecture if records else None, self._talk.decode(conversation.response)
        return conversation.to_rollout(request, self._policy_version, architecture, text)

    def _any_tensor_rank(self, flag: bool) -> bool:
        """Ranks of one engine take every step together, so they have to stop together."""
        if self._config.tensor_parallel == 1:
            return flag
        from vllm.distributed.parallel_state import get_tp_group

        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=get_tp_group().cpu_group)
        return bool(flags)

    def _to_rollout(self, request: Request, output: Any, records: bool, sampling: Sampling) -> Rollout:
        completion, name = output.outputs[0], f"prompt {request.prompt.id!r}: "
        kept = head = head_logprobs = None
        if sampling.candidates:
            tokens, logprobs, kept, head_logprobs = sampled_with_sets(completion, sampling.candidates, name)
        elif sampling.head:
            tokens, logprobs, head, head_logprobs = sampled_with_head(completion, sampling.head, name)
        else:
            tokens, logprobs = sampled_tokens(completion, name)
        return make_rollout(
            request,
            tokens,
            logprobs,
            completion.finish_reason,
            self._policy_version,
            routes=completion.routed_experts,
            architecture=self._architecture if records else None,
            text=self._decode(tokens) if self._decode else "",
            kept_tokens=kept,
            head_tokens=head,
            head_logprobs=head_logprobs if sampling.head else None,
        )

    def _tell(
        self, requests: list[Request], owners: list[int], own_rollouts: list[Rollout | None] | RolloutError
    ) -> list[Rollout]:
        """All responses in the order of the requests: whole on their owner, with length and end on the others.

        One engine's error ends all.
        """
        error_here = str(own_rollouts) if isinstance(own_rollouts, RolloutError) else None
        for rank, problem in enumerate(gather_objects(error_here)):
            if problem is not None:
                self._broken = f"rank {rank}: {problem}"
                raise RolloutError(self._broken)
        return known_everywhere(requests, owners, [rollout for rollout in own_rollouts if rollout is not None])

    # ---------------------------------------------------------------- weights

    def refit(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        start = time.perf_counter()
        self._broken = "a weight update did not finish"
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"weights": checked(weights, self._shapes)}})
        self._llm.finish_weight_update(str(policy_version))
        self._wants_weights = False
        if not self._llm.reset_prefix_cache():
            raise RolloutError(
                "the prefix cache could not be emptied after a weight update: requests are still running"
            )
        self._broken, self._policy_version = "", policy_version
        self._stats["perf/refit_engine_s"] = time.perf_counter() - start

    def _verify_refit(self, model_path: Path) -> None:
        """An update with the weights that the engine already holds, after it has slept, must leave every stored
        parameter bit for bit."""
        before = self._llm.apply_model(parameter_checksums)[0]
        self.sleep()
        self.wake()
        self.refit(model_weights(HFFolder(model_path), self._architecture), 0)
        self._take_cache()  # a cache that does not fit is found out at the start
        after = self._llm.apply_model(parameter_checksums)[0]
        check_own_refit(before, after)

    # ---------------------------------------------------------------- life

    def describe_precision(self) -> dict[str, str]:
        """Aspect → what this engine does: the rollout column of the precision contract."""
        from megatron_rl.rollout.precision import describe_engine

        return describe_engine(self._llm)

    def sleep(self) -> None:
        """Give back weights and cache, unless the engine does not sleep (on a CPU none does). Neither is copied to host
        memory: whoever puts an engine to sleep sends it the next weights."""
        if self._sleeps and self._device == "cuda":
            self._llm.sleep(level=2)
            self._wants_weights = self._wants_cache = True

    def wake(self) -> None:
        """Room for the weights, that `refit` fills. Room for the cache is taken by the next `rollout`: until then the
        learner may keep what it sends the weights with, and a checkpoint may use it."""
        if self._sleeps and self._device == "cuda":
            torch.cuda.empty_cache()  # blocks that the learner's pass left cached are room that the engine needs
            self._llm.wake_up(["weights"])

    def _take_cache(self) -> None:
        if self._wants_cache:
            torch.cuda.empty_cache()
            self._llm.wake_up(["kv_cache"])
            self._wants_cache = False

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def close(self) -> None:
        """End the engine and give its memory back. Another may be started in this process, if none of them sleeps."""
        if self._llm is None:
            return
        import vllm.v1.engine.core as engine_core

        process_state.forget_stacks()  # vLLM frees the weights' memory pool when it shuts down: nothing may hold them
        if self._runner is not None:
            self._runner.close()
        client, self._llm = self._llm.llm_engine.engine_core, None
        own_clean_up = engine_core.cleanup_dist_env_and_memory
        if not self._owns_world:
            engine_core.cleanup_dist_env_and_memory = process_state.destroy_engine_groups
        try:
            client.shutdown()
        finally:
            engine_core.cleanup_dist_env_and_memory = own_clean_up
            del client
            process_state.forget_stacks()
            gc.collect()
            if self._device == "cuda":
                torch.cuda.empty_cache()

    def _start(self, model_path: Path) -> Any:
        self._owns_world = not dist.is_initialized()
        gpu = local_gpu() if self._device == "cuda" else None
        with process_state.contained(self._rank, gpu):
            process_state.settle_sums(self._config, self._device)
            from vllm import LLM

            from megatron_rl.rollout.precision import overrides

            if gpu is not None:
                leave_default_stream(torch.device("cuda", gpu))
            try:
                arguments = engine_arguments(
                    self._config,
                    model_path,
                    self._device,
                    self._max_prompt_length,
                    record_routes=self._record_routes,
                    sleeps=self._sleeps,
                )
                arguments["hf_overrides"] |= overrides(self._precision)
                llm = LLM(**arguments)
                llm.init_weight_transfer_engine({"init_info": {}})
            except (RuntimeError, ValueError, AssertionError, MemoryError) as error:
                process_state.destroy_engine_groups()
                if self._owns_world and dist.is_initialized():
                    dist.destroy_process_group()
                raise RolloutError(f"vLLM did not start: {type(error).__name__}: {_one_line(error)}") from error
        return llm


class _Steps:
    """`TurnEngine` on vLLM."""

    def __init__(self, llm: Any, sampling: Sampling) -> None:
        self._llm, self._sampling = llm, sampling

    def submit(self, tokens: list[int], fields: dict[str, Any]) -> str:
        names = self._llm.enqueue([{"prompt_token_ids": tokens}], [sampling_params(fields)], use_tqdm=False)
        return names[0].partition("-")[0]  # vLLM appends to our names

    def step(self) -> list[tuple[str, Any]]:
        return [(output.request_id, output) for output in self._llm.llm_engine.step() if output.finished]

    def to_turn(self, tokens: list[int], output: Any) -> Turn:
        completion = output.outputs[0]
        sampled, logprobs = sampled_tokens(completion)
        cached, routes = output.num_cached_tokens, completion.routed_experts
        return Turn(tokens, sampled, logprobs, completion.finish_reason, routes, num_cached=cached)

    def abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)


def _rank_in_world() -> tuple[int, int]:
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RolloutError("start the learner before the engine: the job has several ranks, but no process group yet")
    return world_rank(), world_size()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
