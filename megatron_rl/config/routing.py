"""The `routing` section: which experts the learner's routers select, and what is measured of it."""

from __future__ import annotations

from typing import Literal

from megatron_rl.config.base import Section


class RoutingConfig(Section):
    replay: Literal["off", "r2", "r3"] = "off"
    """off: the learner routes by itself. r2: replay in every update what the learner routed in its pass for old
    log-probs (which then runs even with one update per batch). r3: replay the rollout engine's routes in every forward
    pass of the learner, so that both engines use the same experts for the same token [R3]."""
    telemetry: bool = False
    """With replay off: have the engine record its routes nevertheless, and report how far the learner's agree with
    them (router/agree_frac and others). With replay on, agreement is measured in any case."""
    malformed: Literal["error", "fallback"] = "error"
    """A row of expert ids that cannot be (out of range, or one expert twice). error: end the run, naming sequence,
    layer and token. fallback: leave that token to the learner's router, counted in router/fallback_frac. A payload of
    the wrong length or with a wrong checksum is an error in either case."""

    @property
    def is_on(self) -> bool:
        """Whether the learner's routers are replayed or watched at all."""
        return self.replay != "off" or self.telemetry

    @property
    def needs_engine_routes(self) -> bool:
        """Whether the rollout engine has to record its routes."""
        return self.replay == "r3" or (self.replay == "off" and self.telemetry)

    def describe(self) -> str:
        """One line for a person."""
        if self.replay == "off":
            return "by the learner; the engine's routes are recorded for comparison"
        source = "its own pass for old log-probs" if self.replay == "r2" else "the rollout engine"
        return f"replay {self.replay}: the learner uses the routes of {source}"
