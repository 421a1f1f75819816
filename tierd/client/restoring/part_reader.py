"""This node's copy of a part: from a predecessor's memory, the spool, or the daemon and its tiers.

Invariant: returned bytes were verified on this read, in this process. A part counts as corrupt only after every place
that could hold it was asked. A place that cannot be asked is an error, not corruption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from tierd.client.client_timings import ClientTimings
from tierd.client.restoring.device_uploads import DeviceUploads
from tierd.client.restoring.part_fetch import FetchProgress
from tierd.client.restoring.part_image import FindTargets, PartImage
from tierd.client.restoring.slot_ring import SlotRing, SlotsUnavailable
from tierd.client.restoring.verified_chunks import SpoolChunks, VerifiedChunks
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.core.errors import (
    CorruptChunk,
    DaemonUnavailable,
    ManifestError,
    ObjectNotFound,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.place import SPOOL
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Fetch
from tierd.spool.arena import Arena
from tierd.spool.file_io import drop_cached
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import bad_chunks, check_bytes

log = logging.getLogger("tierd")

MEMORY = "memory"  # stands in place of a tier's name

LoadedPart = tuple[Manifest, Mapping[str, memoryview], str]
T = TypeVar("T")
_READ_ERRORS = (CorruptChunk, ManifestError, ObjectNotFound, OSError)  # of a read of the spool


class PartReader:
    """Reads parts of a run, one after the other.

    Args:
        tiers: whether copies may exist beyond the spool. If not, the spool decides alone.
        line: asks for a snapshot that a predecessor left in memory; None if there cannot be one.
        keep: return files in memory. If not, files are only verified, and the daemon keeps their directory in the
            spool.
        uploads: copies files to devices while more is read.
        targets: finds live tensors that may receive bytes directly; None: none may.

    Attributes:
        link: the connection to the daemon, which keeps fetched directories while it is open; None without a daemon.
        alone: why there is no connection although tiers may have copies; empty without tiers.
        arena: the memory that holds the returned files, if a predecessor left them there, or it is for a device.
        image: of the part that was returned last, if live tensors still lack some of it; `finish` brings it.
        odd: by checkpoint, what lies in the place of its directory, or of a part's, in this spool, if that is no
            directory. Such a copy counts as absent.
    """

    def __init__(
        self,
        spool: Spool,
        tiers: bool,
        line: HandoffClient | None,
        keep: bool,
        uploads: DeviceUploads | None,
        targets: FindTargets | None,
        timings: ClientTimings,
    ) -> None:
        self.spool, self.keep = spool, keep
        self._tiers, self._line = tiers, line
        self._uploads, self._targets, self._timings = uploads, targets, timings
        self.link: DaemonConnection | None = None
        self.alone = ""
        self.odd: Mapping[CheckpointId, str] = {}
        self.arena: Arena | None = None
        self.image: PartImage | None = None
        self._ring: SlotRing | None = None
        self._place = SPOOL  # of the bytes of the part that was returned last

    def obtain(self, part: PartId, *, direct: bool = False) -> LoadedPart:
        """Return a part's manifest, its files and the place of its bytes, with every byte verified on this read.

        With `direct`, chunks of live tensors alone are left out; `finish` brings them.

        Raises:
            CorruptChunk, ManifestError: every copy is proven corrupt; all are quarantined.
            ObjectNotFound: no place has a copy.
            StoreUnavailable, DaemonUnavailable: a place that may hold a right copy did not answer.
            FormatTooNew: the part was written by a newer tierd.
        """
        local: Exception | None = None
        self.forget()
        remembered = self._remembered(part) if self.keep else None
        if remembered:
            return *remembered, MEMORY
        # For a directory the daemon is asked in any case, because it then keeps the directory.
        if self.link is None or self.keep:
            try:
                return self._read(part, SPOOL, direct=direct)
            except _READ_ERRORS as error:
                local = error.with_traceback(None)  # without its traceback, whose frames hold the bytes that were read
                self.forget()
            if self.link is not None and not self.spool.has(part):  # a fresh node, where nothing is wrong
                log.info("%s is fetched from the tiers", part)
                # What an interrupted fetch left is used by the next one, which also replaces what is in the way.
                if not self.spool.fetch_directory(part).exists() and part.checkpoint not in self.odd:
                    try:
                        return self._stream(part, direct=direct)
                    except SlotsUnavailable as error:
                        self.forget()
                        log.info("%s: the daemon fetches it into the spool first: %s", part, error)
        return self._put_right(part, local, lambda place: self._read(part, place, direct=direct))

    def finish(self, part: PartId) -> str:
        """Bring what `obtain` left out of `part` into live tensors; return the place of its bytes.

        Raises as `obtain`; the tensors are partly new then.
        """
        image, ring = self.image, self._ring
        assert image is not None

        def read(place: str) -> str:
            manifest = self.spool.manifest(part)
            if not manifest.same_content(image.manifest):
                raise StoreUnavailable(f"{part}: its content is another one than when this restore began to read it")
            image.bring(SpoolChunks(self.spool.path(part), manifest, place), list(image.missing))
            return place

        local: Exception | None = None
        try:
            if ring is None:
                return read(self._place)
            image.bring(ring, list(image.missing))
            return ring.place
        except SlotsUnavailable as error:
            log.info("%s: the daemon fetches it into the spool: %s", part, error)
            self._end_ring()
        except _READ_ERRORS as error:
            local = error.with_traceback(None)
        return self._put_right(part, local, read)

    def _put_right(self, part: PartId, local: Exception | None, read: Callable[[str], T]) -> T:
        """Make the spool's copy of a part whole, and return what `read` reads from it, given the place of the bytes.

        `local` says what is wrong with the spool's copy, if that is known.
        """
        link = self.link
        if link is None:
            assert local is not None
            return self._alone(part, local, read)
        if local is not None and self.spool.has(part):
            log.warning("%s is not whole in the spool, asking the tiers: %s", part, local)
        try:
            with FetchProgress(part, self._timings.stalled_s) as fetching:
                tiers = link.ask(Fetch(part=part), on_progress=fetching)["tiers"]
        except CorruptChunk as error:
            covers_spool = local is None or SPOOL in str(error)
            raise CorruptChunk(str(error) if covers_spool else f"local: {local}; {error}") from error
        try:
            return read(tiers[0] if tiers else SPOOL)
        except _READ_ERRORS as error:
            # Some copy is right, because otherwise the fetch would have reported corruption. So this disk is failing,
            # which is no reason to try an older checkpoint.
            raise StoreUnavailable(f"{part} was just repaired, and reads back wrong from the spool: {error}") from error

    def _remembered(self, part: PartId) -> tuple[Manifest, Mapping[str, memoryview]] | None:
        """Read the part from a predecessor's memory, with every byte compared with its manifest in the spool."""
        recalled = self._line.recall(part) if self._line else None
        if recalled is None:
            return None
        try:
            manifest = self.spool.manifest(part)
            if {file.path for file in manifest.files} != recalled.files.keys():
                return None
            if self._uploads:
                self._uploads.check(recalled.arena, recalled.files, manifest)
            else:
                for file in manifest.files:
                    check_bytes(recalled.files[file.path], file)
        except (TierdError, OSError) as error:  # for example, the predecessor died while it overwrote that memory
            log.info("%s is not whole in memory, and read from the spool: %s", part, error)
            self.forget()
            return None
        self.arena = recalled.arena
        return manifest, recalled.files

    def forget(self) -> None:
        """Release the memory of another copy or another part, once nothing is copied from it any more."""
        self.arena = self.image = None
        self._end_ring()
        if self._uploads:
            self._uploads.begin()

    def _end_ring(self) -> None:
        if self._ring is not None:
            self._ring.release()
            self._ring = None

    def _alone(self, part: PartId, local: Exception, read: Callable[[str], T]) -> T:
        if self._tiers:
            raise DaemonUnavailable(
                f"{part} cannot be read from the spool ({local}), and whether a tier has it right cannot be asked: "
                f"{self.alone}. Restoring an older step is your decision: restore(state, step=…)"
            ) from local
        if isinstance(local, ObjectNotFound):
            raise local
        if isinstance(local, OSError):
            raise StoreUnavailable(f"{part}: the spool cannot be read: {local}") from local
        drop_cached(self.spool.path(part))
        try:
            return read(SPOOL)  # right on the disk: only the first read was wrong
        except (CorruptChunk, ManifestError) as error:
            local = error.with_traceback(None)
        except OSError as error:
            raise StoreUnavailable(f"{part}: the spool cannot be read: {error}") from error
        self.spool.quarantine(part)
        raise CorruptChunk(f"local: {local}") from local

    def _read(self, part: PartId, place: str, *, direct: bool) -> LoadedPart:
        manifest = self.spool.manifest(part)
        if self.keep:
            return self._load(SpoolChunks(self.spool.path(part), manifest, place), direct=direct)
        for file in manifest.files:
            for _, _, defect in bad_chunks(self.spool.path(part) / file.path, file):
                raise defect
        return manifest, {}, place

    def _stream(self, part: PartId, *, direct: bool) -> LoadedPart:
        """Read a part from the tiers past the spool. Raises `SlotsUnavailable`, which says nothing about the part."""
        ring = self._ring = SlotRing(self.spool, part, FetchProgress(part, self._timings.stalled_s))
        return self._load(ring, direct=direct)

    def _load(self, chunks: VerifiedChunks, *, direct: bool) -> LoadedPart:
        uploads = self._uploads
        image = PartImage(chunks.manifest, uploads.memory if uploads else lambda file: None)
        if uploads:
            uploads.bring(image, chunks)
            self.arena = uploads.arena
        elif direct and self._targets:
            image.bring_all_but_direct(chunks, self._targets)
        else:
            image.bring(chunks, list(image.missing))
        image.finish()
        self.image = image if image.missing else None
        self._place = chunks.place or SPOOL
        return chunks.manifest, image.files, self._place
