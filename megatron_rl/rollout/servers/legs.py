"""A response that weight updates cut into legs (`rollout.in_flight.mode: abort_and_resume`).

Every leg is a request of its own: its prompt is the prompt and all tokens so far, which the new weights read from the
start. Its log-probs and versions are those of the policy that sampled it. It draws from a seed of its own: with the
response's seed it would draw the first leg's random numbers again.

A position's routes are those of the leg that sampled the token after it. So the learner replays for every token the
experts that its distribution came from, while keys and values of earlier legs' tokens were computed anew, with routes
that nobody replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_rl.rollout.generator import LegCounts
from megatron_rl.rollout.requests import leg_seed
from megatron_rl.rollout.servers.wire import Answer
from megatron_rl.routing import joined_checksums


@dataclass
class Legs:
    """What is there of one response. ``body``: the request for all of it."""

    body: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    num_recomputed: int = 0  # response tokens that later legs read

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def request(self) -> dict[str, Any]:
        """The body of the request for what is missing."""
        if not self.answers:
            return self.body
        tokens = np.concatenate([answer.tokens for answer in self.answers])
        prompt, fields = self.body["token_ids"], self.body["sampling_params"]
        return {
            **self.body,
            "token_ids": [*prompt, *tokens.tolist()],
            "first_route": len(prompt) + len(tokens) - 1,
            "sampling_params": {
                **fields,
                "max_tokens": fields["max_tokens"] - len(tokens),
                "seed": leg_seed(fields["seed"], len(self.answers)),
            },
        }

    def add(self, answer: Answer) -> bool:
        """Take the answer to `request`. True where the response is complete with it."""
        if len(answer.tokens):
            self.num_recomputed += self.num_tokens
            self.answers.append(answer)
        return answer.finish_reason != "abort"

    def counts(self, num_versions: int) -> LegCounts:
        """Of the complete response, which ``num_versions`` policies sampled."""
        return LegCounts(len(self.answers), num_versions, self.num_recomputed)

    def whole(self) -> Answer:
        """The response, when it is complete."""
        if len(self.answers) == 1:
            return self.answers[0]
        columns = {
            name: np.concatenate([getattr(answer, name) for answer in self.answers])
            for name in ("tokens", "logprobs", "versions")
        }
        if self.answers[0].routes is not None:
            columns["routes"] = np.concatenate([answer.routes for answer in self.answers])
            seals = [answer.route_checksums for answer in self.answers]
            columns["route_checksums"] = joined_checksums(seals, columns["routes"].shape[1])
        return Answer(finish_reason=self.answers[-1].finish_reason, **columns)
