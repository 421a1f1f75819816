"""One fence of tierd is taken down at a time (`fences/`): an fsync, an order, a comparison. Something must find it.

Invariant: a fence counts as found only if the run that finds it is green while the fence stands, and says what was lost
without it: a test that failed, or a kit's LOST. A fence that no longer fits the code is a loss, too.
"""

from __future__ import annotations

import compileall
import functools
import importlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import cast

from faults import rounds
from faults.fences import Fence, collect, planted
from faults.fences.edits import Misfit
from faults.hands import Trial, spread
from faults.rounds import Kit, Lost, Round
from support.warm import WarmInterpreter

UNIT = "fences"
KITS = ("simulation", "power", "kills", "disk", "s3", "corruption", "hostile", "torn", "host", "watched")
ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 420.0  # that a run which finds a fence may take
_TRIAL_LIMIT_S = 900  # with it, and without it
# What most tests load, and no module of tierd or of its tests: each run reads these as they are then.
_IMPORTS = """
import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch._dynamo, torchdata.stateful_dataloader, numpy
import pytest, hypothesis, aiobotocore.session, aiohttp, cryptography.hazmat.primitives.ciphers.aead, typer.testing
import xxhash, zstandard, watchdog.observers, safetensors
"""
_PYTEST = "import os, sys, pytest; os.chdir(sys.argv[1]); sys.exit(pytest.main(sys.argv[2:]))"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", ".demo", ".hypothesis")


MET = tuple(f"by {kind}" for kind in (*KITS, "pytest"))
GATE = len(collect())
SHORT = 4  # a minute or two


def stride(number: int) -> int:
    """A step that visits each of so many fences once, and spreads the first few evenly over all."""
    return next(step for step in range(round(number * 0.618), number + 1) if math.gcd(step, number) == 1)


def missing() -> str | None:
    """What a kit lacks here, because a kit that plays nothing finds nothing."""
    reasons = ((kit, rounds.missing(cast(Kit, importlib.import_module(f"faults.{kit}")))) for kit in KITS)
    return next((f"{kit}: {why}" for kit, why in reasons if why), None)


def run(work: Round) -> None:
    """Seeds stride through the fences by the golden ratio, so that a short round has some of every subject."""
    fences = collect()
    step = stride(len(fences))
    tree = work.room / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
    # Bytecode goes by content, because a changed file may have the size and the second of the one that it replaces.
    for folder in ("tierd", "tests"):
        compileall.compile_dir(tree / folder, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)

    def prepare() -> Trial:
        own = work.room / f"tree-{os.getpid()}"
        shutil.copytree(tree, own)
        warm = WarmInterpreter(_IMPORTS, _environment(own))

        @functools.cache
        def green(by: str) -> bool:
            return not _reds(by, "", own, warm)

        def trial(seed: int) -> tuple[int, list[str]]:
            fence = fences[seed * step % len(fences)]
            if not green(fence.by):
                raise Lost(f"{fence.by} is red while every fence stands")
            with _down(fence, own):
                if not _reds(fence.by, fence.reported, own, warm):
                    raise Lost(f"nobody noticed: {fence.name} ({fence.function}), by {fence.by}")
            return 1, [f"by {fence.by.split()[0]}", f"found: {fence.name}"]

        return trial

    spread(work, prepare, deadline_s=_TRIAL_LIMIT_S, batch=1)


@contextmanager
def _down(fence: Fence, tree: Path) -> Iterator[None]:
    """Within the block `tree` is without the fence."""
    try:
        path, text = planted(fence, tree)
    except Misfit as error:
        raise Lost(str(error)) from None
    source = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(source)


def _reds(by: str, reported: str, tree: Path, warm: WarmInterpreter) -> bool:
    """Whether what `by` names fails in `tree`, because of what it found there, and says `reported` of it."""
    what, *arguments = shlex.split(by)  # `-k 'one or another'` is one argument
    plain = what == "pytest"
    if plain:
        status, said = _pytest(arguments, tree, warm)
    else:
        command = [sys.executable, "-m", "faults", what, *arguments]
        done = subprocess.run(
            command,
            cwd=tree,
            env=_environment(tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        status, said = done.returncode, done.stdout
    if status == 0:
        return False
    if (plain and status != 1) or (not plain and "\nLOST " not in said):
        raise Lost(f"{by} did not come to an answer:\n{said[-4000:]}")
    if not any(word in said for word in reported.split(" | ")):
        raise Lost(f"{by} is red, but not by {reported!r}:\n{said[-4000:]}")
    return True


def _pytest(arguments: list[str], tree: Path, warm: WarmInterpreter) -> tuple[int, str]:
    """The exit status of pytest in `tree`, and all that it wrote."""
    output = tree.parent / f"{tree.name}.output"
    output.unlink(missing_ok=True)
    options = [str(tree), "-q", "-x", "-p", "no:cacheprovider", *arguments]
    status = warm.wait(warm.start(_PYTEST, options, output), _LIMIT_S)
    if status == -signal.SIGKILL:
        raise subprocess.TimeoutExpired(["pytest", *arguments], _LIMIT_S)
    return status, output.read_text(errors="replace")


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree / 'tests'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
