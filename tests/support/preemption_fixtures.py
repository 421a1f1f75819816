"""A fixture for tests that send notices of preemption to their own process."""

from __future__ import annotations

import signal

import pytest

from tierd.client.preemption.notices import SIGNALS


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """No machine of a cloud, and the handlers of before whatever a test does."""
    monkeypatch.setattr("tierd.client.preemption.cloud_notices._detected", lambda dmi: None)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
