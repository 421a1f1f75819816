"""Record what client and daemon send each other, one file for each message, next to this file in `v1/`.

    python tests/wire/record.py

adds a file for each kind of message that has none, and never changes one that is there. A new kind of request needs an
example in `CONTROL` (control socket) or a line in `handed` (hand-off socket) first; `test_recorded.py` says so.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

import torch  # noqa: E402
from support.doubles import Double  # noqa: E402
from support.waiting import wait_until  # noqa: E402
from support.world import Daemon, commit, part  # noqa: E402

import tierd  # noqa: E402
from tierd.client.checkpointer import internals  # noqa: E402
from tierd.client.restoring.part_fetch import FetchProgress  # noqa: E402
from tierd.client.restoring.slot_ring import SlotMemory, SlotRing  # noqa: E402
from tierd.client.saving.snapshot_handoff import HandoffClient  # noqa: E402
from tierd.core import errors  # noqa: E402
from tierd.ipc import message_codec  # noqa: E402
from tierd.ipc import messages as wire  # noqa: E402
from tierd.ipc.protocol import PROTOCOL  # noqa: E402
from tierd.spool.spool import Spool  # noqa: E402

V1 = HERE / "v1"
OLD, NEW = part(1), part(2)  # OLD lies on the tier alone

# What a client sends on the control socket: a request of each kind as short as it can be, and with every member.
CONTROL: dict[str, wire.Request | bytes] = {
    "hello": wire.Hello(protocol=str(PROTOCOL), version="0.1.0"),
    "hello.refused": wire.Hello(protocol="9.0", version="9.0.0"),
    "remove": wire.RemoveRun(run="another"),  # before a trainer is attached, beside whom nothing is removed
    "attach": wire.Attach(),
    "attach.run": wire.Attach(run="run"),
    "attach.to": wire.Attach(run="run", to=("file:///mnt/b",)),
    "status": wire.StatusRequest(),
    "report": wire.ReportRequest(),
    "report.run": wire.ReportRequest(run="run"),
    "runs": wire.RunsRequest(),
    "candidates": wire.CandidatesRequest(run="run"),
    "candidates.metrics": wire.CandidatesRequest(run="run", metrics=("loss",)),
    "fetch.wanted": wire.Fetch(part=OLD, wanted={"weights.bin": ((0, 1), (2, 3))}),
    "fetch": wire.Fetch(part=OLD),
    "wait": wire.Wait(part=NEW, tier="tier"),
    "wait.needed": wire.Wait(part=NEW, tier="tier", timeout_s=1.5, needed=True),
    "backlog": wire.BacklogRequest(),
    "backlog.hurry": wire.BacklogRequest(hurry=True, run="run"),
    "make-room": wire.MakeRoom(run="run", size_bytes=1 << 20),
    "make-room.quota": wire.MakeRoom(run="run", size_bytes=1 << 20, quota=True),
    "pin": wire.Pin(checkpoint=NEW.checkpoint, pinned=True),
    "failed": wire.SaveGivenUp(part=NEW, why="the disk is full"),
    "leaked": wire.DataLeakNotice(part=NEW, why="4 samples of step 7 came twice in epoch 1"),
    "preempted": wire.PreemptionNotice(part=NEW, why="SIGTERM to rank 0 on a"),
    "backlog.newest": wire.BacklogRequest(hurry=True, newest=True),
    "fell-back": wire.FallbackNotice(checkpoint=OLD.checkpoint, skipped=("run step 2: corrupt",)),
    "restored": wire.RestoreFinished(part=OLD, place="tier", seconds=1.5),
    "launches": wire.LaunchesRequest(run="run"),
    "notes": wire.NotesRequest(run="run", launch="0" * 32),
    "notes.all": wire.NotesRequest(
        run="run",
        launch="0" * 32,
        put={"hello.0": b"\x00\x01", "hello.1": b""},
        remove=("hello.1", "welcome"),
        read=("hello.0", "hello.1"),
        under="hello.",
    ),
    "pause": wire.Pause(),
    "pause.for": wire.Pause(for_s=7200.0),
    "resume": wire.Resume(),
    "unknown": b'{"op":"of-a-later-version","part":1}\n',
}


def messages() -> dict[str, bytes]:
    """Every message of today's code: ``socket/name.request`` or ``.reply`` -> bytes, an answer with all its lines."""
    with tempfile.TemporaryDirectory() as home, mock.patch.object(wire, "HEARTBEAT", 0.02):
        found = {
            **{f"control/{name}": data for name, data in asked(Path(home) / "a").items()},
            **{f"handoff/{name}": data for name, data in handed(Path(home) / "b").items()},
        }
        found |= {
            f"errors/{kind.__name__}.reply": wire.encode_line(message_codec.error_reply(kind("tier: why")))
            for _, kind in inspect.getmembers(
                errors, lambda kind: inspect.isclass(kind) and issubclass(kind, errors.TierdError)
            )
        }
        return {name: data.replace(home.encode(), b"") for name, data in found.items()}


def asked(home: Path) -> dict[str, bytes]:
    """The control socket: what is sent for `CONTROL`, and what a daemon with one tier answers."""
    store, found = Double(), {}
    with Daemon(home, {"tier": store}, keep_local=1) as daemon:
        for one in (OLD, NEW):
            commit(daemon.spool, one, metrics={"loss": 0.5})
            daemon.settle()
        wait_until(lambda: not daemon.spool.has(OLD))
        daemon.settle()
        store.delay = 0.05  # so that a fetch says how far it is
        with _connected(daemon.spool) as ask:
            for name, request in CONTROL.items():
                line = request if isinstance(request, bytes) else wire.encode_line(request)
                found[f"{name}.request"] = line
                if name == "hello.refused":  # which ends its connection
                    with _connected(daemon.spool) as other:
                        found[f"{name}.reply"] = other(line)
                else:
                    found[f"{name}.reply"] = ask(line)
    return found


@contextlib.contextmanager
def _connected(spool: Spool) -> Iterator[Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(spool.socket))
        file = connection.makefile("rwb")

        def ask(line: bytes) -> bytes:
            file.write(line)
            file.flush()
            answer: list[bytes] = []
            while not answer or json.loads(answer[-1]).get("working"):
                answer.append(file.readline())
            return b"".join([*answer[:-1][-1:], answer[-1]])  # one line of progress says what all of them do

        yield ask


def handed(home: Path) -> dict[str, bytes]:
    """The hand-off socket: a trainer saves and dies, its successor takes over and ends."""
    found: dict[str, bytes] = {}
    ops: list[str] = []
    real = socket.send_fds

    def send_fds(connection: socket.socket, buffers: Any, *rest: Any) -> int:
        data = b"".join(buffers)
        message = json.loads(data)
        if "op" in message:
            ops.append(message["op"])
            found[f"{ops[-1]}.request"] = data
        elif not ops or "protocol" in message:
            found["greeting.reply"] = data
        elif not message.get("working"):
            found[f"{ops[-1]}.reply"] = data
        return real(connection, buffers, *rest)

    with Daemon(home, {"tier": Double()}) as daemon:
        with mock.patch.object(socket, "send_fds", send_fds):
            dead = tierd.Checkpointer(home, "run", to=None)
            save = dead.save(1, {"x": torch.zeros(1000)})
            save.wait(timeout=60)
            assert internals(dead).handoff is not None and internals(dead).handoff.line is not None
            internals(dead).handoff.line.connection.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: daemon.handoff.orphans)
            successor = HandoffClient(daemon.spool)
            assert successor.recall(save.part) is not None
            successor.close()
            dead.close()
            daemon.settle()
            ring = SlotRing(daemon.spool, save.part, FetchProgress(save.part), SlotMemory())
            assert list(ring.each(deque([(0, 0)])))
            ring.release()
        found["unknown.request"] = b'{"op":"of-a-later-version"}'
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as later:
            later.settimeout(60)
            later.connect(str(daemon.spool.handoff_socket))
            later.recv(1 << 16)
            later.send(found["unknown.request"])
            found["unknown.reply"] = later.recv(1 << 16)
        wait_until(lambda: not daemon.handoff.busy)
    return found


def main() -> None:
    """Add what is missing."""
    for name, data in sorted(messages().items()):
        path = V1 / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"recorded {path.relative_to(HERE)}")


if __name__ == "__main__":
    main()
