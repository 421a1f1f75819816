"""Faults, and what must survive them.

    python -m faults KIND [--trials N] [--seed S]    trials of one kind
    python -m faults KIND --only S                   one trial again
    python -m faults KIND --seed S --keep FILE       goes on from what FILE keeps, if that ended at seed S - 1
    python -m faults short | gate                    a round of every kind, as `make faults` and `make gate`
    python -m faults page                            the last gate's results into docs/evidence/gate.md and fences.md

From the project's root, with `tests` on PYTHONPATH, as the Makefile's commands do it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

from faults import page
from faults.page import RESULTS
from faults.rounds import Kit, Round, joined, kept_in, missing, save, say

KINDS = (
    *("simulation", "power", "kills", "disk", "s3", "corruption", "hostile", "torn", "host", "watched", "followers"),
    *("launchers", "sabotage"),
)


def kit(kind: str) -> Kit:
    return cast(Kit, importlib.import_module(f"faults.{kind}"))


def trials(kind: str, number: int, seed: int, only: int | None = None, kept: Path | None = None) -> bool:
    """A round of one kind; whether it succeeded. What this machine cannot do fails only if it is to be kept."""
    which = kit(kind)
    if why := missing(which):
        say(f"SKIPPED {kind}: {why}")
        return kept is None
    say(f"== {kind}: {number:,} {which.UNIT} from seed {seed}" if only is None else f"== {kind}: seed {only}")
    room = Path(tempfile.mkdtemp(prefix=f"tierd-{kind}-"))
    work = Round(kind, which.UNIT, seed, number, room, only)
    try:
        which.run(work)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    before = kept_in(kept).get(kind) if kept else None
    own = {"of": which.GATE}  # how many a full round has now: of sabotage, as many as there are fences
    result = joined(before, work.result() | own)
    full = only is None and result["asked"] >= which.GATE
    if full and (unmet := [note for note in which.MET if not result["notes"].get(note)]):
        work.lost(seed, f"never happened in a full round: {', '.join(unmet)}", units=0)
        result = joined(before, work.result() | own)
    say(f"   {work.done:,} {which.UNIT}, {len(work.losses)} lost, {result['seconds']} s, {result['notes']}")
    if kept:
        save(kept, result)
    return not (work.failed or (kept and work.skipped))


def apart(kind: str, number: int, seed: int, kept: Path | None) -> bool:
    """A round in a process of its own: what one kind patches or starts is not there for the next, nor for its forks."""
    arguments = [kind, f"--trials={number}", f"--seed={seed}", *([f"--keep={kept}"] if kept else [])]
    return not subprocess.run([sys.executable, "-m", "faults", *arguments], check=False).returncode


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # a seed's order of events hangs on the order of sets
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "faults", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=[*KINDS, "short", "gate", "page"])
    parser.add_argument("--trials", type=int, help="how many; a short round's number if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--only", type=int, help="the one trial of this seed")
    parser.add_argument("--keep", type=Path, help="a JSON file that gets the result")
    given = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in tests/conftest.py
    if given.kind == "page":
        page.write({kind: kit(kind).GATE for kind in KINDS})
        return 0
    if given.kind in ("short", "gate"):
        full = given.kind == "gate"
        kept = RESULTS if full else given.keep
        failed = [
            kind for kind in KINDS if not apart(kind, kit(kind).GATE if full else kit(kind).SHORT, given.seed, kept)
        ]
        say(f"FAILED: {', '.join(failed)}" if failed else "all rounds passed")
        return bool(failed)
    number = given.trials or kit(given.kind).SHORT
    return not trials(given.kind, number, given.seed, given.only, given.keep)


if __name__ == "__main__":
    sys.exit(main())
