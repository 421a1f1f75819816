"""The how-to for a service, as it is written there, under a systemd that was booted for it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.booted import Machine, booted
from support.receiver import receiving
from support.s3stub import Bucket, serving
from support.units import UNIT, directives, size

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent
SOURCE, PYTHON = "/opt/tierd/src", "/opt/tierd/python"
PAGE = (ROOT / "docs" / "howto" / "service.md").read_text()
CONFIG = """
spool = "{spool}"
rescan = "1s"
drain = "2s"
scrub = "0s"
[[tier]]
name = "disk"
url = "file://{tier}"
"""
TRAINER = """
import logging, sys, torch, tierd
logging.basicConfig(level=logging.INFO)
with tierd.Checkpointer(sys.argv[1], "run") as ckpt:
    for step in map(int, sys.argv[2].split(",")):
        ckpt.save(step, {"weights": torch.full((1000,), float(step))})
    if len(sys.argv) > 3:
        ckpt.close(wait=sys.argv[3], timeout=60)
assert ckpt.stats.handed_over, ckpt.stats
"""

WORK = """
import shutil, time
import tierd, torch
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Pause, ReportRequest, Resume, StatusRequest
from tierd.spool.spool import Spool

def state(step):
    return {"small": torch.arange(step, step + 500), "big": torch.full((1 << 20,), float(step))}

spool = Spool("/nvme/tierd")
with tierd.Checkpointer(spool.root, "run") as ckpt:
    for step in range(5):
        save = ckpt.save(step, state(step))
        for tier in ("local", "disk", "s3"):
            save.wait(tier, timeout=100)
    assert ckpt.stats.handed_over == ckpt.stats.direct == 5, ckpt.stats
    assert ckpt.stats.recycled, ckpt.stats
with DaemonConnection(spool) as link:
    link.ask(Pause(for_s=100))
    link.ask(Resume())
    end = time.monotonic() + 100
    while True:
        status = link.ask(StatusRequest())["status"]
        found = link.ask(ReportRequest(run="run"))["report"]["checkpoints"]
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
        assert ckpt.restore().directory == spool.path(newest)  # without a state the daemon fetches the files
    link.ask(Resume())
print("all is well")
"""
PROC = "/proc/$(systemctl show -P MainPID tierd)"


def blocks() -> list[str]:
    """The page's commands, block by block, but for those with their output."""
    indented = re.findall(r"(?:^    .*\n)+", PAGE, re.M)
    return [re.sub(r"^    ", "", block, flags=re.M) for block in indented if not block.startswith("    $ ")]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with a user who trains, tierd's code at `SOURCE`, and a `sudo` that has nothing left to do."""
    libraries = [path for path in sys.path if Path(path).is_dir() and not Path(path).is_relative_to(sys.base_prefix)]
    libraries = [path for path in libraries if Path(path) not in (ROOT, ROOT / "tests")]
    binds = {str(ROOT): SOURCE, sys.base_prefix: PYTHON}
    binds |= {path: f"/opt/tierd/lib{number}" for number, path in enumerate(libraries)}
    with (
        tempfile.TemporaryDirectory(prefix="tierd-booted-", dir="/var/tmp") as room,
        booted(Path(room) / "root", binds) as found,
    ):
        paths = ":".join([SOURCE, *(target for target in binds.values() if target.startswith("/opt/tierd/lib"))])
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        python = (
            f"#!/bin/sh\nexport PYTHONPATH={paths} PYTHONDONTWRITEBYTECODE=1 LD_LIBRARY_PATH={PYTHON}/lib\n"
            f'exec {PYTHON}/bin/{version} "$@"\n'
        )
        programs = {
            "/opt/tierd/bin/python": python,
            "/opt/tierd/bin/tierd": '#!/bin/sh\nexec /opt/tierd/bin/python -m tierd "$@"\n',
            "/usr/local/bin/sudo": '#!/bin/sh\nexec "$@"\n',
        }
        for path, text in programs.items():
            found.run(f"mkdir -p {Path(path).parent} && printf %s {shlex.quote(text)} > {path} && chmod 755 {path}")
        found.run("useradd --create-home alice; mkdir -p /nvme /mnt/checkpoints")
        yield found


def install(machine: Machine, config: str) -> None:
    """The first block, without the lines that fetch packages and tidy up after that. Then the file is edited."""
    lines = [line for line in blocks()[0].splitlines() if "pip install" not in line and "rm -rf build" not in line]
    assert len(lines) == len(blocks()[0].splitlines()) - 2
    machine.run(f"cd {SOURCE} && set -e\n" + "\n".join(lines))
    edit(machine, config)


def edit(machine: Machine, config: str, name: str = "tierd") -> None:
    """As an editor does it: owner and mode stay."""
    machine.run(f"printf %s {shlex.quote(config)} > /etc/tierd/{name}.toml")


def become(machine: Machine, user: str, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    account = f"setpriv --reuid {user} --regid {user} --clear-groups env HOME=/home/{user} "
    return machine.run(f"cd / && {account}{shlex.join(words)}", ok=ok, timeout=200)


def train(
    machine: Machine, steps: str, *more: str, user: str = "alice", spool: str = "/nvme/tierd"
) -> subprocess.CompletedProcess[str]:
    return become(machine, user, "/opt/tierd/bin/python", "-c", TRAINER, spool, steps, *more)


def manifests(machine: Machine, tier: str) -> int:
    return int(machine.run(f"find {tier} -path '*/manifests/*' -type f | wc -l").stdout)


def test_the_recipe_works_as_written_and_the_service_is_reloaded_and_stopped(machine: Machine) -> None:
    install(machine, CONFIG.format(spool="/nvme/tierd", tier="/mnt/checkpoints/tierd"))
    machine.run("set -e\n" + blocks()[1])
    assert machine.show("tierd", "ActiveState") == "active"
    assert machine.run("stat -c %U /proc/$(systemctl show -P MainPID tierd)").stdout.strip() == "alice"
    train(machine, "1,2", "disk")
    assert manifests(machine, "/mnt/checkpoints/tierd") == 2

    # A changed file is taken up by the same process, and one that cannot be used is not.
    pid = machine.show("tierd", "MainPID")
    config = CONFIG.format(spool="/nvme/tierd", tier="/mnt/checkpoints/tierd")
    edit(machine, config + "retention = { keep_last = 1 }\n")
    machine.run("systemctl reload tierd")
    machine.retry("journalctl -u tierd | grep 'the configuration is reloaded'")
    machine.retry("test $(find /mnt/checkpoints/tierd -path '*/manifests/*' -type f | wc -l) = 1")
    edit(machine, "colour = 'red'")
    machine.run("systemctl reload tierd")
    machine.retry("journalctl -u tierd -p err | grep 'the configuration is not reloaded.*colour'")
    assert (machine.show("tierd", "MainPID"), machine.show("tierd", "ActiveState")) == (pid, "active")
    edit(machine, config)

    # Stopped with everything flushed, it is inactive; with something left, it has failed, and says what is left.
    machine.run("systemctl restart tierd")
    train(machine, "3", "disk")
    machine.run("systemctl stop tierd")
    assert (machine.show("tierd", "ActiveState"), machine.show("tierd", "Result")) == ("inactive", "success")
    machine.run("systemctl start tierd && mv /mnt/checkpoints/tierd/run /mnt/checkpoints/tierd/.gone")
    machine.run("chmod 500 /mnt/checkpoints/tierd && chown root /mnt/checkpoints/tierd")
    train(machine, "4")
    machine.run("systemctl stop tierd")
    assert (machine.show("tierd", "ActiveState"), machine.show("tierd", "Result")) == ("failed", "exit-code")
    assert machine.show("tierd", "ExecMainStatus") == "9"
    said = machine.run("systemctl status tierd", ok=False).stdout
    assert "status=9" in said and "not drained" in said, said


def test_the_daemon_sees_a_tier_that_is_unmounted_and_mounted_again(machine: Machine) -> None:
    """Its mount namespace follows the machine's; a tier bound below its mount point would stay mounted there."""
    machine.run("mount -t tmpfs tier /mnt/checkpoints")
    install(machine, CONFIG.format(spool="/nvme/tierd", tier="/mnt/checkpoints/tierd"))
    machine.run("set -e\n" + blocks()[1])
    assert {"mnt-checkpoints.mount", "remote-fs.target"} <= set(machine.show("tierd", "After").split())
    train(machine, "1", "disk")
    machine.run("mkdir /keep && mount --bind /mnt/checkpoints /keep && umount /mnt/checkpoints")
    train(machine, "2")
    status = "/opt/tierd/bin/tierd status --check --spool /nvme/tierd"
    machine.retry(f"{status} | grep 'has vanished: is its file system still mounted'")
    assert machine.run("ls /mnt/checkpoints").stdout == "" and manifests(machine, "/keep/tierd") == 1

    machine.run("mount --bind /keep /mnt/checkpoints")
    become(machine, "alice", "/opt/tierd/bin/tierd", "drain", "--spool", "/nvme/tierd")
    assert manifests(machine, "/mnt/checkpoints/tierd") == 2


def test_the_account_that_the_unit_names_reads_the_configuration_too(machine: Machine) -> None:
    install(machine, CONFIG.format(spool="/var/lib/tierd/spool", tier="/var/lib/tierd/tier"))
    machine.run("install -d -o tierd -g tierd /var/lib/tierd/tier && systemctl daemon-reload && systemctl start tierd")
    assert machine.show("tierd", "ActiveState") == "active"
    assert machine.run("stat -c %U /proc/$(systemctl show -P MainPID tierd)").stdout.strip() == "tierd"


@pytest.mark.parametrize("config", ["colour = 'red'", "spool ="])
def test_a_configuration_that_cannot_be_used_does_not_start_it_again_and_again(machine: Machine, config: str) -> None:
    install(machine, config)
    machine.run("systemctl daemon-reload; systemctl start tierd", ok=False)
    machine.retry("systemctl is-failed tierd")
    machine.run("sleep 4")  # RestartSec= twice
    assert (machine.show("tierd", "ActiveState"), machine.show("tierd", "NRestarts")) == ("failed", "0")
    assert machine.show("tierd", "ExecMainStatus") == "3"
    assert "tierd.toml" in machine.run("systemctl status tierd", ok=False).stdout


@pytest.mark.timeout(600)
def test_daemon_does_all_its_work_under_the_unit(machine: Machine) -> None:
    """Save, flush to a disk and to S3, prune, scrub, pause, fetch, drain; and a webhook and a command are notified."""
    with serving(Bucket()) as bucket, receiving() as hook:
        config = (
            'spool = "/nvme/tierd"\nscrub = "2s"\nrescan = "1s"\nretention = { keep_last = 1 }\n'
            '[[tier]]\nname = "disk"\nurl = "file:///mnt/checkpoints/tierd"\nretention = { keep_last = 2 }\n'
            f'[[tier]]\nname = "s3"\nurl = "{bucket.url()}"\nretention = {{ keep_last = 2 }}\n'
            f'[[notify]]\nurl = "{hook.url()}"\n'
            '[[notify]]\ncommand = ["/bin/sh", "-c", "cat >> /mnt/checkpoints/told/events"]\n'
        )
        install(machine, config)
        keys = "AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=secret\nAWS_EC2_METADATA_DISABLED=true\n"
        machine.run(f"printf %s {shlex.quote(keys)} > /etc/tierd/environment")
        machine.run("install -d -o alice -m700 /mnt/checkpoints/told")
        machine.run("set -e\n" + blocks()[1])
        said = become(machine, "alice", "/opt/tierd/bin/python", "-c", WORK)
        assert "all is well" in said.stdout, said
        status = dict(line.split(":\t") for line in machine.run(f"cat {PROC}/status").stdout.splitlines())
        assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "1", 0)
        unit = directives(UNIT)
        assert int(status["Threads"]) < int(unit["TasksMax"][0]) // 4
        assert int(status["VmHWM"].split()[0]) << 10 < size(unit["MemoryHigh"][0]) < size(unit["MemoryMax"][0])
        machine.run("systemctl stop tierd")
    assert (machine.show("tierd", "ActiveState"), machine.show("tierd", "Result")) == ("inactive", "success")
    log = machine.run("journalctl -u tierd -o cat").stdout
    assert "ended" in log and "WARNING" not in log and "ERROR" not in log, log
    lines = machine.run("cat /mnt/checkpoints/told/events").stdout.replace("}{", "}\n{").splitlines()
    reported = {json.loads(line)["what"] for line in lines}
    assert {"persisted", "durable", "pruned", "repaired"} <= reported & set(hook.what()), (reported, hook.what())
    assert machine.run("find /mnt/checkpoints/tierd ! -type l -perm /077").stdout == ""  # UMask=


@pytest.mark.timeout(600)
def test_each_account_has_a_daemon_of_its_own(machine: Machine) -> None:
    """Two instances of the template: neither account reaches the other's spool, and one's end is not the other's."""
    machine.run("useradd --create-home bob")
    machine.run(f"cd {SOURCE} && set -e\n" + blocks()[2])
    spools = {account: f"/nvme/tierd/{account}" for account in ("alice", "bob")}
    tiers = {account: f"/mnt/checkpoints/tierd/{account}" for account in spools}
    for account, spool in spools.items():
        edit(machine, CONFIG.format(spool=spool, tier=tiers[account]), account)
    machine.run("set -e\n" + blocks()[3], timeout=200)
    for account, spool in spools.items():
        unit = f"tierd@{account}"
        assert (machine.show(unit, "ActiveState"), machine.show(unit, "Slice")) == ("active", "system-tierd.slice")
        assert machine.run(f"stat -c %U /proc/$(systemctl show -P MainPID {unit})").stdout.strip() == account
        train(machine, "1,2", "disk", user=account, spool=spool)
        assert manifests(machine, tiers[account]) == 2
    strange = become(machine, "bob", "/opt/tierd/bin/tierd", "status", "--spool", spools["alice"], ok=False)
    assert strange.returncode and spools["alice"] in strange.stdout + strange.stderr, strange
    found = become(
        machine, "alice", "/opt/tierd/bin/tierd", "doctor", "--all", "--config", "/etc/tierd/alice.toml", ok=False
    )
    assert "tierd@alice.service" in found.stdout, found.stdout + found.stderr

    machine.run("systemctl stop tierd@alice")
    states = {account: machine.show(f"tierd@{account}", "ActiveState") for account in spools}
    assert states == {"alice": "inactive", "bob": "active"} and machine.show("tierd@alice", "Result") == "success"
    train(machine, "3", "disk", user="bob", spool=spools["bob"])
    assert manifests(machine, tiers["bob"]) == 3
