"""Launches that are forks of a process in which torch is loaded: as real as any, and without the seconds of an import.

Only loops whose fault hangs on nothing that a fork inherits are launched so: not those on the order of hashes.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from support.warm import heavy_imports, make_imports

from tierd.check import Report, check_resume, resume_check, witness
from tierd.check.launch_records import KillPoint
from tierd.check.loop_launcher import CheckedLoop, LaunchedRank, _environment


@dataclass
class _Process:
    """As much of `subprocess.Popen` as a launch needs."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Forked(CheckedLoop):
    __module__ = CheckedLoop.__module__  # its objects are alive in each launch, and are none of the user's

    def _start(self, name: str, spool: Path, rank: int, kill: KillPoint | None, port: int) -> LaunchedRank:
        files = self.home / f"{name.replace(' ', '-')}-rank-{rank}"
        record, output = files.with_suffix(".jsonl"), files.with_suffix(".out")
        orders = self._orders(spool, record, kill)
        environment = _environment(rank, self.ranks, port) | {"TMPDIR": str(self._scratch())}
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return LaunchedRank(_Process(pid), record, output)  # type: ignore[arg-type]
        code = 1
        try:
            os.setsid()
            out = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(environment)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # as an interpreter that begins; `random` does so by itself
            witness.main(msgspec.json.encode(orders).decode())
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def install() -> None:
    """Every check of this process launches so.

    What was imported until now is frozen, because each capture would go through it again: no loop made any of it.
    """
    gc.collect()
    gc.freeze()
    resume_check.CheckedLoop = Forked  # type: ignore[misc]


def check_forked(target: str, **options: Any) -> tuple[Report, list[str]]:
    """Check a loop in a process of its own, which imports once what the loop's module imports.

    Returns:
        The report, and the lines that the check told meanwhile.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_check, target, options).result()


def _check(target: str, options: dict[str, Any]) -> tuple[Report, list[str]]:
    spec = importlib.util.find_spec(target.partition(":")[0])
    assert spec is not None and spec.origin is not None
    os.environ.update(KERAS_BACKEND="torch", HF_HUB_OFFLINE="1")
    make_imports(heavy_imports(Path(spec.origin).read_text()))
    install()
    lines: list[str] = []
    return check_resume(target, on_line=lines.append, **options), lines
