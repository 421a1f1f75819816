"""The way of a save behind the call: copied into a slot, handed to the daemon or written here, durable or failed.

Law: one thread copies, one persists, both in the order of the calls; a slot goes from the one to the other and back.
No lock is held while training waits, so an interrupted caller leaves nothing behind. Every end is the `Save`'s.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from tierd.arena import Arena, available
from tierd.client import cuda
from tierd.client.handoff import CALM_GREETING, Given, HandOff
from tierd.client.save import Save, Stats
from tierd.client.slots import Slot
from tierd.client.snapshot import Snapshot
from tierd.client.tensorfile import pieces
from tierd.client.turns import give_way
from tierd.client.worker import Worker
from tierd.commit import Room, Source, Written, write_part, write_with_room
from tierd.core.errors import ConfigError, DaemonUnavailable, SpoolUnusable, StateRefused, StepRefused
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.device import LARGE
from tierd.persist import sync_directory
from tierd.spool import Spool, condition

log = logging.getLogger("tierd")


class Pipeline:
    """Takes snapshots in, one after the other, and ends their saves.

    Args:
        slots: how many snapshots may be in memory at a time.
        line: the way to the daemon; None where there is none to be.
        ended: called with every save that ends, and why it failed if it did.
        room: asked by the thread that persists where the disk is full.
    """

    def __init__(
        self,
        spool: Spool,
        slots: int,
        stats: Stats,
        line: HandOff | None,
        ended: Callable[[Save, Exception | None], None],
        room: Room | None = None,
    ) -> None:
        self._spool = spool
        self._stats = stats
        self._line = line
        self._ended = ended
        self._room = room
        self._slots = [Slot(number) for number in range(slots)]
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._persister = Worker("tierd-persist")
        self._copier = Worker("tierd-copy")  # made later, so ended first: what it still copies is still persisted
        self._unfinished: set[Snapshot] = set()
        self._told = False
        if line is not None:
            line.renew(CALM_GREETING)

    @property
    def busy(self) -> bool:
        """Whether a snapshot taken now would have to wait for a slot."""
        return len(self._unfinished) >= len(self._slots)

    def is_ready(self, size: int) -> bool:
        """Whether a snapshot of `size` bytes that is taken now finds a slot, and memory in it."""
        return not self.busy and all(slot.has(size) for slot in self._slots)

    def behind(self, work: Callable[[], None]) -> None:
        """Do `work` after the snapshots that were taken are copied, in their thread."""
        self._copier.give(work)

    def reserve(self, size: int, device: torch.device | None = None) -> None:
        """Have memory for a tensor file of `size` bytes ready, touched behind training, and pinned for `device`."""
        self._copier.give(lambda: self._reserve(size))
        if device is not None:
            self._copier.give(lambda: self._pin(device))

    def take(self, snapshot: Snapshot) -> None:
        """Copy and persist; `snapshot.wait` says when training may go on."""
        self._unfinished.add(snapshot)
        try:
            self._copier.give(lambda: self._take(snapshot))
        except BaseException:
            self._unfinished.discard(snapshot)
            raise

    def adopt(self, arena: Arena | None) -> None:
        """Use the arena of a predecessor, if it left one: it is touched already. Nothing may be under way."""
        if arena is not None:
            self._slots[0].adopt(arena)

    def drain(self) -> None:
        """Return when every save has ended."""
        self._copier.drain()
        self._persister.drain()

    def close(self) -> None:
        self._copier.close()
        self._persister.close()
        if self._line is not None:
            self._line.close()
        for slot in self._slots:
            slot.drop()
        self._stats.pinned_bytes = 0

    # -- the thread that copies ---------------------------------------------------------------------------------------

    def _reserve(self, size: int) -> None:
        idle = [self._free.get() for _ in self._slots]
        for slot in idle:
            _fit(slot, size)
        for slot in idle:
            self._free.put(slot)

    def _pin(self, device: torch.device) -> None:
        """Pin a slice of a slot that nobody uses, then give way to what was given meanwhile, such as a save."""
        for _ in self._slots:
            try:
                slot = self._free.get_nowait()
            except queue.Empty:
                return  # who puts it back sees to it
            try:
                cuda.api.enter(device)
                before = slot.pinned
                left = slot.pin(device)
                self._stats.pinned_bytes = sum(other.pinned for other in self._slots)
            finally:
                self._free.put(slot)
            if left or slot.pinned > before:
                with suppress(ConfigError):  # the pipeline is closing
                    self._copier.give(lambda: self._pin(device))
                return

    def _take(self, snapshot: Snapshot) -> None:
        slot = self._free.get()
        if not snapshot.returned:
            self._stats.waited_s += time.perf_counter() - snapshot.asked
        error: Exception | None = None
        passed_on = False
        try:
            passed_on = self._copy(snapshot, slot)
        except Exception as raised:
            # The caller's mistake is raised, while it can be; what the system lacks is a value, as on a full disk.
            if isinstance(raised, StateRefused) and not snapshot.returned:
                error = raised
            else:
                self._failed(snapshot.save, raised)
        finally:
            if not passed_on:
                snapshot.done(error)
                self._free_again(snapshot, slot)

    def _free_again(self, snapshot: Snapshot, slot: Slot) -> None:
        self._unfinished.discard(snapshot)
        self._free.put(slot)
        if snapshot.copies:
            device = snapshot.copies.devices[0]
            with suppress(ConfigError):  # the pipeline is closing
                self._copier.give(lambda: self._pin(device))

    def _copy(self, snapshot: Snapshot, slot: Slot) -> bool:
        """Whether the slot went on to the thread that persists."""
        layout = snapshot.capture.layout
        if not slot.fit(layout.size):
            if snapshot.returned:  # the daemon fell silent in between, and holds the arena that was there
                raise MemoryError(f"no memory for a snapshot of {layout.size} bytes is left; save again")
            self._stream(snapshot, slot)
            return False
        snapshot.copy(slot)
        if snapshot.late:
            snapshot.capture.check(snapshot.tree, give_way)  # beside forward and backward
            snapshot.await_confirmation()
        if not snapshot.claim():
            return False
        assert slot.arena is not None
        if not snapshot.late:
            if not snapshot.capture.is_checked_soon(snapshot.tree):
                snapshot.done()  # training does not wait for that, because nothing of it reads what training changes
            snapshot.capture.check(snapshot.tree)
        given = None
        if self._line is not None:
            given = self._line.give(slot.number, slot.arena, snapshot.manifest, layout.size, snapshot.tree)
        snapshot.done()
        files = {TENSORS: slot.image(layout), TREE: memoryview(snapshot.tree)}
        self._persister.give(lambda: self._persist(snapshot, slot, given, files))
        return True

    def _stream(self, snapshot: Snapshot, slot: Slot) -> None:
        """Write a state that no arena holds while `save` still blocks; nothing of it changes meanwhile."""
        assert slot.arena is not None
        snapshot.catch_up()
        tree = snapshot.capture.tree()
        snapshot.capture.check(tree)
        files: dict[str, Source] = {TENSORS: _Stream(snapshot, slot.arena), TREE: tree}
        if snapshot.claim():
            self._end(snapshot.save, lambda: write_part(self._spool, snapshot.manifest, files))

    # -- the thread that persists -------------------------------------------------------------------------------------

    def _persist(self, snapshot: Snapshot, slot: Slot, given: Given | None, files: dict[str, memoryview]) -> None:
        manifest = snapshot.manifest
        try:
            self._end(snapshot.save, lambda: self._answer(manifest, slot, given, files))
        finally:
            self._free_again(snapshot, slot)

    def _answer(self, manifest: Manifest, slot: Slot, given: Given | None, files: dict[str, memoryview]) -> Written:
        if given is None or self._line is None:
            return self._write(manifest, files)
        try:
            written = self._line.answer(given)
            self._stats.handed_over += 1
            return written
        except SpoolUnusable as error:
            log.warning("%s: the daemon says %s; it is tried here", manifest.part, error)
            try:
                return self._write(manifest, files)
            except StepRefused:  # it was renamed into place, and may not stay there: the daemon's error says so
                raise error from None
        except DaemonUnavailable as error:
            log.warning("%s: %s; it is persisted here", manifest.part, error)
        # A daemon that only fell silent may still be reading: what it reads must stay what it was given.
        slot.drop()
        anew = self._anew(slot, len(files[TENSORS]))
        try:
            return self._write(manifest, files)
        except StepRefused:
            # The daemon had renamed it into place, and ended before it could say so.
            for directory in list(self._spool.path(manifest.part).parents)[:3]:
                sync_directory(directory)
            return Written(size=given.size, direct=False, recycled=False)
        finally:
            if anew.ident:
                anew.join()

    def _anew(self, slot: Slot, size: int) -> threading.Thread:
        """Touch other memory for `slot`, beside the write: the next save would wait for it while training does.

        The same for idle slots whose arenas the daemon may still be reading. Where memory is short that is left to the
        next save, because it may find more.
        """

        def fit() -> None:
            if available() > size:
                _fit(slot, size)
            for _ in self._slots:
                with suppress(queue.Empty):
                    idle = self._free.get_nowait()
                    try:
                        if idle.arena is not None and idle.arena.shared and available() > size:
                            _fit(idle, size)
                    finally:
                        self._free.put(idle)

        thread = threading.Thread(target=fit, name="tierd-anew", daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending, or no thread is to be had: the next save does it
            thread.start()
        return thread

    def _write(self, manifest: Manifest, files: dict[str, memoryview]) -> Written:
        room = None if self._line is not None and self._line.stopped else self._room  # who is stopped makes none
        return write_with_room(lambda: write_part(self._spool, manifest, files), manifest.part, files, room)

    def _end(self, save: Save, persist: Callable[[], Written]) -> None:
        try:
            written = persist()
        except Exception as error:
            self._failed(save, error)
        else:
            self._tell(written)
            self._ended(save, None)

    def _tell(self, written: Written) -> None:
        stats = self._stats
        stats.persisted_bytes += written.size
        stats.direct += written.direct
        stats.recycled += written.recycled
        if not written.direct and not self._told and written.size >= LARGE:
            self._told = True
            log.info("spool %s: its file system takes no direct I/O; saves go through the page cache", self._spool.root)

    def _failed(self, save: Save, error: Exception) -> None:
        self._stats.failed += 1
        log.error("save failed, training goes on: %s: %s", save.part, error)
        self._ended(save, condition(error, f"spool {self._spool.root}") if isinstance(error, OSError) else error)


def _fit(slot: Slot, size: int) -> None:
    try:
        slot.fit(size)
    except Exception as error:  # a save will say so, if it matters then
        log.warning("no arena of %d bytes was made ready: %s", size, error)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The image of a tensor file that is never in memory whole; can be gone through again."""

    snapshot: Snapshot
    arena: Arena

    def __len__(self) -> int:
        return self.snapshot.capture.layout.size

    def __iter__(self) -> Iterator[memoryview]:
        capture = self.snapshot.capture
        return pieces(capture.layout, capture.tensors, self.arena.view)
