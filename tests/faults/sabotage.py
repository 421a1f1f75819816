"""One line of tierd made wrong at a time: an fsync, a verify, an ordering or a fence removed. Something must turn red.

Invariant: a mutant counts as killed only when what finds it is green without it, and says what was lost with it: a test
that failed, or a kit's LOST. A mutant that no longer fits the code is a loss, too.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.hands import Trial, spread
from faults.plain import PLAIN
from faults.rounds import Lost, Mutant, Round

UNIT = "mutants"
KITS = ("simulation", "power", "kills", "disk", "s3", "corruption", "hostile", "torn", "host", "watched")
ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 420.0  # seconds that what finds a mutant may take
_TRIAL_LIMIT_S = 900  # with it, and without it
_MANY = 60  # mutants, for which the tests that find them are run as whole files first
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", ".demo", ".hypothesis")


def collect() -> tuple[Mutant, ...]:
    """Every kit's mutants, and those that ordinary tests find."""
    found = tuple(mutant for kit in KITS for mutant in importlib.import_module(f"faults.{kit}").MUTANTS) + PLAIN
    assert len({mutant.name for mutant in found}) == len(found), "two mutants of one name"
    return found


MUTANTS: tuple[Mutant, ...] = ()
MET = tuple(f"by {kind}" for kind in (*KITS, "pytest"))
GATE = len(collect())
SHORT = 6  # two or three minutes


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    """Seeds stride through the mutants, so that a short round has some of every kit's."""
    mutants = collect()
    step = next(step for step in (7, 5, 3, 1) if len(mutants) % step)
    tree = work.room / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    files_green = work.trials > _MANY and _files_are_green(mutants, tree)

    def prepare() -> Trial:
        own = work.room / f"tree-{os.getpid()}"
        shutil.copytree(tree, own)

        @functools.cache
        def green(by: str) -> bool:
            return (by.startswith("pytest ") and files_green) or not _reds(by, "", own)

        def trial(seed: int) -> tuple[int, list[str]]:
            mutant = mutants[seed * step % len(mutants)]
            if not green(mutant.by):
                raise Lost(f"{mutant.by} is red without any mutant")
            with _planted(mutant, own):
                if not _reds(mutant.by, mutant.told, own):
                    raise Lost(f"mutant survived: {mutant.name} ({mutant.path}), by {mutant.by}")
            return 1, [f"by {mutant.by.split()[0]}"]

        return trial

    spread(work, prepare, deadline_s=_TRIAL_LIMIT_S, batch=1)


def _files_are_green(mutants: tuple[Mutant, ...], tree: Path) -> bool:
    """Whether every file of tests that finds a mutant is green: minutes, where one by one takes an hour."""
    files = {word.split("::")[0] for by in {one.by for one in mutants} for word in by.split() if "/test_" in word}
    command = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", *sorted(files)]
    return not subprocess.run([sys.executable, *command], cwd=tree, env=_environment(tree), check=False).returncode


@contextmanager
def _planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    path = tree / mutant.path
    source = path.read_text()
    if (number := source.count(mutant.old)) != 1:
        raise Lost(f"mutant {mutant.name} fits {number} places of {mutant.path}: write it anew")
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(source)


def _reds(by: str, told: str, tree: Path) -> bool:
    """Whether what `by` names fails in `tree`, because of what it found there, and says `told` of it."""
    what, *arguments = shlex.split(by)  # `-k 'one or another'` is one argument
    plain = what == "pytest"
    command = [*("pytest", "-q", "-x", "-p", "no:cacheprovider"), *arguments] if plain else ["faults", what, *arguments]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    if done.returncode == 0:
        return False
    if (plain and done.returncode != 1) or (not plain and "\nLOST " not in done.stdout):
        raise Lost(f"{by} did not come to an answer:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if not any(word in done.stdout for word in told.split(" | ")):
        raise Lost(f"{by} is red, but not by {told!r}:\n{done.stdout[-2000:]}")
    return True


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree / 'tests'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
