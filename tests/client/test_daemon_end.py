"""A daemon that a trainer started ends by an error: the launch hears why, and its saves still get to the tier."""

from __future__ import annotations

import os

import pytest
from support.peers import OtherDaemon
from support.training import tensors
from support.waiting import wait_until

import tierd
from tierd.core.errors import DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.protocol import PROTOCOL
from tierd.spool.spool import Spool

ENDING = """
import os, sys, threading, time
def end():
    while not os.path.exists({path!r}):
        time.sleep(0.05)
    os.unlink({path!r})
    sys.stderr.write("tierd: the reason why\\n")
    sys.stderr.flush()
    os._exit(1)
if "--await-trainer" in sys.orig_argv:
    threading.Thread(target=end, daemon=True).start()
"""


def answers(spool: Spool) -> bool:
    try:
        DaemonConnection(spool).close()
    except DaemonUnavailable:
        return False
    return True


@pytest.mark.parametrize("at_close", [False, True])
def test_a_daemon_that_ends_by_an_error_is_replaced_and_the_log_says_why(tmp_path, monkeypatch, caplog, at_close):
    sign, modules, tier = tmp_path / "end", tmp_path / "modules", tmp_path / "tier"
    modules.mkdir(), tier.mkdir()
    (modules / "sitecustomize.py").write_text(ENDING.format(path=str(sign)))
    monkeypatch.setenv("PYTHONPATH", f"{modules}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ckpt = tierd.Checkpointer(tmp_path / "spool", run="r", to=[str(tier)])
    ckpt.save(1, tensors(1)).wait()
    sign.touch()
    spool = Spool(tmp_path / "spool")
    wait_until(lambda: not answers(spool))
    assert "the reason why" not in caplog.text
    if not at_close:
        ckpt.save(2, tensors(2)).wait()
        wait_until(lambda: "the reason why" in caplog.text)
    ckpt.close(wait="file", timeout=60)
    assert caplog.text.count("the reason why") == 1 and "exit status 1" in caplog.text
    assert len(list(tier.glob("r/manifests/*/*"))) == (1 if at_close else 2)


def test_daemon_that_ends_while_a_launch_registers_is_replaced(tmp_path):
    """An idle daemon of the launch before ends at any moment, and its socket may remain."""
    (tmp_path / "tier").mkdir()
    spool = Spool(tmp_path / "spool")

    def answer(request: dict) -> dict | None:
        if request["op"] == "hello":
            return {"ok": True, "protocol": str(PROTOCOL), "version": "0.1.0"}
        spool.socket.unlink(missing_ok=True)
        return None

    with (
        OtherDaemon(spool, answer) as ending,
        tierd.Checkpointer(spool.root, run="r", to=[str(tmp_path / "tier")]) as ckpt,
    ):
        ckpt.save(1, tensors(1)).wait("file", timeout=120)
    assert [request["op"] for request in ending.asked] == ["hello", "attach"]
