"""The three measurements: a, save until it is on S3; d, restore on a fresh node; e, training beside a flush."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import checkpoints
from bench import OURS, PEER, Bench, Case, Costs, Figures
from host import RSS, Watch

from tierd.bench.process_counters import available_bytes, drop_cache, sync_filesystem
from tierd.bench.worker_pipe import WorkerPipe

SAVES = {"tierd": 0, "dcp + zstd": 0, "dcp + zstd, 2 threads": 2}  # arm: threads of its compressor
RESTORES = ("tierd restore(state)", "tierd restore --to", "download + torch.load")
_SAVED = {
    True: "Checkpointer.save until Save.wait('s3'): committed and verified there",
    False: "DCP's process, zstd level 1, upload_fileobj: uploaded, nothing verified",
}
_LIVE = 2.4  # memory of a training that saves its own state, in units of it: gradients and the arena are in it
_SHARE = 0.7  # of the available memory that it may be planned to take


def ask(worker: WorkerPipe, do: str, **arguments: object) -> dict[str, Any]:
    """A worker's answer to a request."""
    return worker.request(do, **arguments)[0]


def saves(bench: Bench, gigabytes: float, kinds: Sequence[str]) -> None:
    """Part a."""
    cases = [
        Case("a", gigabytes, kind, "s3", arm, bench.raw_bytes(kind, gigabytes), _SAVED[arm == "tierd"])
        for kind in kinds
        for arm in SAVES
    ]
    bench.turns(cases, lambda case, home: (_save if case.arm == "tierd" else _peer_save)(bench, case, home))


def _save(bench: Bench, case: Case, home: Path) -> Figures:
    url = bench.bucket.url("a")
    with bench.emptied("a"), bench.daemon(home, url) as daemon, bench.worker(OURS, home) as worker:
        ask(worker, "load", path=str(bench.file(case)))
        ask(worker, "ready", spool=str(home / "spool"), state_bytes=case.raw_bytes)
        sync_filesystem(home)
        costs = Costs(worker.pid, daemon.pid)
        found = ask(worker, "save", tiers=["s3"]) | costs.figures()
        return found | {"stored_bytes": bench.bucket.size("a")}


def _peer_save(bench: Bench, case: Case, home: Path) -> Figures:
    with bench.emptied("a"), bench.worker(PEER, home) as worker:
        reported = ask(worker, "load", path=str(bench.file(case)), endpoint=bench.bucket.endpoint)
        bench.peer_packages = reported["packages"]
        ask(worker, "ready", home=str(home))
        sync_filesystem(home)
        costs = Costs(worker.pid)
        asked = {"home": str(home), "bucket": bench.bucket.name, "prefix": "a", "threads": SAVES[case.arm]}
        found = ask(worker, "save", **asked) | costs.figures()
        return found | {"stored_bytes": bench.bucket.size("a")}


def restores(bench: Bench, gigabytes: float, kinds: Sequence[str]) -> None:
    """Part d. What is restored is put there once; every turn has an empty spool."""
    tier, kept = bench.directory / "tier", bench.directory / "state.pt"
    for kind in kinds:
        cases = [
            Case("d", gigabytes, kind, place, arm, bench.raw_bytes(kind, gigabytes))
            for place in ("s3", "file")
            for arm in RESTORES
        ]
        shutil.rmtree(tier, ignore_errors=True)
        tier.mkdir()
        urls = {"s3": bench.bucket.url("d"), "file": f"file://{tier}"}
        try:
            with bench.emptied("d"):
                _put(bench, cases[0], urls, kept)
                bench.turns(cases, partial(_restore, bench, urls=urls, kept=kept))
        except ChildProcessError as error:
            for case in cases:
                case.errors.append(f"putting it there: {error}")
            bench.cases += cases
        finally:
            shutil.rmtree(tier, ignore_errors=True)
            kept.unlink(missing_ok=True)


def _put(bench: Bench, case: Case, urls: Mapping[str, str], kept: Path) -> None:
    bench.say(f"d: {case.gigabytes:g} GB {case.kind}: putting it there")
    home, path = bench.home(), str(bench.file(case))
    with bench.daemon(home, *urls.values()), bench.worker(OURS, home) as worker:
        ask(worker, "load", path=path)
        ask(worker, "open", spool=str(home / "spool"))
        ask(worker, "save", tiers=list(urls))
    with bench.worker(PEER, home) as worker:
        bench.peer_packages = ask(worker, "load", path=path, endpoint=bench.bucket.endpoint)["packages"]
        ask(worker, "keep", file=str(kept), bucket=bench.bucket.name, key="d/state.pt")
    shutil.rmtree(home, ignore_errors=True)


def _restore(bench: Bench, case: Case, home: Path, urls: Mapping[str, str], kept: Path) -> Figures:
    """Seconds until the tensors of a state that was there before hold what the checkpoint holds."""
    url, path, target = urls[case.place], str(bench.file(case)), str(home / "down")
    script = PEER if case.arm == RESTORES[2] else OURS
    needed = bench.daemon(home, url) if case.arm == RESTORES[0] else nullcontext()
    with needed as daemon, bench.worker(script, home) as worker:
        ask(worker, "blank", path=path, **({"endpoint": bench.bucket.endpoint} if script == PEER else {}))
        if daemon is not None:
            ask(worker, "open", spool=str(home / "spool"))
        bench.dropped = drop_cache(bench.directory) and bench.dropped
        if script == OURS and daemon is None:
            ask(worker, "warm", url=url)
        costs = Costs(worker.pid, *([daemon.pid] if daemon else []))
        if daemon is not None:
            found = ask(worker, "restore")
        elif script == OURS:
            found = ask(worker, "export", url=url, to=target)
        elif case.place == "s3":
            found = ask(worker, "fetch", file=target, bucket=bench.bucket.name, key="d/state.pt")
        else:
            found = ask(worker, "copy", file=target, source=str(kept))
        found |= costs.figures()
        if not ask(worker, "check", path=path)["same"]:
            raise ChildProcessError("what was restored is not what was saved")
        return found


def lives(gigabytes: float) -> bool:
    """Whether there is memory for a training of that size, and its arena."""
    return gigabytes * 1e9 * _LIVE <= _SHARE * available_bytes()


def beside(bench: Bench, gigabytes: float, places: Sequence[str], small: float) -> None:
    """Part e. What training cannot hold beside its arena is saved from a file's mapping, by a smaller training."""
    live = lives(gigabytes)
    how = "training saves its own state" if live else f"a training of {small:g} GB saves a file's mapping"
    cases = [Case("e", gigabytes, "fp32", place, "tierd", how=how) for place in places]
    state = None if live else checkpoints.file_of(bench.directory, "fp32", gigabytes)
    bench.turns(cases, lambda case, home: _beside(bench, case, home, gigabytes if live else small, state))


def _beside(bench: Bench, case: Case, home: Path, training: float, state: Path | None) -> Figures:
    (home / "tier").mkdir()
    url = bench.bucket.url("e") if case.place == "s3" else f"file://{home / 'tier'}"
    with bench.emptied("e"), bench.daemon(home, url) as daemon, bench.worker(OURS, home) as worker:
        reported = ask(worker, "train", gigabytes=training, path=str(state) if state else None)
        case.raw_bytes = reported["bytes"]
        ask(worker, "ready", spool=str(home / "spool"), state_bytes=case.raw_bytes)
        sync_filesystem(home)
        steps = ask(worker, "idle", seconds=bench.window / 2)["steps_s"]
        with Watch(daemon.pid) as watch:
            costs = Costs(worker.pid, daemon.pid)
            found = ask(worker, "flushing", tier=case.place)
            others = costs.figures()["others_cores"]
        sync_filesystem(home)
        steps += ask(worker, "idle", seconds=bench.window / 2)["steps_s"]
    if not found["steps_s"]:
        raise ChildProcessError(f"the flush took {found['flushed'] - found['durable']:.2f} s: no whole step beside it")
    return _compared(steps, found, watch) | {"others_cores": others}


def _compared(idle: list[float], found: Mapping[str, Any], watch: Watch) -> Figures:
    """Mean steps, since a flush is not even: the slowdown is what training lost in all. And the daemon's memory."""
    steps: list[float] = found["steps_s"]
    alone, busy = sum(idle) / len(idle), sum(steps) / len(steps)
    figures = {
        "idle_step_s": alone,
        "flushing_step_s": busy,
        "flushing_steps": len(steps),
        "slowdown": busy / alone - 1,
        "slowdown_of_medians": median(steps) / median(idle) - 1,
        "flush_s": found["flushed"] - found["durable"],
        "daemon_high_water_bytes": watch.high_water,
    }
    for phase, begun, ended in (
        ("persist", found["begun"], found["durable"]),
        ("flush", found["durable"], found["flushed"]),
    ):
        peaks = watch.peaks(begun, ended)
        figures |= {f"{phase}_{name}_bytes": peaks[name] for name in (*RSS, "own")}
    return figures
