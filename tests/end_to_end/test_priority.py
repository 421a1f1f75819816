"""The daemon's threads as the system sees them: what moves bytes to tiers yields, what a save waits for does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tierd
from tierd import threads

ROOT = Path(tierd.__file__).parent.parent
LOW, NORMAL = [19, 3], [0, 0]  # nice and I/O class, as ioprio_get(2) gives it

# Notes each thread's priority where the work is done.
NOTING = """
import asyncio, ctypes, json, os, platform, signal, sys, threading
from pathlib import Path
from tierd import threads

GET = {"x86_64": 252, "aarch64": 31}[platform.machine()]

def seen():
    tid = threading.get_native_id()
    return [int(Path(f"/proc/self/task/{tid}/stat").read_text().rsplit(")", 1)[1].split()[16]),
            threads._libc.syscall(GET, 1, tid) >> 13]

notes = {}

def noting(module, name):
    real = getattr(module, name)
    def noted(*arguments, **more):
        notes.setdefault(name, []).append(seen())
        return real(*arguments, **more)
    setattr(module, name, noted)
"""


def reported(script: str, **environment: str) -> dict:
    """Run a script after `NOTING` in a process of its own; the JSON that it prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", NOTING + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "stderr": done.stderr}


def test_save_and_restore_have_normal_priority_and_a_flush_has_low(tmp_path):
    (tmp_path / "tier").mkdir()
    script = f"""
        import torch, tierd
        from tierd.core.config import from_urls
        from tierd.daemon import handoff_socket
        from tierd.daemon import daemon_service
        from tierd.daemon.transfer import chunk_source, replicas
        from tierd.ipc.daemon_connection import DaemonConnection
        from tierd.ipc.messages import StatusRequest
        from tierd.spool.spool import Spool
        noting(handoff_socket, "write_part")
        noting(chunk_source, "read_recent_chunk")
        noting(replicas, "decode")

        def answers():
            try:
                with DaemonConnection(Spool(Path({str(tmp_path / "spool")!r}), write=False)) as link:
                    return link.ask(StatusRequest(), 10)
            except (tierd.core.errors.TierdError, OSError):
                return None

        def train():
            try:
                for _ in range(400):
                    if answers():
                        break
                    threading.Event().wait(0.05)
                for step in range(4):
                    with tierd.Checkpointer({str(tmp_path / "spool")!r}, run="r", attempt=None) as ckpt:
                        ckpt.save(step, {{"weights": torch.arange(1000.0) + step}}).wait("file", timeout=60)
                        notes.setdefault("handed over", []).append(ckpt.stats.handed_over)
                newest = max(Path({str(tmp_path / "spool" / "r")!r}).iterdir())  # others may be pruned just now
                for file in newest.glob("*/*.safetensors"):
                    file.write_bytes(b"rotten")
                with tierd.Checkpointer({str(tmp_path / "spool")!r}, run="r") as ckpt:
                    notes["restored"] = [ckpt.restore({{"weights": torch.zeros(1000)}}).tier]
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer = threading.Thread(target=train)
        trainer.start()
        asyncio.run(daemon_service.serve(from_urls({str(tmp_path / "spool")!r}, [{str(tmp_path / "tier")!r}])))
        notes["main"] = [seen()]
        trainer.join()
        print(json.dumps(notes))
    """
    notes = reported(script)
    assert notes["handed over"] == [1, 1, 1, 1]
    assert notes["write_part"] == [NORMAL] * 4
    assert notes["main"] == [NORMAL]
    assert notes["restored"] == ["file"] and notes["decode"] and all(note == NORMAL for note in notes["decode"])
    assert len(notes["read_recent_chunk"]) >= 4 and all(note == LOW for note in notes["read_recent_chunk"])


def test_new_threads_inherit_low_priority_and_earlier_threads_keep_theirs():
    script = """
        go = threading.Event()
        def early():
            go.wait(60)
            notes["early"] = seen()
            heir = threading.Thread(target=lambda: notes.update({"early's": seen()}))
            heir.start(); heir.join()
        before = threading.Thread(target=early)
        before.start()
        threads.lower_priority()
        notes["lowered"] = seen()
        late = threading.Thread(target=lambda: notes.update(late=seen()))
        late.start(); late.join()
        go.set(); before.join()
        print(json.dumps(notes))
    """
    notes = reported(script)
    assert (notes["lowered"], notes["late"]) == (LOW, LOW)
    assert (notes["early"], notes["early's"]) == (NORMAL, NORMAL)
    assert notes["stderr"] == ""


@pytest.mark.parametrize(("before", "after"), [(0, 19), (5, 19), (19, 19)])
def test_it_is_never_made_less_polite(before, after):
    notes = reported(
        f"os.nice({before}); threads.lower_priority(); threads.lower_priority(); print(json.dumps({{'now': seen()}}))"
    )
    assert notes["now"] == [after, 3]


def test_no_privilege_is_needed():
    if os.geteuid():
        pytest.skip("runs without privilege as it is")
    notes = reported("os.setgid(65534); os.setuid(65534); threads.lower_priority(); print(json.dumps({'now': seen()}))")
    assert (notes["now"], notes["stderr"]) == (LOW, "")


def test_a_refusal_is_logged_and_no_error(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(threads.os, "setpriority", refuse)
    number = threads.ctypes.c_long
    monkeypatch.setattr(threads.ctypes, "c_long", lambda _: number(1_000_000))  # no system call has it
    threads.lower_priority()
    assert [record.getMessage() for record in caplog.records] == [
        "nice is not raised to 19: Operation not permitted",
        "the I/O class is not idle: Function not implemented",
    ]


def test_a_processor_whose_system_call_is_not_known_is_named(monkeypatch, caplog):
    monkeypatch.setattr(threads.os, "setpriority", lambda *_: None)
    monkeypatch.setattr(threads.platform, "machine", lambda: "vax")
    threads.lower_priority()
    assert "not known on vax" in caplog.text
