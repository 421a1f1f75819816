"""Power cuts: ext4 and xfs lose their power at the k-th call that changes anything, for every k of every scene.

A trial is a seed: a scene of `cut_scenes` on one kind of file system, played once to its end, then again for each of
the seed's cuts: before, during or after a call, with the journal's last part flushed or lost (FS_IOC_SHUTDOWN). Each
time the file systems are mounted anew, and

- what was said to be done is there, whole, byte by byte; all else is there whole or not at all (P1, P2, P5), and a
  restore is offered the complete checkpoints and no half ones;
- a daemon's start, and the same thing done again, lead to where they lead without a cut: the same parts, chunks, pins;
  nothing left over (P6).

Every other round of seeds takes each scene as it is, and each seed of a scene its share of all cuts that there are; so
a window of `window()` seeds has made every one, wherever it begins. The rounds between draw sizes and cuts by chance.
What threads do at once in "saves of two ranks" is not the seed's to say.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path

from faults.power import loopfs
from faults.power.cutter import MOMENTS, can_trace
from faults.power.loopfs import FLAGS, LoopFs
from faults.power.play import Bench, Outcome, Plan, Play, Say, in_child, warm_up, window
from faults.power.scenes import SCENES
from faults.rounds import Lost, Mutant, Round

UNIT = "power cuts"
SHORT = 120
GATE = 11_800  # all cuts of every scene as it is, and half as many again that are drawn
MET = (
    "times that every cut was made",
    *(f"{scene.name} on {kind}" for scene in SCENES for kind in loopfs.KINDS),
    *(f"{moment} a call, {flag}, {kind}" for moment in MOMENTS for flag in FLAGS.values() for kind in loopfs.KINDS),
    "plays seen by strace, too",
)

_WORKERS = 2


_bench: Bench | None = None  # a worker's


def _set_up(room: Path, kinds: Sequence[str]) -> None:
    """Make a worker's file systems: in memory, and nobody else's."""
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loopfs.hide_mounts()
    place = Path(tempfile.mkdtemp(dir=room))
    loopfs.mount_memory(place)
    _bench = Bench({kind: LoopFs(kind, place, kind) for kind in kinds}, place)
    warm_up(place / "warm")
    gc.freeze()  # what is there is not looked through again by every child


def _trial(seed: int) -> Outcome:
    assert _bench is not None
    outcome = Outcome()
    try:
        Play(_bench, Plan.of(seed, list(_bench.systems))).run(outcome)
    except Exception as error:
        outcome.loss = str(error) if isinstance(error, Lost) else traceback.format_exc()
    return outcome


@cache
def _kinds() -> dict[str, str | None]:
    """Each kind of file system, and why it cannot be had here, by trying."""

    def work(say: Say) -> None:
        loopfs.hide_mounts()
        for kind in loopfs.KINDS:
            why = loopfs.missing(kind)
            room = Path(tempfile.mkdtemp())
            try:
                if not why:
                    loopfs.mount_memory(room)
                    _try(LoopFs(kind, room, kind))
            except OSError as error:
                why = str(error)
            finally:
                shutil.rmtree(room, ignore_errors=True)
            say([kind, why])

    return dict(in_child(work))


def _try(system: LoopFs) -> None:
    for _ in range(2):  # the second time after a cut
        system.mount()
        home = os.open(system.home, os.O_RDONLY | os.O_DIRECTORY)
        loopfs.cut(home, loopfs.LOG_LOST)
        os.close(home)
        system.unmount()


def missing() -> str | None:
    if all(_kinds().values()):
        return "; ".join(f"{kind}: {why}" for kind, why in _kinds().items())
    return None


def run(work: Round) -> None:
    kinds = [kind for kind, why in _kinds().items() if not why]
    for kind, why in _kinds().items():
        if why:
            work.skip(f"{kind}: {why}")
    if not can_trace():
        work.skip("the check of what is hooked: there is no strace")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(_WORKERS, fork, _set_up, (work.room, kinds)) as pool:
        under_way: dict[Future[Outcome], int] = {}
        seeds = 0

        def take(enough: int) -> None:
            while len(under_way) > enough:
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    _note(work, under_way.pop(future), future.result())

        for seed in work.seeds():
            under_way[pool.submit(_trial, seed)] = seed
            take(_WORKERS)
            seeds += 1
        take(0)
    every = window(kinds)  # and a round may be played in pieces
    work.notes["times that every cut was made"] = (work.first + seeds) // every - work.first // every


def _note(work: Round, seed: int, outcome: Outcome) -> None:
    work.passed(outcome.cuts, *outcome.notes.elements())
    if outcome.loss:
        work.lost(seed, outcome.loss)


_BY = "power --only {}"

MUTANTS = (
    Mutant(
        "a part is renamed into place before its manifest is written",
        "tierd/spool/stage.py",
        "        write_file(self.path / MANIFEST_NAME, MANIFEST_NAME, encode(manifest))",
        "        self._target.parent.mkdir(parents=True, exist_ok=True)\n"
        "        self.path = self.path.rename(self._target)\n"
        "        write_file(self.path / MANIFEST_NAME, MANIFEST_NAME, encode(manifest))",
        "power --trials 60",
        "visible and not whole",
    ),
    Mutant(
        "a hand-off is answered before it is durable",
        "tierd/daemon/handoff.py",
        "                self._reply(line, self._persist(line, message, box))",
        """                self._reply(line, {"ok": True, "direct": False, "recycled": False})
                self._persist(line, message, box)""",
        _BY.format(40),
        "though it was said to be there",
    ),
    Mutant(
        "a file is not durable before it is shown",
        "tierd/spool/file_io.py",
        """        os.fsync(self._fd)
        return File(path=self._name""",
        """        return File(path=self._name""",
        _BY.format(30),
        "visible and not whole",
    ),
    Mutant(
        "a commit is answered before it is durable",
        "tierd/spool/stage.py",
        """            os.fsync(shelf)
            os.fsync(room)
""",
        "            pass\n",
        _BY.format(30),
        "though it was said to be there",
    ),
    Mutant(
        "a part's spare is written over before its removal is durable",
        "tierd/spool/trash.py",
        """        _take_apart(path, grave)
    sync_left(path.parent)
    return grave
""",
        """        _take_apart(path, grave)
    return grave
""",
        "power --trials 60",
        "said to be gone",
    ),
    Mutant(
        "a removal takes the files of what is visible",
        "tierd/spool/spool.py",
        "grave = self._bury(self.path(part))",
        "grave = self.path(part) if self.path(part).exists() else None",
        _BY.format(50),
        "said to be gone",
    ),
    Mutant(
        "a quarantine is answered before it is durable",
        "tierd/spool/spool.py",
        """        sync_directory(target.parent)
        sync_left(home.parent)
""",
        "",
        _BY.format(54),
        "set aside in the spool",
    ),
    Mutant(
        "a pin is answered before it is durable",
        "tierd/spool/leftovers.py",
        """        if path.parent.is_dir():
            sync_directory(path.parent)
""",
        "",
        _BY.format(56),
        "pinned in the spool",
    ),
    Mutant(
        "a put is not durable before it is shown",
        "tierd/stores/file_tree.py",
        # With the hint, which has the kernel begin to write at once, so that on a quick disk nothing would show.
        """                os.fsync(fd)  # never retried, because after an error the kernel marks the lost pages clean
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # so that a read-back comes from the device
""",
        "",
        _BY.format(42),
        "visible and not whole",
    ),
    Mutant(
        "a put is answered before it is durable",
        "tierd/stores/file_tree.py",
        """dst_dir_fd=parent)
                        sync_directory(parent)
""",
        """dst_dir_fd=parent)
""",
        _BY.format(42),
        "though it was said to be there",
    ),
    Mutant(
        "a tier's chunks go before the manifest that names them",
        "tierd/daemon/tiers/prune.py",
        """            await store.delete(manifests)
        except DeleteRefused:
            marks.begun = False  # no chunk is being deleted, so the marks may be removed
            raise
        deleted(own)
        gone = [key async for key in _lying(store, run, going)]
        moved = [info.key async for info in store.scan(quarantine_prefix(run)) if _of(run, info.key) in going.to_delete]
        await store.delete(gone + moved)
""",
        """            pass
        except DeleteRefused:
            marks.begun = False  # no chunk is being deleted, so the marks may be removed
            raise
        deleted(own)
        gone = [key async for key in _lying(store, run, going)]
        moved = [info.key async for info in store.scan(quarantine_prefix(run)) if _of(run, info.key) in going.to_delete]
        await store.delete(gone + moved)
        await store.delete(manifests)
""",
        "power --seed 22 --trials 80",
        "visible and not whole",
    ),
    Mutant(
        "a fetched file is not durable before it is shown",
        "tierd/daemon/transfer/download_files.py",
        """        os.fsync(self.fd)
        self.close()
""",
        """        self.close()
""",
        _BY.format(46),
        "visible and not whole",
    ),
    Mutant(
        "a copy on a tier is set aside after it was taken away",
        "tierd/daemon/tiers/prune.py",
        """                await put_manifest(store, part.quarantine_key, data)  # an empty object is a mark
            if await manifest_bytes(store, part) != data:
                return False
            if time.monotonic() > ends_s:  # the timeout acts only at the next wait, and that is in the deletion
                raise late
            await store.delete([part.manifest_key])
""",
        """                pass
            if await manifest_bytes(store, part) != data:
                return False
            if time.monotonic() > ends_s:  # the timeout acts only at the next wait, and that is in the deletion
                raise late
            await store.delete([part.manifest_key])
            await put_manifest(store, part.quarantine_key, data)
""",
        _BY.format(54),
        "none is left of",
    ),
)
