"""Signals are notices while a Checkpointer asks for them, and what they were to everybody else."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tierd.client.preemption.notices import SIGNALS, PreemptionSignals
from tierd.core.errors import ConfigError


@pytest.fixture(autouse=True)
def usual():
    """The handlers of before come back whatever a test does."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def end(number: int) -> None:
    os.kill(os.getpid(), number)


def test_signals_hears_both_signals_and_the_process_continues_until_close() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals = PreemptionSignals(heard.append)
    end(signal.SIGTERM), end(signal.SIGUSR1)
    assert heard == ["SIGTERM", "SIGUSR1"]
    signals.close()
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_signals_calls_the_previous_handler_too_and_restores_it() -> None:
    calls: list[str] = []

    def own(number: int, frame: object) -> None:
        calls.append("own")

    signal.signal(signal.SIGTERM, own)
    signals = PreemptionSignals(calls.append)
    end(signal.SIGTERM)
    signals.close()
    assert calls == ["SIGTERM", "own"] and signal.getsignal(signal.SIGTERM) is own


def test_an_ignored_signal_is_a_notice_and_is_ignored_again_after_close() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = PreemptionSignals(heard.append)
    end(signal.SIGUSR1)
    signals.close()
    end(signal.SIGUSR1)
    assert heard == ["SIGUSR1"]


def test_two_that_ask_both_hear_and_may_close_in_any_order() -> None:
    first: list[str] = []
    second: list[str] = []
    below, above = PreemptionSignals(first.append), PreemptionSignals(second.append)
    end(signal.SIGTERM)
    below.close()
    end(signal.SIGTERM)
    above.close()
    assert (first, second) == (["SIGTERM"], ["SIGTERM"] * 2)


def child(work) -> int:
    """The status of a forked child that does `work`; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_ended_by_sigterm() -> None:
    """A data loader ends its workers by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    heard: list[str] = []
    signals = PreemptionSignals(heard.append)
    assert child(lambda: end(signal.SIGTERM)) == -signal.SIGTERM
    signals.close()
    assert heard == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_close_under_another_handler_a_signal_ends_the_process_as_before() -> None:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signals = PreemptionSignals(lambda name: None)
        mine = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: mine(number, frame))  # type: ignore[operator]
        signals.close()
        end(signal.SIGTERM)

    assert child(work) == -signal.SIGTERM


def test_signals_in_a_thread_that_is_not_main_names_the_remedy() -> None:
    said: list[str] = []

    def work() -> None:
        try:
            PreemptionSignals(said.append)
        except ConfigError as error:
            said.append(str(error))

    thread = threading.Thread(target=work, name="trainer-2")
    thread.start()
    thread.join(60)
    assert len(said) == 1 and "thread trainer-2: make the Checkpointer in the main thread" in said[0]


def test_a_handler_that_is_not_of_python_is_not_replaced(monkeypatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(ConfigError, match="SIGTERM has a handler that is not of Python"):
        PreemptionSignals(lambda name: None)
