"""A round of trials of one kind of fault, counted, timed, and reproducible from its seeds.

Invariant: a trial's seed decides all that the trial does, so that `--only SEED` does it again, but for which of real
processes and threads is first. A loss is never retried, never filtered; a round that did fewer trials than it was asked
for says so and fails.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_SHOWN = 20  # losses that are printed and kept in full
_EVERY = 10.0  # seconds between two lines of progress


class Lost(AssertionError):
    """A promise was broken: the message says which, and what was seen."""


class Kit(Protocol):
    """What a module of `faults` holds, beside its docstring, which says what is done and what is required."""

    UNIT: str  # what is counted: "power cuts"
    SHORT: int  # how many of it in a short round
    GATE: int  # and in the full one
    MET: tuple[str, ...]  # notes that no full round is without: what else would show that it happened at all?

    def run(self, work: Round) -> None:
        """Trials for `work.seeds()`, each ended by `work.passed` or `work.lost`."""


def missing(kit: Kit) -> str | None:
    """Why a kit cannot run on this machine, as its own `missing` says; None where it can, or has no such function."""
    why: str | None = getattr(kit, "missing", lambda: None)()
    return why


@dataclass
class Round:
    """One round. `trials` counts units, of which one seed may be worth many.

    Attributes:
        room: an empty directory, removed afterwards.
        notes: how often what happened, for the page: "cuts during a prune".
        skipped: what this machine could not do; a round that is kept has none.
    """

    kind: str
    unit: str
    first: int
    trials: int
    room: Path
    only: int | None = None
    done: int = 0
    losses: list[dict[str, Any]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _reported: float = field(default_factory=time.monotonic)
    _used: int = 0

    def seeds(self) -> Iterator[int]:
        """Seeds, until enough was done or too much was lost."""
        if self.only is not None:
            yield self.only
            return
        while self.done < self.trials and len(self.losses) < _SHOWN:
            self._used += 1
            yield self.first + self._used - 1

    def passed(self, units: int = 1, *notes: str) -> None:
        self.done += units
        self.notes.update(notes)
        if time.monotonic() - self._reported > _EVERY:
            self._reported = time.monotonic()
            print(f"   {self.kind}: {self.done:,} of {self.trials:,} {self.unit}, {self._seconds:.0f} s", flush=True)

    def lost(self, seed: int, why: str | BaseException, units: int = 1) -> None:
        """A trial that broke a promise."""
        self.done += units
        said = "".join(traceback.format_exception(why)) if isinstance(why, BaseException) else why
        self.losses.append({"seed": seed, "why": said})
        print(f"LOST {self.kind} seed {seed}: {said}\n   again: python -m faults {self.kind} --only {seed}", flush=True)

    def skip(self, why: str) -> None:
        """A part of the round that cannot be done here."""
        self.skipped.append(why)
        print(f"SKIPPED in {self.kind}: {why}", flush=True)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begun

    @property
    def failed(self) -> bool:
        return bool(self.losses) or (self.only is None and self.done < self.trials)

    def result(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "unit": self.unit,
            "seeds": [self.first, self.first + self._used - 1],
            "asked": self.trials,
            "trials": self.done,
            "losses": self.losses,
            "skipped": self.skipped,
            "tierd": tree(),
            "seconds": round(self._seconds, 1),
            "notes": dict(sorted(self.notes.items())),
            "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        }


def tree() -> str | None:
    """Git's name of what `tierd/` holds; None if it is not what was committed, or this is no checkout."""
    try:
        if subprocess.check_output(["git", "status", "--porcelain", "tierd"], text=True, stderr=subprocess.DEVNULL):
            return None
        return subprocess.check_output(["git", "rev-parse", "HEAD:tierd"], text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def bound(trials: int, losses: int = 0) -> float:
    """The probability of a loss in one trial that is excluded with 95 % confidence when none was lost: 1 - 0.05^(1/n).

    Trials must be independent of each other: seeds, not what one of them is counted for.

    Source: Clopper-Pearson with no events; 3/n, the rule of three, for large n.
    """
    if losses:
        raise ValueError("a bound is given for no losses only")
    return float(1 - 0.05 ** (1 / trials))


def kept_in(path: Path) -> dict[str, dict[str, Any]]:
    """The results that are kept, by kind."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def joined(kept: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """A round and the one that it goes on from: of the same committed tierd/ and of as many trials, which ended at the
    seed before with no loss and nothing skipped. Else the round alone. So a long round may be played in pieces."""
    if (
        kept is None
        or kept["tierd"] is None
        or kept["tierd"] != result["tierd"]
        or kept.get("of") != result.get("of")
        or kept["seeds"][1] + 1 != result["seeds"][0]
        or kept["losses"]
        or kept["skipped"]
    ):
        return result
    sums = {name: kept[name] + result[name] for name in ("asked", "trials")}
    notes = Counter(kept["notes"]) + Counter(result["notes"])
    seconds = round(kept["seconds"] + result["seconds"], 1)
    seeds = [kept["seeds"][0], result["seeds"][1]]
    return result | sums | {"notes": dict(sorted(notes.items())), "seconds": seconds, "seeds": seeds}


def save(path: Path, result: dict[str, Any]) -> None:
    """Keep a round's result beside those of other kinds."""
    path.write_text(json.dumps(dict(sorted((kept_in(path) | {result["kind"]: result}).items())), indent=2) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
