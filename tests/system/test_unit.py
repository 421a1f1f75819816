"""The systemd unit: systemd itself accepts every line of it, and a supervised daemon behaves as the unit says."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.confined import allowed, directives
from support.receiver import receiving
from support.s3stub import Bucket, serving

from tierd.core.manifest import MAX_CHUNK_SIZE
from tierd.daemon import handoff_lines
from tierd.daemon.transfer.memory_budget import BYTES, FLUSHES
from tierd.stores import file
from tierd.stores.s3 import limits

pytestmark = pytest.mark.system

ROOT = Path(__file__).parent.parent.parent
UNIT = ROOT / "systemd" / "tierd.service"
TEMPLATE = UNIT.with_name("tierd@.service")
OF_AN_INSTANCE = {"ExecStart", "EnvironmentFile", "User", "Group", "ReadWritePaths", "StateDirectory"}
USER = 1717  # nobody in particular


@pytest.mark.parametrize(("unit", "name"), [(UNIT, "tierd.service"), (TEMPLATE, "tierd@alice.service")])
def test_systemd_accepts_the_unit(tmp_path: Path, unit: Path, name: str) -> None:
    tierd = Path(sys.executable).with_name("tierd")
    copy = tmp_path / name
    copy.write_text(unit.read_text().replace("/opt/tierd/bin/tierd", str(tierd)))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_lets_the_daemon_lower_its_own_priority() -> None:
    """And does not do it for the whole process: a save waits for what persists it."""
    unit = UNIT.read_text()
    assert "Nice=" not in unit and "IOScheduling" not in unit
    assert {"setpriority", "ioprio_set"} <= allowed(directives(UNIT)["SystemCallFilter"])


def test_the_unit_is_hardened() -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", str(UNIT)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout  # exposure at most 1.5 of 10


def test_template_equals_the_unit_but_for_settings_of_an_account() -> None:
    """So all that is shown of the one unit holds for the other."""
    one, each = directives(UNIT), directives(TEMPLATE)
    assert {name for name in one.keys() | each.keys() if one.get(name) != each.get(name)} == OF_AN_INSTANCE
    assert each["User"] == ["%i"] and all("%i" in each[name][0] for name in OF_AN_INSTANCE - {"Group"})


def test_the_unit_takes_no_shared_memory_from_a_training() -> None:
    assert "RemoveIPC" not in directives(UNIT)


def size(text: str) -> int:
    return int(text[:-1]) << {"M": 20, "G": 30}[text[-1]]


def test_unit_bounds_memory_and_threads_above_the_needs_of_the_daemon() -> None:
    unit = directives(UNIT)
    (high,), (most,), (tasks,) = unit["MemoryHigh"], unit["MemoryMax"], unit["TasksMax"]
    assert size(high) // 2 > BYTES + FLUSHES  # with the interpreter and its libraries
    assert size(high) + 6 * MAX_CHUNK_SIZE < size(most) <= 4 << 30
    cores, tiers, receivers = 256, 6, 10
    a_tier = (
        2 * 2 * max(file._THREADS, limits.USUAL.connections)
    )  # hasty and polite ones; a reload has both stores for a while
    pools = 64 + 8 + 32 + 2  # of the hand-off, asyncio's own, and the two that listen
    assert handoff_lines.MOST + pools + 2 * cores + tiers * a_tier + receivers < int(tasks) * 3 // 4
    assert int(tasks) <= 4096  # fewer than systemd's default, which is 15 % of the machine's


# -- and the daemon works so ------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of an ordinary user's, at a place that such a user can get to."""
    with tempfile.TemporaryDirectory(prefix="tierd-unit-", dir="/var/tmp") as name:
        os.chown(name, USER, USER)
        yield Path(name)


def confined(unit: Path | str, home: Path, *command: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    launcher = [sys.executable, str(ROOT / "tests/support/confined.py"), str(unit), str(USER), str(home)]
    return subprocess.Popen(
        [*launcher, sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


BITES = {
    "a system call": ("import os; os.chown('{home}', 1, 1)", -signal.SIGSYS),
    "a namespace": ("import ctypes; ctypes.CDLL(None).unshare(1 << 28)", -signal.SIGSYS),
    "an address family": ("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", -signal.SIGSYS),
    "memory that is written and run": (
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
        "PermissionError",
    ),
    "a set-uid file": ("import os; open('{home}/x', 'w'); os.chmod('{home}/x', 0o4755)", -signal.SIGSYS),
    "a file elsewhere": ("open('/var/tmp/tierd-elsewhere', 'w')", "Read-only file system"),
    "other processes": ("import os; assert '1' not in os.listdir('/proc')", 0),
    "devices": ("import os; assert set(os.listdir('/dev')) == {{'null', 'zero', 'full', 'random', 'urandom'}}", 0),
    "its own home": ("open('{home}/x', 'w').write('x')", 0),
}


@pytest.mark.parametrize("what", BITES)
def test_the_confinement_bites(home: Path, what: str) -> None:
    code, expected = BITES[what]
    child = confined(UNIT, home, "-c", code.format(home=home))
    said, _ = child.communicate(timeout=250)
    if isinstance(expected, int):
        assert child.returncode == expected, said
    else:
        assert child.returncode == 1 and expected in said


TRAINER = """
import shutil, sys, time
from pathlib import Path
from support.training import tensors
import tierd, torch
from tierd.ipc.client import Link
from tierd.ipc.messages import Pause, Report, Resume, Status
from tierd.spool.spool import Spool

def state(step):
    return {**tensors(step), "big": torch.full((1 << 20,), float(step))}

spool = Spool(sys.argv[1])
with tierd.Checkpointer(spool.root, "run") as ckpt:
    for step in range(5):
        save = ckpt.save(step, state(step))
        for tier in ("local", "disk", "s3"):
            save.wait(tier, timeout=100)
    assert ckpt.stats.handed_over == ckpt.stats.direct == 5, ckpt.stats
    assert ckpt.stats.recycled, ckpt.stats
with Link(spool) as link:
    link.ask(Pause(for_s=100))
    link.ask(Resume())
    end = time.monotonic() + 100
    while True:
        status = link.ask(Status())["status"]
        found = link.ask(Report(run="run"))["report"]["checkpoints"]
        tiers = [one for one in found if {copy["place"] for copy in one["copies"]} >= {"disk", "s3"}]
        if len(found) == len(tiers) == 2 and status["counters"]["scrubbed"] >= 4:
            break
        assert time.monotonic() < end, (found, status)
        time.sleep(0.2)
    assert not status["counters"]["errors"] and not status["counters"]["corruptions"], status
    # A scrub that met what is deleted below would rightly warn of it.
    link.ask(Pause(for_s=100))
    time.sleep(2)
    [newest] = [part for part in spool.parts() if part.checkpoint.step == 4]
    shutil.rmtree(spool.path(newest))
    back = state(99)
    with tierd.Checkpointer(spool.root, "run") as ckpt:
        found = ckpt.restore(back)
        assert (found.step, found.tier) == (4, "disk") and torch.equal(back["big"], state(4)["big"]), found
    link.ask(Resume())
print("all is well")
"""


@pytest.mark.timeout(300)
def test_the_daemon_works_under_all_that_the_unit_takes_from_it(home: Path) -> None:
    """Save, flush to a disk and to S3, prune, scrub, pause, fetch, drain: by an ordinary user's daemon and trainer; and
    a webhook and a command are told of it."""
    (home / "tier").mkdir()
    os.chown(home / "tier", USER, USER)
    with serving(Bucket()) as bucket, receiving() as hook:
        (home / "tierd.toml").write_text(
            f'spool = "{home}/spool"\nscrub = "2s"\nrescan = "1s"\nretention = {{ keep_last = 1 }}\n'
            f'[[tier]]\nname = "disk"\nurl = "file://{home}/tier"\nretention = {{ keep_last = 2 }}\n'
            f'[[tier]]\nname = "s3"\nurl = "{bucket.url()}"\nretention = {{ keep_last = 2 }}\n'
            f'[[notify]]\nurl = "{hook.url()}"\n[[notify]]\ncommand = ["/bin/sh", "-c", "cat >> {home}/told"]\n'
        )
        daemon = confined(UNIT, home, "-m", "tierd", "run", "--config", str(home / "tierd.toml"))
        try:
            end = time.monotonic() + 100
            while not (home / "spool/.tierd/control.sock").exists():
                assert daemon.poll() is None and time.monotonic() < end, daemon.communicate()
                time.sleep(0.1)
            status = dict(line.split(":\t") for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
            assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
            assert status["Uid"].split() == [str(USER)] * 4 and int(status["CapBnd"], 16) == 0
            trainer = confined("-", home, "-c", TRAINER, str(home / "spool"))
            said, _ = trainer.communicate(timeout=200)
            assert trainer.returncode == 0 and "all is well" in said, said
            status = dict(line.split(":\t") for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
            unit = directives(UNIT)
            assert int(status["Threads"]) < int(unit["TasksMax"][0]) // 4
            assert int(status["VmHWM"].split()[0]) << 10 < size(unit["MemoryHigh"][0]) < size(unit["MemoryMax"][0])
        finally:
            daemon.terminate()
            log, _ = daemon.communicate(timeout=250)
    assert daemon.returncode == 0, log  # by SIGSYS, where it asked for what the unit refuses
    assert "ended" in log and "WARNING" not in log and "ERROR" not in log, log
    reported = [json.loads(line)["what"] for line in (home / "told").read_text().replace("}{", "}\n{").splitlines()]
    assert {"persisted", "durable", "pruned", "repaired"} <= set(reported) & set(hook.what()), (reported, hook.what())
    modes = {stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in (home / "tier").rglob("*")}
    assert modes == {0}  # UMask=
