"""Whether systemd, SLURM or Kubernetes leave the daemon the time to drain when they end it."""

from __future__ import annotations

import math
import re

from tierd.core.diagnosis.findings import SYSTEM, Finding, finding

_POD_DEFAULT_S = 30.0  # terminationGracePeriodSeconds, where a pod's manifest does not set it
# systemd.time(7), as systemctl prints a span
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|h|d|w)")


def span_s(text: str) -> float | None:
    """Parse a span as systemd prints it, `1min 30s`, into seconds; `infinity` is infinite; None if it is none."""
    if text == "infinity":
        return math.inf
    pairs = [_SPAN.fullmatch(word) for word in text.split()]
    if not pairs or not all(pairs):
        return None
    return sum(float(pair[1]) * _UNITS[pair[2]] for pair in pairs if pair)


def kill_wait_s(config: str) -> float | None:
    """Find KillWait in the output of ``scontrol show config``, ``KillWait  = 30 sec``, in seconds."""
    match = re.search(r"^KillWait\s*=\s*(\d{1,9}) sec", config, re.MULTILINE)
    return float(match[1]) if match else None


def unit(name: str, stop_s: float | None, drain_s: float) -> Finding:
    """Judge a unit's TimeoutStopSec; None: there is no such unit, or nobody could be asked."""
    if stop_s is None:
        return finding(SYSTEM, "no unit", f"no {name} was found")
    stop_text = "infinity" if math.isinf(stop_s) else f"{stop_s:g} s"
    text = f"{name}: TimeoutStopSec is {stop_text}, drain {drain_s:g} s"
    return finding(SYSTEM, "stops in time" if stop_s > drain_s else "stopped too soon", text)


def job(kill_wait: float | None, drain_s: float) -> Finding:
    """Judge the time between SIGTERM and SIGKILL of a SLURM job; None: not known."""
    if kill_wait is None:
        return finding(SYSTEM, "job's end unknown", f"scontrol did not say KillWait; drain is {drain_s:g} s")
    text = f"KillWait is {kill_wait:g} s, drain {drain_s:g} s"
    return finding(SYSTEM, "job ends in time" if kill_wait > drain_s else "job ends too soon", text)


def pod(grace_s: float | None, drain_s: float) -> Finding:
    """Judge the grace period of a pod; None: the pod's environment does not say it."""
    if grace_s is None:
        text = f"not known here; the default is {_POD_DEFAULT_S:g} s, drain {drain_s:g} s"
        return finding(SYSTEM, "pod's grace unknown", text)
    text = f"{grace_s:g} s, drain {drain_s:g} s"
    return finding(SYSTEM, "pod ends in time" if grace_s > drain_s else "pod ends too soon", text)
