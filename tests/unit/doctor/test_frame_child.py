"""What a check raises is a failure with its words, not a crash."""

from __future__ import annotations

import pytest

from megatron_rl.doctor import frame
from megatron_rl.doctor.checks import Check, Setting, passed
from megatron_rl.errors import Fault, InputError

SETTING = Setting("cpu", 2, "/tmp")


def attempt(monkeypatch, function):
    monkeypatch.setattr(Check, "load", lambda self: function)
    return frame.attempt("packages", SETTING)


@pytest.mark.parametrize(
    ("error", "reason"), [(InputError("words"), "words"), (Fault("words"), "words"), (KeyError("k"), "KeyError: 'k'")]
)
def test_an_exception_is_a_failure(monkeypatch, capsys, error, reason):
    def raises(setting):
        raise error

    outcome, raised = attempt(monkeypatch, raises)
    assert raised
    assert (outcome.status, outcome.reason) == ("fail", reason)
    assert outcome.fix
    assert "Traceback" in capsys.readouterr().err


def test_an_outcome_is_handed_on(monkeypatch):
    outcome, raised = attempt(monkeypatch, lambda setting: passed("well", a=1))
    assert (outcome.figures, raised) == ({"a": 1}, False)
