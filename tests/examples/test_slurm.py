"""The scripts for SLURM, over stand-ins for Slurm's and systemd's commands. The commands of tierd in them are real."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import wait_until
from support.world import commit, part

from tierd.core.config import from_toml
from tierd.core.retention.policy import parse_duration
from tierd.spool.spool import Spool

ROOT = Path(__file__).parent.parent.parent
SLURM = ROOT / "examples" / "slurm"
SCRIPTS = ("prolog.sh", "epilog.sh", "train.sbatch")
JOB = "4711"
ACCOUNT = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
TIERD = f'exec {sys.executable} -m tierd "$@"\n'
SRUN = f"exec {sys.executable} {ROOT}/tests/support/srun.py 2 0"

# What each command of the node does here. HOME is the test's directory.
STAND_INS = {
    "tierd": TIERD,
    "python": f'exec {sys.executable} "$@"\n',
    "runuser": '[ "$1 $2 $3" = "-u $SLURM_JOB_USER --" ] && shift 3 && exec "$@"\n',
    "logger": 'echo "$*" >> $HOME/noted\n',
    "scontrol": 'echo "$*" >> $HOME/asked\n[ "$1 $2" != "show hostnames" ] || echo 127.0.0.1\n',
    "srun": f'[ "$1" = --kill-on-bad-exit=1 ] && shift && {SRUN} "$@"\n',
    "systemctl": """case $1 in
start | stop) echo "$*" >> $HOME/units ;;
esac
case $1 in
start)
  [ ! -e $HOME/pid ] || exit 0
  tierd run --config $HOME/etc/${2#tierd@}.toml > $HOME/log 2>&1 &
  echo $! > $HOME/pid ;;
stop) kill $(cat $HOME/pid); rm $HOME/pid ;;
esac
""",
}


class Node:
    """A node of a cluster below one directory: /nvme and /etc/tierd are there."""

    def __init__(self, home: Path) -> None:
        self.home, self.job = home, JOB
        for name in ("bin", "etc", "nvme", "tier"):
            (home / name).mkdir()
        for name, text in STAND_INS.items():
            self.stand_in(name, text)
        template = (SLURM / "account.toml.in").read_text()
        url = f"file://{home}/tier"
        assert template.count("s3://my-bucket/@ACCOUNT@?region=eu-central-1") == 1
        text = template.replace("s3://my-bucket/@ACCOUNT@?region=eu-central-1", url).replace("/nvme", f"{home}/nvme")
        (home / "etc" / "account.toml.in").write_text(text)

    def stand_in(self, name: str, text: str) -> None:
        path = self.home / "bin" / name
        path.write_text("#!/bin/bash\n" + text)
        path.chmod(0o755)

    def script(self, name: str, *changes: tuple[str, str]) -> Path:
        """A copy of a script with this node's places in it."""
        text = (SLURM / name).read_text()
        places = {"/nvme": "nvme", "/etc/tierd": "etc", "/run/tierd-jobs": "jobs"}
        for old, new in (*((it, f"{self.home}/{name}") for it, name in places.items()), *changes):
            text = text.replace(old, new)
        path = self.home / name
        path.write_text(text.replace("PATH=/opt/tierd/bin:", f"PATH={self.home}/bin:"))
        return path

    @property
    def environment(self) -> dict[str, str]:
        slurm = {"SLURM_JOB_USER": ACCOUNT, "SLURM_JOB_ID": self.job, "USER": ACCOUNT}
        return {**os.environ, "HOME": str(self.home), "PYTHONPATH": f"{ROOT}:{ROOT}/tests", **slurm}

    def run(self, name: str, *changes: tuple[str, str]) -> int:
        command = ["bash", str(self.script(name, *changes))]
        return subprocess.run(command, env=self.environment, timeout=200, check=False).returncode

    def read(self, name: str) -> str:
        path = self.home / name
        return path.read_text() if path.exists() else ""

    @property
    def spool(self) -> Path:
        return self.home / "nvme" / "tierd" / ACCOUNT

    @property
    def flushed(self) -> int:
        return len(list(self.home.glob("tier/*/manifests/*/*.json")))

    def end(self) -> None:
        if pid := self.read("pid"):
            os.kill(int(pid), signal.SIGTERM)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    try:
        yield found
    finally:
        found.end()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_it(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(SLURM / name)], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool((SLURM / name).stat().st_mode & stat.S_IXUSR) == name.endswith(".sh"), "Slurm executes a prolog"


@pytest.mark.timeout(600)
def test_a_job_finds_a_daemon_and_leaves_with_all_flushed(node: Node) -> None:
    assert node.run("prolog.sh") == 0, node.read("noted")
    assert stat.S_IMODE(node.spool.stat().st_mode) == 0o700
    config = from_toml(node.read(f"etc/{ACCOUNT}.toml"), "written by the prolog")
    assert config.spool == str(node.spool)
    wait_until(lambda: (node.spool / ".tierd" / "control.sock").exists())
    node.job = "4712"
    assert node.run("prolog.sh") == 0 and node.read("units") == f"start tierd@{ACCOUNT}\n" * 2

    commit(Spool(node.spool), part(1))
    assert node.run("epilog.sh") == 0 and node.flushed == 1
    assert "stop" not in node.read("units"), "another job of the account runs here"
    commit(Spool(node.spool), part(2))
    node.job = JOB
    assert node.run("epilog.sh") == 0 and node.flushed == 2
    assert node.read("units").endswith(f"stop tierd@{ACCOUNT}\n")
    assert (node.read("noted"), node.read("asked")) == ("", ""), "no command of Slurm is called by either"


@pytest.mark.timeout(600)
def test_epilog_with_an_unusable_tier_drains_no_node_and_stops_no_daemon(node: Node) -> None:
    (node.home / "tier").rmdir()
    assert node.run("prolog.sh") == 0
    wait_until(lambda: (node.spool / ".tierd" / "control.sock").exists())
    commit(Spool(node.spool), part(1))
    assert node.run("epilog.sh", ("--deadline 4m", "--deadline 2s")) == 0
    assert "stop" not in node.read("units") and f"job {JOB} of {ACCOUNT}" in node.read("noted")


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (10, 0), (11, 1), (6, 0)])
def test_prolog_drains_a_node_only_when_no_job_could_train_with_it(node: Node, code: int, expected: int) -> None:
    node.stand_in("tierd", f"echo the disk is read-only; exit {code}\n")
    node.stand_in("systemctl", "exit 1\n")
    assert node.run("prolog.sh") == expected
    assert ("the disk is read-only" in node.read("noted")) == (code == 11)
    assert "no daemon" in node.read("noted")


def test_a_node_without_its_disk_is_drained(node: Node) -> None:
    (node.home / "nvme" / "tierd").touch()
    assert node.run("prolog.sh") == 1 and "no spool" in node.read("noted")


def test_the_time_before_the_limit_is_the_same_in_script_and_page() -> None:
    script = (SLURM / "train.sbatch").read_text()
    (before,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.M)
    assert f"# {before} s before the time limit" in script
    deadline = re.findall(r"--deadline (\w+)", (SLURM / "epilog.sh").read_text())
    assert [parse_duration(it) for it in deadline] == [240.0]


def lines(path: Path) -> list[str]:
    return re.findall(r"^step \d+ from \d+$", path.read_text(), re.M)


@pytest.mark.timeout(900)
def test_a_job_near_its_limit_saves_is_queued_again_and_continues(node: Node) -> None:
    """Two ranks, which get the signal at different moments, save the same step."""
    environment = {**node.environment, "PATH": f"{node.home}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"SLURM_JOB_NODELIST": "node-1", "TRAIN": str(SLURM / "train.py"), "STEPS": "10000000"}
    command, said = ["bash", str(node.script("train.sbatch"))], node.home / "said"

    def started() -> subprocess.Popen[bytes]:
        with said.open("w") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    assert node.run("prolog.sh") == 0
    wait_until(lambda: (node.spool / ".tierd" / "control.sock").exists())
    job = started()
    try:
        end = time.monotonic() + 400
        while len(lines(said)) < 20:
            assert job.poll() is None and time.monotonic() < end, said.read_text()[-2000:]
            time.sleep(0.2)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(400) == 0, said.read_text()[-2000:]
    finally:
        job.kill()
    last = int(lines(said)[-1].split()[1])
    assert node.read("asked") == f"show hostnames node-1\nrequeue {JOB}\n"
    assert last in {one.checkpoint.step for one in Spool(node.spool).parts()}

    environment["STEPS"] = str(last + 3)
    assert started().wait(400) == 0, said.read_text()[-2000:]
    assert lines(said) == [f"step {last + number} from {last + 1}" for number in (1, 2, 3)]
    assert node.read("asked").count("requeue") == 1, "it has ended, and is not queued again"
