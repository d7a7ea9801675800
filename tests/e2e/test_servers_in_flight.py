"""Weights that change while real servers sample: every token's log-prob and routes are those of the policy that is said
to have sampled it, in each mode of `rollout.in_flight` (`in_flight`). Faults: `test_server_faults.py`.
"""

from pathlib import Path

import numpy as np
import pytest

from megatron_rl.rollout import Sampling
from tests.e2e.in_flight import (
    TOKEN,
    assert_sampled_as_said,
    cut,
    flat,
    generator_on,
    prompts,
    runs_of,
    served_recipe,
    two_models,
)
from tests.support.forked_servers import ForkedServers
from tests.support.slow import slow_but

LENGTH = 160
SAMPLING = Sampling(LENGTH)
MODES = ("abort_and_resume", "keep")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, which every mode uses: the mode is the trainer's."""
    run_dir = tmp_path_factory.mktemp("run") / "served"
    recipe, file = served_recipe(run_dir, LENGTH)
    local = ForkedServers(2, file, run_dir, TOKEN)
    yield run_dir, recipe
    local.close()


@pytest.fixture(scope="module", params=slow_but(["abort_and_resume"], MODES))
def generator(request, servers):
    made = generator_on(*servers, request.param)
    yield made
    made.close()


class TestInFlight:
    def test_every_token_is_of_the_policy_that_is_said_to_have_sampled_it(self, generator, models):
        for _ in range(10):  # batches: on a busy machine one may end before an update reaches its servers
            begun_with = generator.version
            ticket = generator.begin(prompts(6, 1), 4, policy_version=generator.version, step=0)
            cut(generator, models, ticket)
            groups = generator.finish(ticket)
            number = [len(runs_of(rollout)) for _, rollout in flat(groups)]
            if max(number) > 1:
                break
        assert [rollout.length for _, rollout in flat(groups)] == [LENGTH] * 24
        assert {rollout.finish_reason for _, rollout in flat(groups)} == {"length"}
        assert max(number) > 1
        versions = np.concatenate([rollout.policy_versions for _, rollout in flat(groups)])
        assert begun_with <= versions.min() <= versions.max() <= generator.version
        assert_sampled_as_said(generator, models, groups)
        stats = generator.stats()
        assert stats["rollout/versions_mean"] == sum(number) / len(number)
        cuts = generator._config.in_flight.mode == "abort_and_resume"
        assert stats["rollout/legs_mean"] == (stats["rollout/versions_mean"] if cuts else 1)
        assert (stats["rollout/recomputed_tokens"] > 0) == cuts
        # The test can tell: with the next version, which is of the other model, log-probs are far off. A change of
        # version a token later need not show: nothing behind a close choice of experts is compared.
        for _, rollout in flat(groups):
            rollout.policy_versions += 1
        with pytest.raises(AssertionError):
            assert_sampled_as_said(generator, models, groups)

    def test_what_is_asked_for_at_once_is_of_one_policy_and_meets_no_older_cache(self, generator, models):
        """Validation in the middle of a batch, of prompts that the batch has left in the prefix cache."""
        ticket = generator.begin(prompts(6, 2), 2, policy_version=generator.version, step=0)
        cut(generator, models, ticket, times=2)
        asked = generator.rollout(prompts(6, 2), 2, policy_version=generator.version, step=1, sampling=SAMPLING)
        versions = {int(v) for _, rollout in flat(asked) for v in rollout.policy_versions}
        assert versions == {generator.version}
        assert_sampled_as_said(generator, models, asked)
        assert_sampled_as_said(generator, models, generator.finish(ticket))

    def test_two_batches_at_once_the_first_one_first(self, generator, models):
        first = generator.begin(prompts(6, 3), 4, policy_version=generator.version, step=0)
        second = generator.begin(prompts(6, 4), 4, policy_version=generator.version, step=1)
        complete: list[int] = []
        for step, ticket in enumerate((first, second)):
            ticket.answers.add_done_callback(lambda _answers, step=step: complete.append(step))
        cut(generator, models, second, times=3)
        assert_sampled_as_said(generator, models, generator.finish(first))
        assert_sampled_as_said(generator, models, generator.finish(second))
        assert complete == [0, 1]
