"""Progress of restores and of `close` on the terminal of a training process, and in its log elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import sys
import termios
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from support.doubles import Double, is_chunk
from support.timed import timed_client
from support.waiting import wait_until
from support.world import Daemon, hurry, part

import tierd
from tierd.client.restoring.part_fetch import FetchProgress
from tierd.client.user_messages import TerminalLine, transfer_rate_text
from tierd.core.errors import StoreUnavailable
from tierd.spool.spool import Spool


class Screen:
    """What a terminal of 60 columns got."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (24, 60))
        self._said: list[bytes] = []
        self._reads = threading.Thread(target=self._read)
        self._reads.start()

    def _read(self) -> None:
        while True:
            try:
                self._said.append(os.read(self._ours, 4096))
            except OSError:
                return

    @property
    def text(self) -> str:
        return b"".join(self._said).decode()

    def close(self) -> None:
        self._reads.join(60)
        os.close(self._ours)


@contextlib.contextmanager
def on_terminal() -> Iterator[Screen]:
    """A terminal that is the standard error. No fixture, because pytest replaces that between a fixture and a test."""
    made = Screen()
    with os.fdopen(made.theirs, "w") as terminal, mock.patch.object(sys, "stderr", terminal):
        yield made
    made.close()


def test_a_line_is_drawn_anew_and_erased_and_fits() -> None:
    with on_terminal() as screen:
        with TerminalLine() as line:
            assert line.draw("one \u202e") and line.draw("x" * 100)
            wait_until(lambda: "x" * 59 in screen.text)
        wait_until(lambda: screen.text.endswith("x\r\x1b[K"))
    assert screen.text == f"\r\x1b[Kone \\u202e\r\x1b[K{'x' * 59}\r\x1b[K"


def test_elsewhere_nothing_is_written(capsys) -> None:
    with TerminalLine() as line:
        assert not line.draw("text")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("stream", [None, object()])
def test_a_standard_error_that_is_none_is_no_terminal(monkeypatch, stream) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with TerminalLine() as line:
        assert not line.draw("text")


def test_a_rate_needs_bytes_and_time() -> None:
    assert transfer_rate_text(2e9, 4, 1e9) == ", 0.50 GB/s, 2 s left"
    assert transfer_rate_text(0, 4, 1e9) == transfer_rate_text(-1, 4, 1e9) == transfer_rate_text(1, 0, 1e9) == ""


def test_one_rank_of_those_on_a_terminal_says_how_far_it_is(caplog) -> None:
    with caplog.at_level(logging.INFO, "tierd"), on_terminal() as screen:
        for rank in (0, 1):
            with FetchProgress(part(7, rank=rank, world=2)) as reported:
                reported({"working": True, "done": 10**9, "total": 3 * 10**9, "tiers": ["s3"]})
        wait_until(lambda: screen.text.endswith("\x1b[K"))
    assert screen.text.count("tierd: 1.0 of 3.0 GB: fetching run step 7") == 1
    assert [one.getMessage() for one in caplog.records if "rank 0" in one.getMessage()] == []
    assert any("rank 1 of 2" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_close_that_waits_says_how_far_it_is(tmp_path, monkeypatch, caplog, terminal: bool) -> None:
    hurry(monkeypatch)
    timed_client(monkeypatch, close_poll_s=0.02, close_shown_s=0.02, close_logged_s=0.02)
    spool, store = Spool(tmp_path / "spool"), Double()
    screens: list[Screen] = []
    real = store.put

    async def put(key: str, data: bytes) -> str:
        while is_chunk(key) and not any("to send" in one for one in (*caplog.messages, *(it.text for it in screens))):
            await asyncio.sleep(0.01)  # so `close` has something to wait for
        return await real(key, data)

    store.put = put
    with Daemon(spool.root, {"tier": store}), caplog.at_level(logging.INFO, "tierd"):
        checkpointer = tierd.Checkpointer(spool.root, "run")
        checkpointer.save(3, {"model": {"weight": torch.zeros(1 << 16)}})
        with on_terminal() if terminal else contextlib.nullcontext() as screen:
            screens += [screen] if screen else []
            checkpointer.close(wait="tier", timeout=60)
            if screen is not None:
                wait_until(lambda: screen.text.endswith("\r\x1b[K"))
    said = [one.getMessage() for one in caplog.records if one.getMessage().startswith("closing: ")]
    if screen is None:
        assert said and all("not on every tier yet; 0.0 GB of the node to send" in one for one in said)
    else:
        assert "tierd: 0.0 GB of the node to send" in screen.text and said == []


def test_a_restore_that_fails_leaves_no_line_behind() -> None:
    with on_terminal() as screen:
        with pytest.raises(StoreUnavailable), FetchProgress(part(7), stalled_s=0.0) as reported:
            reported({"done": 1, "total": 3})
            reported({"done": 1, "total": 3})
        wait_until(lambda: screen.text.endswith("\r\x1b[K"))
