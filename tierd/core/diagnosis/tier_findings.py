"""Which finding the observations of a tier amount to. Facts of S3 are from the Amazon S3 API reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierd.core.diagnosis.findings import Finding, finding
from tierd.core.units import format_size

_DAY_S = 86400.0
_SKEW_S, _MOST_SKEW_S = 60.0, 900.0  # S3 answers RequestTimeTooSkewed beyond 15 minutes
_EXPIRES_S = 14 * _DAY_S  # a certificate; most are renewed 30 days before
_SOON_S = 3600.0  # temporary credentials that nobody renews
_SLOW = 5e5  # bytes/s: one small object shows mostly the latency, and a flush sends several at a time
# Findings of a tier that cannot be reached: further requests would fail for the same reason, and tell nothing new.
_UNREACHED = {
    "directory absent",
    "does not resolve",
    "mount fails",
    "no answer",
    "no bucket",
    "no connection",
    "no directory",
    "no TLS",
    "not mounted",
    "refused",
    "silent server",
}
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")  # not GLACIER_IR, whose objects can be read at once


def is_reached(findings: Iterable[Finding]) -> bool:
    """Whether no finding about a tier means that it cannot be reached."""
    return not any(entry.finding in _UNREACHED for entry in findings)


def does_tier_work(findings: Sequence[Finding]) -> bool | None:
    """Whether a tier's operations work, by all findings about it; None: they were not tried."""
    if not is_reached(findings):
        return False
    tried = next((entry for entry in findings if entry.check == "operations" and entry.severity != "unknown"), None)
    return tried.severity != "error" if tried else None


def directory_room(place: str, free: int, total: int, state: int | None) -> Finding:
    """Judge the free space of a tier's directory; `state` is the largest that this node saves, None: not known.

    Neither compression nor shared chunks count, because no flush can rely on them.
    """
    text = f"{format_size(free)} of {format_size(total)} free"
    if state is None:
        return finding(place, "room unknown", f"{text}; no checkpoint tells the size of a state")
    text += f"; one state has {format_size(state)}"
    return finding(place, "room there" if free >= state else "nearly full", text)


def daemon_view(place: str, works: bool, failure: str) -> Finding | None:
    """Compare what was found here with what the daemon says of the tier; `failure` is empty if it reaches the tier.

    The result is None if both fail, because the operations say why.
    """
    if works and failure:
        return finding(place, "only here", f"the daemon: {failure}")
    if works:
        return finding(place, "same view", "it works")
    return None if failure else finding(place, "only the daemon", "the daemon reached it at its last listing")


def clock_skew(place: str, seconds: float | None) -> Finding:
    """Judge how far this node's clock is ahead of the server's; None: the server did not say its time."""
    if seconds is None:
        return finding(place, "clock unknown", "the server did not say its time")
    text = f"{abs(seconds):.0f} s {'ahead of' if seconds >= 0 else 'behind'} the server"
    if abs(seconds) >= _MOST_SKEW_S:
        return finding(place, "clock too far off", text)
    return finding(place, "clock off" if abs(seconds) >= _SKEW_S else "in time", text)


def certificate(place: str, version: str, left_s: float | None) -> Finding:
    """Judge a TLS handshake that succeeded; `left_s` are the seconds until the certificate expires."""
    if left_s is None:
        return finding(place, "encrypted", f"{version}; the certificate verifies")
    text = f"{version}; the certificate verifies, for {left_s / _DAY_S:.0f} days more"
    return finding(place, "certificate expires" if left_s < _EXPIRES_S else "encrypted", text)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is known of credentials without showing them: the link of the AWS chain that gave them, such as `env`.

    `renewed` says whether that link renews them, `left_s` in how many seconds they expire, if that is known.
    """

    source: str
    temporary: bool
    renewed: bool
    left_s: float | None = None


def credentials(place: str, resolved: Credentials | None) -> Finding:
    """Judge the credentials that the chain gives; None: it gives none."""
    if resolved is None:
        return finding(place, "no credentials", "no link of the AWS chain has any")
    end = "no end is known" if resolved.left_s is None else f"{resolved.left_s / 60:.0f} minutes left"
    if not resolved.temporary:
        return finding(place, "credentials", f"from {resolved.source}; long-lived")
    if resolved.renewed:
        return finding(place, "credentials", f"from {resolved.source}; temporary, renewed by themselves; {end}")
    return finding(place, "credentials expire", f"from {resolved.source}; temporary, and nothing renews them; {end}")


@dataclass(frozen=True, slots=True)
class LifecycleRule:
    """One enabled rule of a bucket's lifecycle, for current objects and `old_versions` with the prefix.

    A `tagged` rule only concerns objects with a tag, which tierd's have not.
    """

    name: str
    prefix: str = ""
    tagged: bool = False
    expires: bool = False
    moves_to: tuple[str, ...] = ()
    old_versions: bool = False


def is_concerned(rule: LifecycleRule, base: str) -> bool:
    """Whether a rule concerns keys below `base`, the tier's prefix with its '/'."""
    return not rule.tagged and (base.startswith(rule.prefix) or rule.prefix.startswith(base))


def lifecycle(place: str, rules: Sequence[LifecycleRule], base: str) -> Finding:
    """Judge the rules of the bucket of a tier whose keys begin with `base`."""
    relevant = [rule for rule in rules if is_concerned(rule, base)]
    for rule in relevant:
        if rule.expires:
            return finding(place, "expires", f"rule {rule.name!r} (prefix {rule.prefix!r}) deletes objects by age")
        if archive := next((storage_class for storage_class in rule.moves_to if storage_class in _ARCHIVES), None):
            return finding(place, "archives", f"rule {rule.name!r} (prefix {rule.prefix!r}) moves objects to {archive}")
    return finding(place, "no rules", f"{len(rules)} rules, none deletes or archives what lies below {base!r}")


def versioning(place: str, status: str, rules: Sequence[LifecycleRule], base: str) -> Finding:
    """Judge a bucket's versioning: `Enabled`, `Suspended`, or empty."""
    if status != "Enabled":
        return finding(place, "no versions", status.lower() or "off")
    if any(rule.old_versions for rule in rules if is_concerned(rule, base)):
        return finding(place, "old versions expire", "on, and a lifecycle rule deletes old versions")
    return finding(place, "old versions stay", "on: what is pruned stays as an old version, for good")


def object_lock(place: str, mode: str, period: str) -> Finding:
    """Judge a bucket's default retention; an empty mode: it has none."""
    if not mode:
        return finding(place, "no lock", "no default retention")
    return finding(place, "lock by default", f"{mode}, {period}: what is pruned takes space until then")


def uploads(place: str, count: int, oldest: str, base: str) -> Finding:
    """Judge the unfinished multipart uploads below `base`; `oldest` is when the oldest began."""
    if not count:
        return finding(place, "no uploads", "none")
    return finding(place, "leftover uploads", f"{count} or more below {base!r}, the oldest of {oldest}")


def verified_by(place: str, checksum: str) -> Finding:
    """Judge the checksum with which the server verified an upload; empty: none."""
    if checksum:
        return finding(place, "verifies", f"{checksum}: it refused a wrong one")
    return finding(place, "verifies none", "no checksum of an upload is verified by the store")


def conditions(place: str, *, is_honored: bool) -> Finding:
    """Judge whether a put that must replace nothing left an object as it was."""
    if is_honored:
        return finding(place, "leaves objects", "a put if nothing is there left an object as it was")
    return finding(place, "replaces objects", "a put if nothing is there replaced an object")


def throughput(place: str, size: int, put_s: float, get_s: float) -> Finding:
    """Judge how long a put and a get of `size` bytes took."""
    up, down = size / max(put_s, 1e-6), size / max(get_s, 1e-6)
    text = f"one object of {size >> 20} MiB: put {up / 1e6:,.1f} MB/s, get {down / 1e6:,.1f} MB/s"
    return finding(place, "slow" if min(up, down) < _SLOW else "measured", text)
