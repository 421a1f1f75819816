"""What surrounds a process: its locale, its limits, its umask, and the bytes of a path."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.world import commit, part

import tierd
from tierd.cli import run
from tierd.core.errors import SpoolUnusable, TierdError, is_exhausted
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

_PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_TRAIN = """
import sys
import torch, tierd
spool, tier = sys.argv[1:]
ckpt = tierd.Checkpointer(spool, run="r", to=[f"file://{tier}"])
state = {"w": torch.arange(1000.0)}
ckpt.save(1, state).wait("file", timeout=100)
with ckpt.stage(2) as directory:
    (directory / "deep").mkdir()
    (directory / "deep" / "file").write_bytes(b"theirs")
state["w"].zero_()
print(ckpt.restore(state, step=1).step, state["w"].sum().item(), flush=True)
ckpt.close(wait="file", timeout=100)
"""

# The daemon, and at its end the most address space that it had, in kB.
_PEAK = """
import atexit
from tierd.__main__ import main
atexit.register(lambda: print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmPeak"))))
main()
"""


def python(
    *arguments: str, environment: Mapping[str, str] = {}, umask: int = 0o022
) -> subprocess.CompletedProcess[str]:
    """Python as a process of its own, with the variables of this environment that name no locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, **environment},
        umask=umask,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=200,
    )


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir(mode=0o755)
    return tmp_path / "tier"


# -- a path's bytes, and the locale -----------------------------------------------------------------------------------


def test_a_path_that_is_no_utf8_is_refused_in_one_line(tmp_path: Path, tier: Path) -> None:
    spool = os.fsdecode(os.fsencode(tmp_path) + b"/sp\xff")
    with pytest.raises(SpoolUnusable, match=r"sp\\xff': it is no UTF-8: name another"):
        tierd.Checkpointer(spool, "r", to=[])
    done = python("-m", "tierd", "run", "--spool", spool, "--to", f"file://{tier}")
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and "sp\\xff" in done.stderr
    assert not os.path.exists(spool)


def test_a_path_that_only_the_locale_cannot_say_names_the_way_out(tmp_path: Path, tier: Path) -> None:
    spool = f"{tmp_path}/größe"
    done = python("-m", "tierd", "run", "--spool", spool, "--to", f"file://{tier}", environment=_PLAIN_C)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and "PYTHONUTF8=1" in done.stderr


@pytest.mark.parametrize("command", [["ls"], ["status"], ["show", "run", "3"], ["--help"], ["ls", "--json"]])
def test_the_plain_c_locale_is_no_reason_to_fail(tmp_path: Path, tier: Path, command: list[str]) -> None:
    spool = Spool(tmp_path / "spool")
    for step, origin in ((3, None), (4, part(3).checkpoint)):
        commit(spool, part(step, launch=step - 2), origin=origin)
    where = [] if command == ["--help"] else ["--spool", str(spool.root)]
    done = python("-m", "tierd", *command, *where, environment=_PLAIN_C)
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout
    assert done.returncode == (6 if command == ["status"] else 0), done.stderr  # no daemon runs


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_daemon_works_in_700_mb_of_address_space(tmp_path: Path, tier: Path) -> None:
    """And takes far less. With a stack of 8 MiB and a heap of 64 MiB per thread it takes all that there is, and whether
    it works then depends on which thread comes first."""
    spool = Spool(tmp_path / "spool")
    for step in range(4):
        commit(spool, part(step))
    command = [sys.executable, "-c", _PEAK, "run", "--until-idle", "--spool", str(spool.root), "--to", f"file://{tier}"]
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 700000; exec {shlex.join(command)}"],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # whose buffers grow with the number of cores
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "thread" not in done.stderr
    assert len(list((tier / "run" / "manifests").iterdir())) == 3
    assert int(done.stdout.splitlines()[-1]) < 450_000, "kB; 275,576 on two cores, and 696,000 with the usual sizes"


def test_a_daemon_without_memory_or_threads_says_so_in_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise ExceptionGroup("two lanes", [ValueError("another"), RuntimeError("can't start new thread")])

    monkeypatch.setattr("tierd.cli.commands.daemon_commands.serve", nothing)
    assert run(["run", "--spool", str(tmp_path / "spool"), "--to", f"file://{tmp_path}"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tierd: no more memory or threads") and "ulimit -v" in last


def test_errors_of_exhaustion_are_recognised() -> None:
    assert is_exhausted(MemoryError()) and is_exhausted(RuntimeError("can't start new thread"))
    assert is_exhausted(OSError(errno.ENOMEM, "no memory"))
    assert not is_exhausted(RuntimeError("another")) and not is_exhausted(TierdError("thread"))
    assert not is_exhausted(ExceptionGroup("", [ValueError()]))


# -- the umask --------------------------------------------------------------------------------------------------------


def modes(root: Path) -> Iterator[tuple[Path, int]]:
    for path in (root, *root.rglob("*")):
        yield path, path.lstat().st_mode


@pytest.mark.timeout(300)
def test_spool_and_tier_are_closed_to_others_under_any_umask(tmp_path: Path) -> None:
    spool, tier = tmp_path / "above" / "spool", tmp_path / "tier"
    tier.mkdir()
    tier.chmod(0o777)
    done = python("-c", _TRAIN, str(spool), str(tier), umask=0)
    assert done.stdout == "1 499500.0\n", done.stderr[-2000:]
    assert stat.S_IMODE(spool.parent.stat().st_mode) & 0o022 == 0, "who may write there may replace the spool"
    theirs = {"deep", "file"}  # what another library made, behind directories that are closed
    wide = [(path, oct(mode)) for path, mode in modes(spool) if mode & 0o077 and path.name not in theirs]
    assert wide == []
    assert [(path, oct(mode)) for path, mode in modes(tier) if mode & 0o077 and path != tier] == []
    assert stat.S_IMODE(tier.stat().st_mode) == 0o777, "the root is whose it is"


@pytest.mark.parametrize(
    ("umask", "files", "directories"), [(0, 0o660, 0o770), (0o022, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_a_tier_whose_root_a_group_shares_is_the_groups_as_far_as_the_umask_lets(
    tmp_path: Path, umask: int, files: int, directories: int
) -> None:
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(0o2770)

    async def put() -> None:
        store = FileStore(root)
        await store.put("run/chunks/one", b"data")
        await store.aclose()

    before = os.umask(umask)
    try:
        asyncio.run(put())
    finally:
        os.umask(before)
    found = {path.name: mode for path, mode in modes(root) if path != root}
    assert stat.S_IMODE(found["one"]) == files
    assert {mode & 0o777 for mode in found.values() if stat.S_ISDIR(mode)} == {directories}
