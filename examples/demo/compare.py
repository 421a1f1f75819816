"""What the training logs say, and whether two runs were the same.

Invariant: equal means every bit: losses and learning rates as hexadecimal floats, sample numbers in order, the digest
of the final parameters. Anything missing is a difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Saved:
    """A checkpoint as its trainer logged it."""

    step: int
    attempt: str
    at: datetime

    @property
    def name(self) -> str:
        """`<step:012>.<attempt>`, its directory in the spool and its prefix on a tier."""
        return f"{self.step:012}.{self.attempt}"


@dataclass
class Launch:
    """One launch of the trainer, read from its log."""

    name: str
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    saves: list[Saved] = field(default_factory=list)
    resumed: dict[str, Any] | None = None
    skipped: list[dict[str, Any]] = field(default_factory=list)
    final: str | None = None
    failed_saves: int = 0

    @property
    def last(self) -> int:
        """The last step that was logged; 0 before the first."""
        return max(self.steps, default=0)

    def loss(self, step: int) -> float:
        return float.fromhex(self.steps[step]["loss"])


def read(name: str, path: Path) -> Launch:
    """Read a launch's log as far as it goes: no file yet is an empty launch, a line without its end is not there."""
    launch = Launch(name)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "step" in entry:
            launch.steps[entry.pop("step")] = entry
        elif "saved" in entry:
            launch.saves.append(Saved(entry["saved"], entry["attempt"], datetime.fromisoformat(entry["at"])))
        elif "resumed" in entry:
            launch.resumed, launch.skipped = entry["resumed"], entry.get("skipped", [])
        elif "final" in entry:
            launch.final, launch.failed_saves = entry["final"], entry["failed_saves"]
    return launch


def difference(reference: Launch, launches: Iterable[Launch]) -> str | None:
    """The first step at which a launch differs from the reference, and in what; None when all is equal.

    Each launch is compared in every step it made. So steps that were replayed are equal in all launches that made them.
    The last launch ended the run: its final digest counts.
    """
    launches = list(launches)
    made = {step for launch in launches for step in launch.steps}
    for step in sorted(reference.steps.keys() | made):
        if step not in made:
            return f"step {step} was never made"
        for launch in launches:
            if step in launch.steps and launch.steps[step] != reference.steps.get(step):
                return _explain(step, reference, launch)
    if reference.final is None or launches[-1].final != reference.final:
        return f"the final parameters: sha256 {reference.final} ({reference.name}), {launches[-1].final}"
    return None


def _explain(step: int, reference: Launch, launch: Launch) -> str:
    if step not in reference.steps:
        return f"step {step} is not in the {reference.name}"
    wanted, got = reference.steps[step], launch.steps[step]
    names = [name for name in wanted if wanted[name] != got.get(name)] or [name for name in got if name not in wanted]
    both = "; ".join(f"{name} {wanted.get(name)} against {got.get(name)}" for name in names)
    return f"step {step}, {reference.name} against {launch.name}: {both}"
