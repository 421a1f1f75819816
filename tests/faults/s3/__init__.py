"""Faults between S3's client and a real S3 server: every operation, every byte of a request and of its answer.

Between the real `S3Store`, in its real wrappers, and a real Ceph RGW stands `proxy`, which refuses, breaks, stalls,
damages, loses and repeats by the seed. Two kinds of trial:

- a call: one method of the store, some faults in a row on its n-th request. It ends in time, with the right result
  where an attempt was left, or else with the error that the fault means; the server holds what it should; a call after
  it is right.
- a journey: a reconciler flushes, prunes and scrubs over a storm of faults, and other nodes restore in one. At no time
  does a manifest on the server name what is not there; nothing is quarantined; a restore gives the newest bytes or
  raises; when the storm is over, all converges, and nothing is left over.

Over TLS, and with bodies that no server may answer, tests/stores/s3/test_tls.py, test_line_model.py and test_bodies.py
do it. In all: no secret in a log or an error, no upload left open, no request that is not proper HTTP. What is right is
worked out here, from what the proxy saw the server take, and compared with the server's own listing.

Outside of what can be promised, and so of what is done here: a listing that is not today's while a node looks that has
no memory of its own (S3 lists consistently); a bit flipped in a listing (it carries no checksum: use https); a
`200` to a DeleteObjects that no S3 server gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from aiobotocore.session import get_session
from faults.rounds import Lost, Round
from faults.s3 import call
from faults.s3 import journey as long
from faults.s3.proxy import Proxy
from faults.s3.slot import BUCKETS, Secrets, Slot, administer
from support.timed import timed
from support.world import hurry

UNIT = "S3 faults"
SHORT, GATE = 200, 6_000
MET = (  # tierd puts one object by one request: no upload has parts, and so each object of a part is one
    *call.EVERY,
    "the probe of checksums",
    *(f"upload {number} of a part" for number in range(1, 8)),
    "a manifest's upload",
    "page 1 of a listing",
    "page 2 or later of a listing",
    "chunks deleted by a prune",
    "a restore came through its storm",
    *("a restore past the spool", "a restore through the spool"),
)

_SCRIPT = Path(__file__).parents[2] / "system" / "s3server.sh"
_VARIABLES = ("TIERD_TEST_S3_ENDPOINT", "TIERD_TEST_S3_ACCESS_KEY", "TIERD_TEST_S3_SECRET_KEY")
_SLOTS = 10  # trials at once
_JOURNEYS = 3  # of them, at most: they compute
_LONG = 240.0  # seconds that no trial may take, on however busy a machine


def missing() -> str | None:
    """Why this cannot run here."""
    if all(name in os.environ for name in _VARIABLES):
        return None
    tree = Path(os.environ.get("S3SERVER_TREE", "/opt/ceph20"))
    if os.geteuid() or not (tree / "usr/bin/radosgw").exists():
        return f"{', '.join(_VARIABLES)} are not set, and `tests/system/s3server.sh install` was not run by root"
    return None


def run(work: Round) -> None:
    with _server(work.room) as (endpoint, key, secret), _hurry(), Secrets() as secrets:
        secrets.forbidden = secret
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }
        with mock.patch.dict(os.environ, environment, clear=True):
            asyncio.run(_all(work, endpoint, secrets))


async def _all(work: Round, endpoint: str, secrets: Secrets) -> None:
    async with get_session().create_client("s3", endpoint_url=endpoint, region_name="us-east-1") as admin:
        slots: dict[str, Slot] = {}

        async def delete(bucket: str, keys: list[str]) -> None:
            if keys:
                await admin.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in keys]})
                slots[bucket].gone(keys)

        proxy = Proxy(
            endpoint.rpartition("/")[2],
            lambda request: slots[request.bucket].judge(request),
            lambda request, answer: slots[request.bucket].heard(request, answer),
            lambda request, fault: slots[request.bucket].injected(request, fault),
            delete,
        )
        async with proxy.running():
            for number in range(1 if work.only is not None else _SLOTS):
                bucket = f"{BUCKETS}{uuid.uuid4().hex[:10]}"
                await admin.create_bucket(Bucket=bucket)
                slots[bucket] = Slot(bucket, admin, proxy, work.room / f"slot{number}")
            seeds, journeys = work.seeds(), asyncio.Semaphore(_JOURNEYS)
            try:
                await asyncio.gather(*(_trials(work, slot, seeds, secrets, journeys) for slot in slots.values()))
            finally:
                for slot in slots.values():
                    await slot.aclose()
                    await administer(admin, slot.bucket)


async def _trials(work: Round, slot: Slot, seeds: Iterator[int], secrets: Secrets, journeys: asyncio.Semaphore) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        journey = rng.random() < 0.04
        trial = long.trial if journey else call.trial
        slot.begin()
        try:
            async with journeys if trial is long.trial else contextlib.nullcontext(), asyncio.timeout(_LONG):
                await trial(slot, seed, rng)
                await slot.settled()
            _check(slot, secrets)
        except Exception as error:
            why = Lost(f"a trial did not end within {_LONG:.0f} s") if isinstance(error, TimeoutError) else error
            why.add_note(slot.story())
            work.lost(seed, why, max(1, slot.count))
            await slot.renew()
        else:
            work.passed(slot.count, *slot.notes.elements())


def _check(slot: Slot, secrets: Secrets) -> None:
    if slot.broken:
        raise Lost("; ".join(slot.broken[:3]))
    if slot.proxy.complaints:
        raise Lost(f"no proper request: {slot.proxy.complaints.pop()}")
    if secrets.found:
        raise Lost(f"a secret was logged: {secrets.found.pop()}")


# -- what it needs ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(room: Path) -> Iterator[tuple[str, str, str]]:
    """The server that the environment names, or one that ends with this."""
    if all(name in os.environ for name in _VARIABLES):
        yield os.environ[_VARIABLES[0]], os.environ[_VARIABLES[1]], os.environ[_VARIABLES[2]]
        return
    own = {"S3SERVER_DATA": str(room / "server"), "S3SERVER_PORT": str(_free_ports())}

    def script(command: str) -> str:
        log = room / "server.log"
        with log.open("a") as file:  # a file: the daemons keep what they are given
            subprocess.run(
                ["bash", str(_SCRIPT), command],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=True,
                timeout=300,
            )
        return log.read_text()

    try:
        script("start")
        found = dict(
            piece.split("=", 1) for piece in script("env").split() if piece.startswith(_VARIABLES) and "=" in piece
        )
        yield found[_VARIABLES[0]], found[_VARIABLES[1]], found[_VARIABLES[2]]
    finally:
        script("stop")
        shutil.rmtree(room / "server", ignore_errors=True)


def _free_ports() -> int:
    """The first of three ports in a row that nobody listens on."""
    for port in range(21_480, 32_000, 10):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for one in range(port, port + 3):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", one))
            return port
    raise OSError("no three free ports")


@contextlib.contextmanager
def _hurry() -> Iterator[None]:
    """tierd's patience in fractions of a second: the order of things stays, the waiting goes."""
    with contextlib.ExitStack() as stack:

        class Patch:
            @staticmethod
            def setattr(target: object, name: object, value: object = ...) -> None:
                if isinstance(target, str):
                    stack.enter_context(mock.patch(target, name))
                else:
                    stack.enter_context(mock.patch.object(target, str(name), value))

        hurry(Patch)
        # Else what one refused deletion left would wait for ten minutes.
        timed(Patch, refused_s=0.2, twin_s=5.0)
        for name, value in {
            "tierd.stores.s3.s3_store.LARGEST": 4 << 20,
            "tierd.stores.s3.transport.LONGEST_REPLY": 4 << 20,
            "tierd.stores.retry.LARGEST": 1_000_000,
            "tierd.daemon.tiers.tier_observer._RELIST": 0.0,
        }.items():
            Patch.setattr(name, value)
        yield
