"""Observe the spool's daemon, and what ends it: its systemd unit, its SLURM job, its pod."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierd import __version__
from tierd.core.diagnosis import ending
from tierd.core.diagnosis.findings import NODE, Finding, finding
from tierd.core.errors import DaemonAbsent, TierdError, VersionMismatch
from tierd.core.retention.policy import seconds
from tierd.doctor.bounded import output
from tierd.ipc import messages, replies
from tierd.ipc.client import Link
from tierd.spool.spool import Spool

UNIT = "tierd.service"
GRACE = "TIERD_GRACE_PERIOD"  # what a pod's manifest may tell, because Kubernetes tells a pod nothing of it


@dataclass(frozen=True, slots=True)
class DaemonAnswer:
    """How the spool's daemon answered.

    Attributes:
        finding: what that amounts to.
        pid: its process id; 0: none answered.
        failures: for each tier that it has observed, by URL, its last error; empty: the tier answers.
    """

    finding: Finding
    pid: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)


def daemon(root: Path) -> DaemonAnswer:
    """Ask the spool's daemon for its status."""
    if not (root / ".tierd").is_dir():
        return DaemonAnswer(finding(NODE, "no daemon", f"none has run: this is tierd {__version__}"))
    try:
        with Link(Spool(root, write=False)) as link:
            status = replies.read_member(link.ask(messages.StatusRequest()), "status", dict[str, Any])
    except DaemonAbsent:
        return DaemonAnswer(finding(NODE, "no daemon", f"none runs; this is tierd {__version__}"))
    except VersionMismatch as error:
        return DaemonAnswer(finding(NODE, "versions apart", str(error)))
    except (TierdError, TimeoutError) as error:
        return DaemonAnswer(finding(NODE, "silent daemon", str(error)))
    version, pid = str(status.get("version", "of an unknown version")), int(status.get("pid", 0))
    name = "daemon answers" if version == __version__ else "other version"
    text = f"tierd {version} answers (pid {pid}); this is tierd {__version__}"
    return DaemonAnswer(finding(NODE, name, text), pid, _failures(status))


def _failures(status: dict[str, Any]) -> dict[str, str]:
    """Read each tier's last error; a tier that was not observed yet, or an older daemon's, is left out."""
    errors = {}
    for tier_status in status.get("tiers", []):
        failed = tier_status.get("failures") or not tier_status.get("reached")
        if not failed or tier_status.get("last_error"):
            errors[str(tier_status.get("url"))] = str(tier_status["last_error"]) if failed else ""
    return errors


def endings(pid: int, drain_s: float) -> Iterator[Finding]:
    """Yield the findings about everything that may end the daemon with process id `pid` (0: none runs) too soon."""
    name = unit_of(pid)
    yield ending.unit(name, _stop_s(name), drain_s)
    if os.environ.get("SLURM_JOB_ID"):
        yield ending.job(ending.kill_wait_s(output(["scontrol", "show", "config"])), drain_s)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        try:
            grace_s = seconds(os.environ[GRACE])
        except (KeyError, ValueError):
            grace_s = None
        yield ending.pod(grace_s, drain_s)


def unit_of(pid: int, groups: str = "") -> str:
    """Return the unit that a process belongs to, by the name of its control group; else the unit that tierd ships."""
    try:
        groups = groups or Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return UNIT
    match = re.search(r"/(tierd[\w@.:\\-]*\.service)$", groups, re.MULTILINE)
    return match[1] if match else UNIT


def _stop_s(unit: str) -> float | None:
    if shutil.which("systemctl") is None:
        return None
    text = output(["systemctl", "show", "--property=LoadState,TimeoutStopUSec", unit])
    members = dict(line.partition("=")[::2] for line in text.splitlines())
    return ending.span_s(members.get("TimeoutStopUSec", "")) if members.get("LoadState") == "loaded" else None
