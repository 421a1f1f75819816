"""A save after the call: copy into a slot, hand over to the daemon or write here, and end durable or failed.

Invariant: one thread copies and one persists, both in the order of the calls; a slot passes from the first to the
second and back. No lock is held while training waits, so an interrupted caller leaves nothing locked. Every outcome is
recorded in the `Save`.
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

from tierd.client.saving.save_jobs import JobThread, Save, Stats, give_way
from tierd.client.saving.slots import Slot
from tierd.client.saving.snapshot import Snapshot
from tierd.client.saving.snapshot_handoff import CALM_GREETING, HandoffClient, PendingHandoff
from tierd.core.errors import ConfigError, DaemonUnavailable, SpoolUnusable, StateRefused, StepRefused, TornSnapshot
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.core.units import format_size
from tierd.logs import announce
from tierd.spool.arena import Arena, available
from tierd.spool.commit import CommittedPart, FileSource, SpaceMaker, write_making_room, write_part
from tierd.spool.direct_io import LARGE
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_error
from tierd.spool.stage import wait_for_writer
from tierd.state import cuda
from tierd.state.tensor_file import file_pieces

log = logging.getLogger("tierd")


class SavePipeline:
    """Take snapshots, one after the other, and end their saves, each with a call of `on_end`.

    `line` is the connection to the daemon; None if there is to be none. `room` is called if the disk is full.
    """

    def __init__(
        self,
        spool: Spool,
        slots: int,
        stats: Stats,
        line: HandoffClient | None,
        on_end: Callable[[Save, Exception | None], None],
        room: SpaceMaker | None = None,
    ) -> None:
        self._spool = spool
        self._stats = stats
        self._line = line
        self._on_end = on_end
        self._room = room
        self.slots = [Slot(number) for number in range(slots)]
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self.free.put(slot)
        self._persister = JobThread("tierd-persist")
        # Created later, so ended first: a snapshot that it still copies is still persisted.
        self._copier = JobThread("tierd-copy")
        self._unfinished: set[Snapshot] = set()
        self._logged = self._announced = False
        self._ahead_bytes = 0  # of an arena that are to be touched before the first save
        if line is not None:
            line.renew(CALM_GREETING)

    @property
    def busy(self) -> bool:
        """Whether a snapshot taken now would have to wait for a slot."""
        return len(self._unfinished) >= len(self.slots)

    def is_ready(self, size: int) -> bool:
        """Whether a snapshot taken now finds a free slot with touched memory."""
        return not self.busy and all(slot.has_room(size) for slot in self.slots)

    def behind(self, work: Callable[[], None]) -> None:
        """Run `work` in the copying thread, after the snapshots that were already taken are copied."""
        self._copier.give(work)

    def reserve(self, size: int, device: torch.device | None = None) -> None:
        """Prepare memory for a tensor file of `size` bytes behind training: touched, and pinned for `device`."""
        self._copier.give(lambda: self._reserve(size, device))
        if device is not None:
            self._copier.give(lambda: self._pin(device))

    def prefault_ahead(self, size: int, device: torch.device | None) -> None:
        """Touch memory behind training for a state of which `size` bytes are known, until a restore begins."""
        self._ahead_bytes = max(self._ahead_bytes, size)
        self._copier.give(lambda: self._prefault_ahead(device))

    def take(self, snapshot: Snapshot) -> None:
        """Copy and persist; `snapshot.wait` returns when training may continue."""
        self._unfinished.add(snapshot)
        try:
            self._copier.give(lambda: self._take(snapshot))
        except BaseException:
            self._unfinished.discard(snapshot)
            raise

    def adopt(self, arena: Arena | None) -> None:
        """Use the arena that a predecessor left, because it is already touched. No save may be running."""
        if arena is not None:
            self.slots[0].adopt(arena)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Return when every save has ended, or after `timeout_s`; return whether every save has.

        No more memory is touched ahead of a save.
        """
        self._ahead_bytes = 0
        begun_s = time.monotonic()
        if not self._copier.drain(timeout_s):
            return False
        return self._persister.drain(None if timeout_s is None else max(0.0, begun_s + timeout_s - time.monotonic()))

    def close(self) -> None:
        self._copier.close()
        self._persister.close()
        if self._line is not None:
            self._line.close()
        for slot in self.slots:
            slot.drop()
        self._stats.pinned_bytes = 0

    # -- the thread that copies ---------------------------------------------------------------------------------------

    def _reserve(self, size: int, device: torch.device | None) -> None:
        idle = [self.free.get() for _ in self.slots]
        for slot in idle:
            _prefault(slot, size, device)
        for slot in idle:
            self.free.put(slot)

    def _prefault_ahead(self, device: torch.device | None) -> None:
        """Touch a piece of an idle slot's memory, then let jobs that arrived meanwhile run first, such as a save."""
        for _ in self.slots:
            try:
                slot = self.free.get_nowait()
            except queue.Empty:
                return
            try:
                is_unfinished = slot.prefault_slice(self._ahead_bytes, device)
            finally:
                self.free.put(slot)
            if is_unfinished:
                with suppress(ConfigError):  # the pipeline is closing
                    self._copier.give(lambda: self._prefault_ahead(device))
                return

    def _pin(self, device: torch.device) -> None:
        """Pin a slice of an idle slot, then let jobs that arrived meanwhile run first, such as a save."""
        for _ in self.slots:
            try:
                slot = self.free.get_nowait()
            except queue.Empty:
                return  # the thread that returns the slot pins it
            try:
                cuda.api.enter(device)
                before = slot.pinned
                unpinned = slot.pin(device)
                self._stats.pinned_bytes = sum(any_slot.pinned for any_slot in self.slots)
            finally:
                self.free.put(slot)
            if unpinned or slot.pinned > before:
                with suppress(ConfigError):  # the pipeline is closing
                    self._copier.give(lambda: self._pin(device))
                return

    def _take(self, snapshot: Snapshot) -> None:
        slot = self.free.get()
        if not snapshot.is_released:
            self._stats.waited_s += time.perf_counter() - snapshot.asked_at_s
        error: Exception | None = None
        passed_on = False
        try:
            passed_on = self._copy(snapshot, slot)
        except Exception as raised:
            # A caller's mistake is raised if `save` still blocks. A lack of resources is recorded in the `Save`, as for
            # a full disk.
            if isinstance(raised, StateRefused) and not snapshot.is_released:
                error = raised
            elif snapshot.claim():  # otherwise `save` was interrupted, and its step may be saved again
                self._failed(snapshot.save, raised)
        finally:
            if not passed_on:
                snapshot.end(error)
                self._free_again(snapshot, slot)

    def _free_again(self, snapshot: Snapshot, slot: Slot) -> None:
        self._unfinished.discard(snapshot)
        self.free.put(slot)
        if snapshot.copies:
            device = snapshot.copies.devices[0]
            with suppress(ConfigError):  # the pipeline is closing
                self._copier.give(lambda: self._pin(device))

    def _copy(self, snapshot: Snapshot, slot: Slot) -> bool:
        """Copy the snapshot; return whether the slot went to the thread that persists."""
        layout = snapshot.capture.layout
        if not slot.reserve(layout.size, next(iter(snapshot.copies.devices), None)):
            if snapshot.is_released:  # the daemon fell silent meanwhile, and may still read the previous arena
                raise MemoryError(f"no memory for a snapshot of {layout.size} bytes is left; save again")
            self._stream(snapshot, slot)
            return False
        snapshot.copy(slot)
        if snapshot.deferred_names:
            snapshot.capture.check(snapshot.tree, give_way)  # concurrently with forward and backward
            snapshot.await_confirmation()
        if not snapshot.claim():
            return False
        assert slot.arena is not None
        if not snapshot.deferred_names:
            if not snapshot.capture.is_checked_soon(snapshot.tree):
                snapshot.end()  # training need not wait: the check reads nothing that training changes
            snapshot.capture.check(snapshot.tree)
        pending = None
        if self._line is not None:
            pending = self._line.hand_over(
                slot.number, slot.arena, snapshot.manifest, layout.size, snapshot.tree, snapshot.save
            )
        snapshot.end()
        files = {TENSORS: slot.image(layout), TREE: memoryview(snapshot.tree)}
        self._persister.give(lambda: self._persist(snapshot, slot, pending, files))
        return True

    def _stream(self, snapshot: Snapshot, slot: Slot) -> None:
        """Write a state that fits into no arena. `save` still blocks, because training must not change it meanwhile."""
        assert slot.arena is not None
        snapshot.catch_up()
        tree = snapshot.capture.tree()
        snapshot.capture.check(tree)
        files: dict[str, FileSource] = {TENSORS: _Stream(snapshot, slot.arena), TREE: tree}
        self._committed(snapshot.save, write_part(self._spool, snapshot.manifest, files))

    # -- the thread that persists -------------------------------------------------------------------------------------

    def _persist(
        self, snapshot: Snapshot, slot: Slot, pending: PendingHandoff | None, files: dict[str, memoryview]
    ) -> None:
        try:
            try:
                committed = self._answer(snapshot.manifest, slot, pending, files)
            finally:
                self._free_again(snapshot, slot)  # before the save ends, so that the next one finds it free
        except Exception as error:
            self._failed(snapshot.save, error)
        else:
            self._committed(snapshot.save, committed)

    def _answer(
        self, manifest: Manifest, slot: Slot, pending: PendingHandoff | None, files: dict[str, memoryview]
    ) -> CommittedPart:
        if pending is None or self._line is None:
            return self._write(manifest, files)
        try:
            committed = self._line.answer(pending)
            self._stats.handed_over += 1
            return committed
        except SpoolUnusable as error:
            log.warning("%s: the daemon says %s; it is tried here", manifest.part, error)
            try:
                return self._write(manifest, files)
            except StepRefused:  # the rename happened, but may not be durable: raise the daemon's error
                raise error from None
        except DaemonUnavailable as error:
            log.warning("%s: %s; it is persisted here", manifest.part, error)
            unanswered = error
        # A daemon that fell silent may still be reading this arena, so its content must not change.
        slot.drop()
        prefaulting = self._prefault_spare_arena(slot, len(files[TENSORS]))
        try:
            return self._write_beside(manifest, pending, files, unanswered)
        finally:
            if prefaulting.ident:
                prefaulting.join()

    def _write_beside(
        self, manifest: Manifest, pending: PendingHandoff, files: dict[str, memoryview], unanswered: DaemonUnavailable
    ) -> CommittedPart:
        """Write what a silent daemon may be writing, too; the first rename wins.

        A daemon that was stopped between its rename and its fsync takes the rename back if the fsync fails, however
        late it wakes. So a part that it renamed counts only after the daemon released its lock.
        """
        settled_s = self._line.timings.settled_s if self._line else 0.0
        while True:
            try:
                return self._write(manifest, files)
            except StepRefused:
                log.debug("%s: the daemon has renamed it into place, and has not answered", manifest.part)
            try:
                if wait_for_writer(self._spool.path(manifest.part), settled_s):
                    return CommittedPart(size=pending.size, direct=False, recycled=False)
            except TimeoutError:
                raise unanswered from None

    def _prefault_spare_arena(self, slot: Slot, size: int) -> threading.Thread:
        """Touch other memory for `slot` concurrently with the write, so that the next save need not wait for it.

        The same is done for idle slots whose arenas the daemon may still be reading. If memory is short, the next save
        does it, because it may find more.
        """

        def prefault() -> None:
            if available() > size:
                _prefault(slot, size)
            for _ in self.slots:
                with suppress(queue.Empty):
                    idle = self.free.get_nowait()
                    try:
                        if idle.arena is not None and idle.arena.shared and available() > size:
                            _prefault(idle, size)
                    finally:
                        self.free.put(idle)

        thread = threading.Thread(target=prefault, name="tierd-anew", daemon=True)
        with suppress(RuntimeError):  # the interpreter is ending, or no thread could be started: the next save does it
            thread.start()
        return thread

    def _write(self, manifest: Manifest, files: dict[str, memoryview]) -> CommittedPart:
        is_stopped = self._line is not None and self._line.is_backing_off  # such a daemon makes no room
        room = None if is_stopped else self._room
        return write_making_room(lambda: write_part(self._spool, manifest, files), manifest.part, files, room)

    def _committed(self, save: Save, committed: CommittedPart) -> None:
        self._log_indirect(committed)
        if save.part.rank == 0:  # by default only the first one is shown, because a line for each would be many
            checkpoint, size = save.part.checkpoint, format_size(committed.size)
            log_save, self._announced = (log.info if self._announced else announce), True
            log_save("run %s: saved step %d (%s) in %s", checkpoint.run, checkpoint.step, size, self._spool.root)
        self._on_end(save, None)

    def _log_indirect(self, committed: CommittedPart) -> None:
        stats = self._stats
        stats.persisted_bytes += committed.size
        stats.direct += committed.direct
        stats.recycled += committed.recycled
        if not committed.direct and not self._logged and committed.size >= LARGE:
            self._logged = True
            log.info("spool %s: its file system takes no direct I/O; saves go through the page cache", self._spool.root)

    def _failed(self, save: Save, error: Exception) -> None:
        self._stats.failed += 1
        if isinstance(error, OSError):
            error = spool_error(error, f"spool {self._spool.root}", self._spool.root)
        log.error("save failed, training goes on: %s: %s", save.part, error)
        self._on_end(save, error)


def _prefault(slot: Slot, size: int, device: torch.device | None = None) -> None:
    try:
        slot.reserve(size, device)
    except Exception as error:  # a save reports it, if it still matters then
        log.warning("no arena of %d bytes was made ready: %s", size, error)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The image of a tensor file that is never in memory as a whole. It can be iterated more than once.

    Invariant: no pass ends that read a tensor after `save` was interrupted, because training changes tensors then. A
    claim is not enough: a second pass, after EIO, reads them again although the first one has claimed the snapshot.
    """

    snapshot: Snapshot
    arena: Arena

    def __len__(self) -> int:
        return self.snapshot.capture.layout.size

    def __iter__(self) -> Iterator[memoryview]:
        capture = self.snapshot.capture
        for piece in file_pieces(capture.layout, capture.tensors, self.arena.view):
            self._refuse_changes()  # soon, because the next save waits for this thread
            yield piece
        self.snapshot.claim()
        self._refuse_changes()

    def _refuse_changes(self) -> None:
        if self.snapshot.interrupted:
            raise TornSnapshot("save() was interrupted while it wrote its state: the checkpoint may be a mixture")
