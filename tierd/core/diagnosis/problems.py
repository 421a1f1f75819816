"""A problem of a running daemon, and the next step for each kind: the one source of these texts for `status`, `top` and
the page.

Invariant: every problem has a command that can be run as it stands, because its places are quoted for a shell.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tierd.core.diagnosis.findings import FINDINGS

Severity = Literal["alert", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong now.

    Attributes:
        severity: `alert`: somebody has to act, or checkpoints may be lost; `warning`: look at it in working hours.
        place: `local`, a tier, or a receiver of events.
        why: for people.
        do: what to do, for people; empty: `command` says it, or `why` does.
        command: the next command, for a shell on the node.
    """

    severity: Severity
    place: str
    why: str
    do: str = ""
    command: str = ""


class NextStep(NamedTuple):
    """What to do about a kind of problem. `command` names the places that it needs in braces."""

    do: str
    command: str


NEXT_STEPS: dict[str, NextStep] = {
    "tier": NextStep("Try the tier, which names the cause and the way out:", "tierd doctor --spool {spool} {url}"),
    "spool": NextStep("Try the spool and its disk:", "tierd doctor --spool {spool}"),
    "low disk": NextStep("See which runs take the room; keep fewer, or free space:", "tierd du --spool {spool}"),
    "launches": NextStep("Stop all but one; these are the processes:", "tierd status --spool {spool}"),
    "policies": NextStep(
        "Make them agree, or delete the object of a node that is gone; these are the objects:",
        "tierd status --spool {spool}",
    ),
    "paused": NextStep("", "tierd resume --spool {spool}"),
    "scrub": NextStep("Raise scrub_rate or scrub in tierd.toml, then:", "systemctl reload tierd"),
    "receiver": NextStep(FINDINGS["receiver silent"].do, "tierd notify test"),
    "lost": NextStep(
        "See what is left; when the cause is mended, a restart of the daemon ends this alert:",
        "tierd ls --spool {spool} {url}",
    ),
    "quarantined": NextStep(
        "See which copies; docs/howto/recovery.md has the ways out:", "tierd ls --spool {spool} {url}"
    ),
    "reads differ": NextStep(
        "Test the disk, the memory and the network, because equal reads give different bytes:",
        "tierd verify --spool {spool} {url}",
    ),
    "replicas": NextStep(
        "End the launch, and test the GPU and the memory of the ranks that differ:", "dcgmi diag -r 3"
    ),
    "watch": NextStep("", "tierd watch --explain {directory}"),
    "other node": NextStep("", "tierd ls {url}"),
    "behind": NextStep(
        "Try the tier and its throughput; if it is in order, save less often (tierd advise):",
        "tierd doctor --spool {spool} {url}",
    ),
}


def problem(severity: Severity, place: str, why: str, step: str, **places: str) -> Problem:
    """Make a problem with its next step, an entry of `NEXT_STEPS`.

    Args:
        places: the values of the names in braces; an empty one is left out.
    """
    next_step = NEXT_STEPS[step]
    quoted = {name: shlex.quote(text) if text else "" for name, text in places.items()}
    return Problem(severity, place, why, next_step.do, next_step.command.format(**quoted).strip())
