"""Who asks a run to stop, and how urgent that is."""

from __future__ import annotations

import os
import signal

import pytest

from megatron_rl.run.control import STOP_FILE, StopRequest


@pytest.mark.parametrize("name", ["TERM", "USR1", "USR2", "INT", "HUP", "QUIT"])
def test_a_signal_is_a_request_while_it_listens(tmp_path, name):
    number = signal.Signals[f"SIG{name}"]
    before = signal.getsignal(number)
    stop = StopRequest(tmp_path)
    with stop.listening():
        assert not stop.here()
        os.kill(os.getpid(), number)
        assert stop.here()
        assert stop.is_urgent()
        assert stop.anywhere()
    assert signal.getsignal(number) is before


def test_a_run_under_nohup_stays_deaf_to_hangups(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest(tmp_path)
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.here()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_the_run(tmp_path):
    with StopRequest(tmp_path).listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_file_from_before_the_start_lets_one_step_be_made(tmp_path):
    (tmp_path / STOP_FILE).touch()
    stop = StopRequest(tmp_path)
    assert stop.here()
    assert not stop.is_urgent()
    stop.met()
    assert not (tmp_path / STOP_FILE).exists()
    later = StopRequest(tmp_path)
    (tmp_path / STOP_FILE).touch()
    assert later.is_urgent()
