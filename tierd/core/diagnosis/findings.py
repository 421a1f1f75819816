"""The table of `tierd doctor`: every check with its reason, and every possible finding with its severity and remedy.

Invariant: a severity stands in this table only. The modules beside this one choose a finding by its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "unknown", "warning", "error"]
NODE, SYSTEM = "local", "system"  # places beside the tiers; `local` is the spool's name wherever a tier's can stand

# Each check, and why it matters.
CHECKS: dict[str, str] = {
    "spool": "Trainers save into this directory.",
    "file system": "The spool holds what no tier has yet, so it has to be a local disk that survives a reboot.",
    "O_DIRECT": "Saves bypass the page cache, so that they take neither memory nor time from training.",
    "rename": "One rename makes a checkpoint visible, whole or not at all.",
    "fsync": "A checkpoint counts as durable when the disk has confirmed it.",
    "owner and mode": "A spool holds model weights. A daemon serves only its owner, and trusts nobody else's files.",
    "space": "The spool holds keep_last checkpoints and the one that is being written.",
    "stored once": "What is the same on all ranks of a node is stored once if it is declared.",
    "memfd": "A trainer hands its snapshot to the daemon as shared memory.",
    "memory": "A snapshot takes one state's size of memory, and the daemon up to 0.5 GiB.",
    "limits": "The daemon uses a thread for each connection of a trainer, and up to 64 for each tier.",
    "codec": "It compresses what a flush sends, and expands what a restore reads.",
    "daemon": "Client and daemon have to understand each other.",
    "directory": "A tier has to survive the loss of the node's disk.",
    "place": "Of two tiers in one place, each policy deletes what only the other one keeps.",
    "room": "A flush puts a whole state there before retention deletes an older one.",
    "key": "Everything on the tier is encrypted with this key.",
    "DNS": "Every request begins with the server's address.",
    "connection": "Every request needs a connection to the server, and an answer.",
    "TLS": "Uploads are not signed, so only TLS protects them on a network that is not your own.",
    "clock": "An S3 server refuses requests whose time is off by more than 15 minutes.",
    "credentials": "They sign every request, also in some hours' time.",
    "operations": "A flush puts and reads back, an observation lists, and retention deletes.",
    "daemon's view": "The daemon has credentials, a sandbox and mounts of its own, which this shell need not share.",
    "checksums": "Where the server verifies checksums, the daemon need not read back what it has put.",
    "conditions": "Several nodes put the chunks that all of them hold, and none should replace a verified object.",
    "throughput": "A flush should take less time than passes between two saves.",
    "lifecycle": "A rule of the bucket that deletes or archives by age knows nothing of retention: newer checkpoints "
    "share chunks of older ones.",
    "object lock": "Retention deletes checkpoints, and under a lock their bytes stay as old versions.",
    "versioning": "In a bucket with versions a deletion frees no space.",
    "multipart": "Unfinished multipart uploads cost money and no listing shows them. tierd makes none.",
    "receiver": "Alerts reach people and programs through it.",
    "HTTP port": "Metrics, probes and the page are served there.",
    "stop timeout": "After SIGTERM the daemon flushes for up to `drain`; systemd kills it after TimeoutStopSec.",
    "SLURM": "At a job's time limit SLURM sends SIGTERM, and SIGKILL after KillWait.",
    "Kubernetes": "Kubernetes sends SIGTERM, and SIGKILL after terminationGracePeriodSeconds.",
}


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One row of the table."""

    check: str
    # `ok`; `note`: worth knowing; `unknown`: it could not be tried; `warning`: it works, at a cost or a risk; `error`:
    # something that tierd needs will fail
    severity: Severity
    do: str = ""  # what to do; empty: nothing


_LOCAL_DISK = "Put the spool on a local disk: ext4, XFS or Btrfs on NVMe."
_CHAIN = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role."
_DRAIN = "Set it to more than `drain`, or lower `drain` in tierd.toml."
_NETWORK_PATH = "and the way there: a firewall, HTTPS_PROXY, NO_PROXY"
_ALLOW = "To have it checked, allow the credentials {}; or look at the bucket yourself."

FINDINGS: dict[str, FindingKind] = {
    "spool found": FindingKind("spool", "ok"),
    "spool absent": FindingKind("spool", "note", "Nothing: the first daemon or trainer makes it."),
    "spool silent": FindingKind(
        "spool", "error", "Look at its disk, and at the kernel's log; or name another directory."
    ),
    "spool unusable": FindingKind(
        "spool", "error", "Name another directory, or give this account the right to write there."
    ),
    "local disk": FindingKind("file system", "ok"),
    "in memory": FindingKind("file system", "warning", _LOCAL_DISK),
    "container's layer": FindingKind(
        "file system", "warning", f"Mount a volume there: it ends with the container. {_LOCAL_DISK}"
    ),
    "network file system": FindingKind("file system", "warning", f"{_LOCAL_DISK} A network file system can be a tier."),
    "read-only": FindingKind("file system", "error", "Mount it writable, or name another directory."),
    "other file system": FindingKind("file system", "note"),
    "direct": FindingKind("O_DIRECT", "ok"),
    "not direct": FindingKind("O_DIRECT", "warning", _LOCAL_DISK),
    "renames": FindingKind("rename", "ok"),
    "rename fails": FindingKind("rename", "error", _LOCAL_DISK),
    "syncs": FindingKind("fsync", "ok"),
    "slow sync": FindingKind("fsync", "warning", "Use a faster disk, or one that fewer programs write to."),
    "sync fails": FindingKind("fsync", "error", "The disk or its quota refuses; look at the kernel's log."),
    "private": FindingKind("owner and mode", "ok"),
    "readable by others": FindingKind("owner and mode", "warning", "chmod 700; else the next daemon does that itself."),
    "writable by others": FindingKind("owner and mode", "error", "Look through it, then chmod 700."),
    "replaceable": FindingKind("owner and mode", "warning", "Take away others' right to write to the directory above."),
    "another's": FindingKind(
        "owner and mode", "error", "Run trainer, daemon and doctor as the spool's account (sudo -u)."
    ),
    "room": FindingKind("space", "ok"),
    "room short": FindingKind("space", "warning", "Free space there, or saves may find the disk full."),
    "room too small": FindingKind("space", "error", "Use a larger disk, or a lower keep_last for the spool."),
    "state unknown": FindingKind(
        "space", "unknown", "Run doctor again after the first save, which tells the state's size."
    ),
    "stored once": FindingKind("stored once", "ok"),
    "stored by each": FindingKind(
        "stored once",
        "note",
        "If it always is the same, name the entries: tierd.Checkpointer(…, replicated=('model', 'optimizer')); the log "
        "of rank 0 has their names.",
    ),
    "shared memory": FindingKind("memfd", "ok"),
    "no shared memory": FindingKind(
        "memfd", "error", "Allow memfd_create(2) with sealing: a seccomp filter may forbid it."
    ),
    "memory": FindingKind("memory", "ok"),
    "memory short": FindingKind(
        "memory", "warning", "Raise the limit; else a save blocks while it streams the state out."
    ),
    "memory too small": FindingKind(
        "memory", "error", "Give the daemon 1 GiB at least, and 3 GiB for chunks of other writers."
    ),
    "limits": FindingKind("limits", "ok"),
    "low limits": FindingKind(
        "limits", "warning", "Raise them: ulimit, LimitNOFILE= and TasksMax=, or the container's."
    ),
    "file size limit": FindingKind(
        "limits", "error", "Raise RLIMIT_FSIZE: a tensor file is as large as a rank's state."
    ),
    "compiled codec": FindingKind("codec", "ok"),
    "NumPy codec": FindingKind(
        "codec", "note", "Install tierd from a checkout where a C compiler is: then a flush takes less of the CPU."
    ),
    "no vector codec": FindingKind("codec", "note", "Nothing: this processor has neither AVX2 nor NEON."),
    "daemon answers": FindingKind("daemon", "ok"),
    "no daemon": FindingKind(
        "daemon", "note", "Start one: tierd run, systemctl start tierd, or a trainer with to=[...]."
    ),
    "other version": FindingKind(
        "daemon", "note", "Nothing: they work together. Restart the daemon to end an upgrade."
    ),
    "versions apart": FindingKind("daemon", "error", "Upgrade the older of the two; the daemon first."),
    "silent daemon": FindingKind("daemon", "error", "Look at its log and at its state; a stopped one wants SIGCONT."),
    "own disk": FindingKind("directory", "ok"),
    "the spool's disk": FindingKind(
        "directory", "warning", "Mount another disk or server there, or add a tier elsewhere."
    ),
    "in the spool": FindingKind("directory", "error", "Name a directory that neither lies in the spool nor holds it."),
    "own place": FindingKind("place", "ok"),
    "another tier's place": FindingKind("place", "error", "Leave one of the two out, or give it a prefix of its own."),
    "no directory": FindingKind("directory", "error", "Name a directory."),
    "not mounted": FindingKind(
        "directory",
        "error",
        "Mount it again, and look at its server or disk if that fails. mkdir is wrong: it makes an empty directory on "
        "this node's own disk.",
    ),
    "directory absent": FindingKind(
        "directory",
        "error",
        "If a disk or a server was mounted there, mount it again. Only for a new tier, make it with mkdir: a directory "
        "in place of a lost mount has none of its checkpoints.",
    ),
    "tier in memory": FindingKind("directory", "warning", "Mount a disk or server there: a reboot empties it."),
    "room there": FindingKind("room", "ok"),
    "nearly full": FindingKind(
        "room", "error", "Free space there, use a larger disk, or lower the tier's keep_last; else flushes fail."
    ),
    "room unknown": FindingKind("room", "unknown", "Run doctor with --spool or --config, after the first save."),
    "key read": FindingKind("key", "ok"),
    "key unusable": FindingKind("key", "error", "Restore the key: without it nothing on the tier can be read."),
    "resolves": FindingKind("DNS", "ok"),
    "does not resolve": FindingKind(
        "DNS",
        "error",
        "Check the endpoint in the URL, and /etc/resolv.conf; where only a proxy resolves names, set HTTPS_PROXY.",
    ),
    "by proxy": FindingKind(
        "DNS", "unknown", "Nothing: the proxy resolves the name and connects. `operations` tries it."
    ),
    "connects": FindingKind("connection", "ok"),
    "no connection": FindingKind(
        "connection", "error", f"Check that the server runs, host and port of the endpoint, {_NETWORK_PATH}."
    ),
    "silent server": FindingKind(
        "connection", "error", f"Check that the server works, the port and scheme of the endpoint, {_NETWORK_PATH}."
    ),
    "encrypted": FindingKind("TLS", "ok"),
    "not encrypted": FindingKind("TLS", "warning", "Write endpoint=https://... if the server speaks TLS."),
    "plain on loopback": FindingKind("TLS", "ok"),
    "no TLS": FindingKind(
        "TLS", "error", "Check port and scheme of the endpoint; AWS_CA_BUNDLE names your own authority."
    ),
    "certificate expires": FindingKind("TLS", "warning", "Have the server's certificate renewed."),
    "in time": FindingKind("clock", "ok"),
    "clock off": FindingKind("clock", "warning", "Run NTP on this node (chrony, systemd-timesyncd)."),
    "clock too far off": FindingKind(
        "clock", "error", "Run NTP on this node (chrony, systemd-timesyncd), or on the server."
    ),
    "clock unknown": FindingKind("clock", "unknown"),
    "credentials": FindingKind("credentials", "ok"),
    "credentials expire": FindingKind(
        "credentials", "warning", "Use a role or a profile that renews them: these end for good."
    ),
    "no credentials": FindingKind("credentials", "error", _CHAIN),
    "credentials unknown": FindingKind(
        "credentials", "error", "Its source failed: see ~/.aws/config, or the metadata service."
    ),
    "read-write": FindingKind("operations", "ok"),
    "append-only": FindingKind(
        "operations", "warning", "Nothing, if it is meant. Else allow deletions, or nothing is pruned."
    ),
    "no bucket": FindingKind(
        "operations", "error", "Create the bucket, or correct its name, the endpoint, the region or the account."
    ),
    "takes nothing": FindingKind(
        "operations", "error", "Allow puts below the prefix; docs/howto/s3.md has the policy."
    ),
    "not writable": FindingKind(
        "operations",
        "error",
        "Mount it writable (mount -o remount,rw), or give this account its rights there (chown, chmod).",
    ),
    "refused": FindingKind(
        "operations",
        "error",
        "Do what the error says. If it only refuses, allow listing, puts and gets below the prefix, as "
        "docs/howto/s3.md does.",
    ),
    "no answer": FindingKind(
        "operations", "error", f"Check that the server works, host and port of the endpoint, {_NETWORK_PATH}."
    ),
    "mount fails": FindingKind(
        "directory", "error", "Look at its mount (findmnt), at the server behind it, and at the kernel's log."
    ),
    "not tried": FindingKind("operations", "unknown"),
    "full": FindingKind(
        "operations", "error", "Free space there, raise the quota, or lower the tier's keep_last: then flushes go on."
    ),
    "same view": FindingKind("daemon's view", "ok"),
    "only here": FindingKind(
        "daemon's view",
        "error",
        "Do what the daemon's error says. If it lacks credentials (EnvironmentFile=) or a path (ReadWritePaths=), give "
        "them to its unit, and restart it: docs/howto/service.md.",
    ),
    "only the daemon": FindingKind(
        "daemon's view",
        "warning",
        "Give doctor the daemon's credentials, as docs/howto/service.md does. If it is a directory: mount it, and "
        "restart the daemon.",
    ),
    "verifies": FindingKind("checksums", "ok"),
    "verifies none": FindingKind(
        "checksums", "note", "Nothing: the daemon reads back what it puts, which takes its download."
    ),
    "leaves objects": FindingKind("conditions", "ok"),
    "replaces objects": FindingKind(
        "conditions",
        "note",
        "Nothing: if nodes put the same chunk at the same moment, the last object remains, and each node reads it.",
    ),
    "measured": FindingKind("throughput", "ok"),
    "slow": FindingKind("throughput", "warning", "Ask `tierd advise` how often to save over such a link."),
    "not measured": FindingKind("throughput", "unknown"),
    "no rules": FindingKind("lifecycle", "ok"),
    "expires": FindingKind(
        "lifecycle", "error", "Take the prefix out of that rule: checkpoints that are kept become corrupt."
    ),
    "archives": FindingKind("lifecycle", "error", "Take the prefix out of that rule: archived objects cannot be read."),
    "rules unknown": FindingKind("lifecycle", "unknown", _ALLOW.format("s3:GetLifecycleConfiguration")),
    "no lock": FindingKind("object lock", "ok"),
    "lock by default": FindingKind(
        "object lock", "warning", "Nothing, if it is meant. Else remove the default retention."
    ),
    "lock unknown": FindingKind("object lock", "unknown", _ALLOW.format("s3:GetBucketObjectLockConfiguration")),
    "no versions": FindingKind("versioning", "ok"),
    "old versions expire": FindingKind("versioning", "ok"),
    "old versions stay": FindingKind("versioning", "warning", "Add a lifecycle rule with NoncurrentVersionExpiration."),
    "versioning unknown": FindingKind("versioning", "unknown", _ALLOW.format("s3:GetBucketVersioning")),
    "no uploads": FindingKind("multipart", "ok"),
    "leftover uploads": FindingKind(
        "multipart", "warning", "Abort them; a lifecycle rule can (AbortIncompleteMultipartUpload)."
    ),
    "uploads unknown": FindingKind("multipart", "unknown", _ALLOW.format("s3:ListBucketMultipartUploads")),
    "receiver connects": FindingKind("receiver", "ok"),
    "receiver by proxy": FindingKind("receiver", "unknown", "`tierd notify test` sends an event through the proxy."),
    "receiver silent": FindingKind(
        "receiver", "warning", "Check its address and that it runs; then `tierd notify test` sends it an event."
    ),
    "receiver unusable": FindingKind("receiver", "error", "Correct its [[notify]]: the daemon does not start with it."),
    "port free": FindingKind("HTTP port", "ok"),
    "port answers": FindingKind("HTTP port", "ok"),
    "port taken": FindingKind(
        "HTTP port", "error", "End the program that listens there (ss -ltnp), or name another port in [http]."
    ),
    "port unusable": FindingKind(
        "HTTP port", "error", "Name an address of this node and a port from 1024 on in [http]."
    ),
    "stops in time": FindingKind("stop timeout", "ok"),
    "stopped too soon": FindingKind("stop timeout", "error", _DRAIN),
    "no unit": FindingKind("stop timeout", "unknown", "Nothing, if systemd does not run the daemon."),
    "job ends in time": FindingKind("SLURM", "ok"),
    "job ends too soon": FindingKind(
        "SLURM", "warning", "Drain earlier: --signal=TERM@SECONDS with more than `drain`."
    ),
    "job's end unknown": FindingKind("SLURM", "unknown", "Compare KillWait of `scontrol show config` with `drain`."),
    "pod ends in time": FindingKind("Kubernetes", "ok"),
    "pod ends too soon": FindingKind("Kubernetes", "error", "Set terminationGracePeriodSeconds to more than `drain`."),
    "pod's grace unknown": FindingKind(
        "Kubernetes",
        "warning",
        "Set terminationGracePeriodSeconds to more than `drain`, and the same in TIERD_GRACE_PERIOD (120s) of the "
        "pod's environment, where doctor can see it.",
    ),
    "not answered": FindingKind("operations", "unknown", "Try again, and look at that place by hand."),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found in one place.

    Attributes:
        place: `local` for the spool and this machine, `system` for its service manager, else the tier's name.
        check: the check.
        finding: its name in the table of findings.
        severity: `ok`, `note`, `unknown`, `warning` or `error`.
        found: the observation.
        why: why it matters.
        do: what to do; empty: nothing.
    """

    place: str
    check: str
    finding: str
    severity: Severity
    found: str
    why: str
    do: str


def finding(place: str, name: str, detail: str, check: str = "") -> Finding:
    """Make the finding called `name`; `check` is for a finding that any check may have."""
    kind = FINDINGS[name]
    check = check or kind.check
    return Finding(place, check, name, kind.severity, detail, CHECKS[check], kind.do)


_CAUSES = {  # findings that are only a consequence, by their causes in the same place
    "full": ("nearly full",),
    "no credentials": ("refused", "no answer", "takes nothing"),
    "credentials unknown": ("refused", "no answer", "takes nothing"),
}


def main_problems(findings: Iterable[Finding]) -> dict[Finding, tuple[str, ...]]:
    """Return the errors, then the warnings, each cause once, with the places that it concerns.

    What several places have in common, such as a server that does not resolve, is one problem. What only follows from
    another finding of the same place is none.
    """
    problems = [entry for entry in findings if entry.severity in ("error", "warning")]
    named = {(entry.place, entry.finding) for entry in problems}
    consequences = {
        (place, consequence) for place, name in named for consequence in _CAUSES.get(name, ()) if name in _CAUSES
    }
    groups: dict[tuple[str, str], list[Finding]] = {}
    for entry in sorted(problems, key=lambda entry: entry.severity != "error"):
        if (entry.place, entry.finding) not in consequences:
            groups.setdefault((entry.finding, entry.found), []).append(entry)
    return {group[0]: tuple(dict.fromkeys(entry.place for entry in group)) for group in groups.values()}


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """The severity of a whole examination: `error`, `warning` or `ok`; notes and unknown findings count as `ok`."""
    severities = {entry.severity for entry in findings}
    return "error" if "error" in severities else "warning" if "warning" in severities else "ok"
