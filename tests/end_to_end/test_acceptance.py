"""The whole of it as processes that are killed: a daemon, a trainer, SIGKILL at random moments, and nothing is lost.

Judged from outside: what `wait("local")` acknowledged to the trainer stands in a log that tierd knows nothing of.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.nursery import context as nursery
from support.trainer import lines, main
from support.training import same, tensors
from support.waiting import wait_until
from support.world import Daemon, commit, part

import tierd
from tierd.core.errors import DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.timeout(400)

KILLS = int(os.environ.get("TIERD_KILLS", "12"))  # of two seeds together; `make gate` has twice as many


def start_daemon(spool: Path, tier: Path, *options: str) -> subprocess.Popen:
    """`tierd run` as a process, once it answers."""
    tier.mkdir(exist_ok=True)
    log = (spool.parent / "daemon.log").open("ab")
    command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool), "--to", f"file://{tier}", *options]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    log.close()
    wait_until(lambda: process.poll() is not None or answers(spool))
    return process


def trainers(spool: Path) -> int | None:
    """How many trainers are attached to the daemon; None where none answers."""
    try:
        with DaemonConnection(Spool(spool)) as link:
            return link.ask(StatusRequest(), 60)["status"]["trainers"]
    except DaemonUnavailable:
        return None


def answers(spool: Path) -> bool:
    return trainers(spool) is not None


def end(process: subprocess.Popen, number: int = signal.SIGKILL, timeout: float = 60) -> int:
    if process.poll() is None:
        process.send_signal(number)
    return process.wait(timeout)


def start_trainer(*arguments, **options):
    process = nursery.Process(target=main, args=tuple(map(str, arguments[:2])) + arguments[2:], kwargs=options)
    process.start()
    return process


def from_the_tier(tier: Path, spool: Path) -> int:
    """The step that a replaced node restores; its tensors are compared bit for bit."""
    state = tensors(10**6)
    with Daemon(spool, lambda: {"file": FileStore(tier)}), tierd.Checkpointer(spool, "run") as checkpointer:
        found = checkpointer.restore(state)
    assert found is not None and same(state, found.step) and found.skipped == ()
    return found.step


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_acknowledged_is_ever_lost(tmp_path, seed):
    """SIGKILL of the trainer and of the daemon, at random moments of a trainer that does nothing but save."""
    noise = random.Random(seed)
    spool, tier, log = tmp_path / "spool", tmp_path / "tier", str(tmp_path / "log")
    Spool(spool)
    daemon, killed, promised = start_daemon(spool, tier), 0, -1
    try:
        while killed < KILLS // 2:
            if daemon.poll() is not None and (promised < 0 or noise.random() < 0.7):
                daemon = start_daemon(spool, tier)
            launches = sum(words[0] == "resumed" for words in lines(log))
            trainer = start_trainer(spool, log, 10**6)
            here = f"seed {seed}, kill {killed}"

            def resumed(trainer=trainer, launches=launches):
                return not trainer.is_alive() or sum(words[0] == "resumed" for words in lines(log)) > launches

            if noise.random() < 0.8:  # else it is killed while it starts, or restores
                wait_until(resumed)
            time.sleep(noise.random() * 0.4)
            if noise.random() < 0.4 and daemon.poll() is None:
                end(daemon)
                killed += 1
                time.sleep(noise.random() * 0.3)
            trainer.kill()
            trainer.join(60)
            assert trainer.exitcode == -signal.SIGKILL, f"{here}: it ended by itself: {lines(log)[-3:]}"
            killed += 1
            for words in lines(log):
                assert words[0] in ("resumed", "acked"), f"{here}: {words}"
                if words[0] == "acked":
                    promised = max(promised, int(words[1]))
            check_resumes(lines(log), here)
        if daemon.poll() is not None:
            daemon = start_daemon(spool, tier)
        trainer = start_trainer(spool, log, 3)
        trainer.join(60)
        assert trainer.exitcode == 0 and lines(log)[-1][0] == "acked"
        check_resumes(lines(log), f"seed {seed}, at the end")
        last = int(lines(log)[-1][1])
        assert last > promised > 0
        assert end(daemon, signal.SIGTERM) == 0
    finally:
        end(daemon)
    shutil.rmtree(spool)
    assert from_the_tier(tier, tmp_path / "replaced") == last


def check_resumes(log: list[list[str]], here: str) -> None:
    """Every launch resumed from the last step that was acknowledged, or from a later one that was durable as well."""
    promised = -1
    for words in log:
        if words[0] == "resumed":
            assert int(words[1]) >= promised, f"{here}: step {promised} was acknowledged, and step {words[1]} resumed"
        elif words[0] == "acked":
            assert int(words[1]) > promised
            promised = int(words[1])


def test_the_judge_can_see_a_loss():
    with pytest.raises(AssertionError, match="step 4 was acknowledged"):
        check_resumes([["resumed", "-1"], ["acked", "4"], ["resumed", "3"]], "here")


def test_sigterm_drains_and_ends_with_zero(tmp_path):
    spool = Spool(tmp_path / "spool")
    daemon = start_daemon(spool.root, tmp_path / "tier", "--keep-last", "30")
    try:
        for step in range(20):
            commit(spool, part(step))
        begun = time.monotonic()
        assert end(daemon, signal.SIGTERM) == 0
        assert time.monotonic() - begun < 60
    finally:
        end(daemon)
    assert len(list((tmp_path / "tier" / "run" / "manifests").iterdir())) == 20
    assert not spool.socket.exists()


def test_second_daemon_on_a_spool_is_refused_and_names_the_first(tmp_path):
    spool = tmp_path / "spool"
    Spool(spool)
    daemon = start_daemon(spool, tmp_path / "tier")
    try:
        command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool), "--to", f"file://{tmp_path / 'tier'}"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=150)
        assert second.returncode == 7
        assert f"pid {daemon.pid})" in second.stderr and "Traceback" not in second.stderr
        assert daemon.poll() is None and answers(spool)
    finally:
        assert end(daemon, signal.SIGTERM) == 0


def gone(pid: int) -> bool:
    """Whether a process has ended, even where nobody has collected it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_daemon_started_by_a_trainer_outlives_it_until_all_is_flushed(tmp_path, seed):
    spool, tier, log = tmp_path / "spool", tmp_path / "tier", str(tmp_path / "log")
    Spool(spool)
    tier.mkdir()
    noise = random.Random(seed)
    trainer = start_trainer(spool, log, 10**6, [f"file://{tier}"], 1)
    try:
        wait_until(lambda: sum(words[0] == "acked" for words in lines(log)) >= 2)
        time.sleep(noise.random())
        pid = int((spool / ".tierd" / "lock").read_text())
        assert pid != trainer.pid and not gone(pid)
        if seed == 2:  # killed itself, it is replaced by the next save
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: gone(pid) and (spool / ".tierd" / "lock").read_text().strip() not in ("", str(pid)))
            wait_until(lambda: trainers(spool) == 1)  # one that no trainer attached to waits two minutes for it
            pid = int((spool / ".tierd" / "lock").read_text())
    finally:
        trainer.kill()
        trainer.join(60)
    assert trainer.exitcode == -signal.SIGKILL
    wait_until(lambda: gone(pid))
    last = max(int(words[1]) for words in lines(log) if words[0] == "acked")
    shutil.rmtree(spool)
    assert from_the_tier(tier, tmp_path / "replaced") >= last


def test_several_ranks_may_start_the_single_daemon_at_the_same_moment(tmp_path):
    (tmp_path / "tier").mkdir()
    code = (
        "import sys, torch, tierd\n"
        "rank = int(sys.argv[1])\n"
        f"spool, tier = '{tmp_path}/spool', 'file://{tmp_path}/tier'\n"
        "with tierd.Checkpointer(spool, f'run-{rank}', to=[tier]) as ckpt:\n"
        "    ckpt.save(1, {'x': torch.ones(10)}).wait('file', timeout=60)\n"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.PIPE) for rank in range(4)]
    said = [rank.communicate(timeout=250)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert len(list((tmp_path / "tier").glob("run-*/manifests/*/*.json"))) == 4
