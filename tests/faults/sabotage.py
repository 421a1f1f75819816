"""One line of tierd made wrong at a time: an fsync, a verify, an ordering or a fence removed. Something must turn red.

Law: a mutant counts as killed only when what finds it is green without it, and says what was lost with it: a test that
failed, or a kit's LOST. A mutant that no longer fits the code is a loss, too.
"""

from __future__ import annotations

import compileall
import importlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from faults.plain import PLAIN
from faults.rounds import Lost, Mutant, Round

UNIT = "mutants"
KITS = ("simulation", "power", "kills", "disk", "s3", "corruption", "hostile", "torn", "host")
ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 420.0  # seconds that what finds a mutant may take
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", ".demo", ".hypothesis")


def collect() -> tuple[Mutant, ...]:
    """Every kit's mutants, and those that ordinary tests find."""
    found = tuple(mutant for kit in KITS for mutant in importlib.import_module(f"faults.{kit}").MUTANTS) + PLAIN
    assert len({mutant.name for mutant in found}) == len(found), "two mutants of one name"
    return found


MUTANTS: tuple[Mutant, ...] = ()
MET = tuple(f"by {kind}" for kind in (*KITS, "pytest"))
GATE = len(collect())
SHORT = GATE // 19  # ten minutes


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    """Seeds stride through the mutants, so that a short round has some of every kit's. As many at once as there are
    cores, each in a tree of its own."""
    seeds, lock = itertools.islice(work.seeds(), work.trials), threading.Lock()
    green = Green()

    def worker(number: int) -> None:
        tree = work.room / f"tree{number}"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        for part in ("tierd", "tests"):  # else each of thousands of processes compiles all of it
            compileall.compile_dir(tree / part, quiet=2)
        while True:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            try:
                mutant = _trial(seed, tree, green)
            except Exception as error:
                with lock:
                    work.lost(seed, error)
            else:
                with lock:
                    work.passed(1, f"by {mutant.by.split()[0]}")

    workers = min(work.trials, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(worker, range(workers)))


class Green:
    """What is green without any mutant, each asked once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Future[bool]] = {}

    def __call__(self, by: str, tree: Path) -> bool:
        with self._lock:
            is_known, found = by in self._found, self._found.setdefault(by, Future())
        if not is_known:
            try:
                found.set_result(not _reds(by, "", tree))
            except Exception as error:
                found.set_exception(error)
        return found.result()


def _trial(seed: int, tree: Path, green: Green) -> Mutant:
    mutants = collect()
    step = next(step for step in (7, 5, 3, 1) if len(mutants) % step)
    mutant = mutants[seed * step % len(mutants)]
    if not green(mutant.by, tree):
        raise Lost(f"{mutant.by} is red without any mutant")
    with _planted(mutant, tree):
        if not _reds(mutant.by, mutant.told, tree):
            raise Lost(f"mutant survived: {mutant.name} ({mutant.path}), by {mutant.by}")
    return mutant


@contextmanager
def _planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    path = tree / mutant.path
    source = path.read_text()
    if (number := source.count(mutant.old)) != 1:
        raise Lost(f"mutant {mutant.name} fits {number} places of {mutant.path}: write it anew")
    path.write_text(source.replace(mutant.old, mutant.new))
    if path.suffix == ".py":  # it goes by size and whole seconds
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    try:
        yield
    finally:
        path.write_text(source)


def _reds(by: str, told: str, tree: Path) -> bool:
    """Whether what `by` names fails in `tree`, because of what it found there, and says `told` of it."""
    what, *arguments = by.split()
    plain = what == "pytest"
    command = [*("pytest", "-q", "-x", "-p", "no:cacheprovider"), *arguments] if plain else ["faults", what, *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'tests'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=_LIMIT
    )
    if done.returncode == 0:
        return False
    if (plain and done.returncode != 1) or (not plain and "\nLOST " not in done.stdout):
        raise Lost(f"{by} did not come to an answer:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if not any(word in done.stdout for word in told.split(" | ")):
        raise Lost(f"{by} is red, but not by {told!r}:\n{done.stdout[-2000:]}")
    return True
