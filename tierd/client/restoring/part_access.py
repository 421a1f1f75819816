"""The chunks of any part, wherever this node has them: the spool, or the daemon's tiers; and the repair of a bad copy.

Invariant: a part counts as corrupt only after every place that could hold it was asked. A place that cannot be asked is
an error, not corruption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from tierd.client.client_timings import ClientTimings
from tierd.client.restoring.part_fetch import FetchProgress, fetched_tiers
from tierd.client.restoring.part_image import PartImage
from tierd.client.restoring.slot_ring import SlotMemory, SlotRing, SlotsUnavailable
from tierd.client.restoring.verified_chunks import SpoolChunks, VerifiedChunks
from tierd.core.errors import CorruptChunk, DaemonUnavailable, ManifestError, ObjectNotFound, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import ChunkPlace
from tierd.core.planning.place import SPOOL
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Fetch
from tierd.spool.file_io import drop_cached
from tierd.spool.spool import Spool

log = logging.getLogger("tierd")
T = TypeVar("T")

READ_ERRORS = (CorruptChunk, ManifestError, ObjectNotFound, OSError)  # of a read of the spool


class PartAccess:
    """This node's access to the parts of a run.

    Args:
        tiers: whether copies may exist beyond the spool. If not, the spool decides alone.

    Attributes:
        link: the connection to the daemon, which keeps fetched directories while it is open; None without a daemon.
        alone: why there is no connection although tiers may have copies; empty without tiers.
        odd: by checkpoint, what lies in the place of its directory, or of a part's, in this spool, if that is no
            directory. Such a copy counts as absent.
    """

    def __init__(self, spool: Spool, tiers: bool, timings: ClientTimings) -> None:
        self.spool, self._tiers, self._timings = spool, tiers, timings
        self.link: DaemonConnection | None = None
        self.alone = ""
        self.odd: Mapping[CheckpointId, str] = {}
        self._memory = SlotMemory()

    def is_streamable(self, part: PartId) -> bool:
        """Whether a ring may bring this part: nothing of it is in the spool, and a daemon can be asked.

        What an interrupted fetch left is used by the next one, which also replaces what is in the way.
        """
        return (
            self.link is not None
            and not self.spool.has(part)
            and not self.spool.fetch_directory(part).exists()
            and part.checkpoint not in self.odd
        )

    def open_ring(self, part: PartId) -> SlotRing:
        """Begin to read a part from the tiers past the spool. Raises `SlotsUnavailable`."""
        return SlotRing(self.spool, part, FetchProgress(part, self._timings.stalled_s), self._memory)

    def spool_chunks(self, part: PartId, place: str = SPOOL) -> SpoolChunks:
        """Begin to read a part in the spool. Raises as `Spool.manifest`."""
        return SpoolChunks(self.spool.path(part), self.spool.manifest(part), place, self._memory)

    def read(
        self, part: PartId, use: Callable[[VerifiedChunks], T], chunks: VerifiedChunks | None = None, readers: int = 1
    ) -> T:
        """Return what `use` returns, which is called with a part's chunks, and again if a place has them wrong.

        `chunks` are those to use first, if they are at hand. `readers` is as `SlotRing.readers`.

        Raises:
            CorruptChunk, ManifestError: every copy is proven corrupt; all are quarantined.
            ObjectNotFound: no place has a copy.
            StoreUnavailable, DaemonUnavailable: a place that may hold a right copy did not answer.
        """
        local: Exception | None = None
        try:
            if chunks is not None:
                return use(chunks)
            if not self.is_streamable(part):
                return use(self.spool_chunks(part))
            ring = self.open_ring(part)
            ring.readers = readers
            try:
                return use(ring)
            finally:
                ring.release()
        except SlotsUnavailable as error:
            log.info("%s: the daemon fetches it into the spool: %s", part, error)
        except READ_ERRORS as error:
            local = error.with_traceback(None)  # without its traceback, whose frames hold the bytes that were read
        return self.put_right(part, local, lambda place: use(self.spool_chunks(part, place)))

    def bring(
        self, image: PartImage, places: Collection[ChunkPlace], chunks: VerifiedChunks | None = None, readers: int = 1
    ) -> str:
        """Bring chunks into the image of a part, and return where they came from. `chunks` and errors as for `read`."""

        def use(chunks: VerifiedChunks) -> str:
            if not chunks.manifest.same_content(image.manifest):
                part = image.manifest.part
                raise StoreUnavailable(f"{part}: its content is another one than when this restore began to read it")
            image.bring(chunks, places)
            return chunks.place or SPOOL

        return self.read(image.manifest.part, use, chunks, readers)

    def put_right(self, part: PartId, local: Exception | None, read: Callable[[str], T]) -> T:
        """Make the spool's copy of a part whole, and return what `read` reads from it, given the place of the bytes.

        `local` says what is wrong with the spool's copy, if that is known. Raises as `PartAccess.read`.
        """
        self._memory.clear()  # because the repair may take long
        link = self.link
        if link is None:
            assert local is not None
            return self._alone(part, local, read)
        if local is not None and self.spool.has(part):
            log.warning("%s is not whole in the spool, asking the tiers: %s", part, local)
        try:
            with FetchProgress(part, self._timings.stalled_s) as fetching:
                tiers = fetched_tiers(part, link.ask(Fetch(part=part), on_progress=fetching))
        except CorruptChunk as error:
            covers_spool = local is None or SPOOL in str(error)
            raise CorruptChunk(str(error) if covers_spool else f"local: {local}; {error}") from error
        try:
            return read(tiers[0] if tiers else SPOOL)
        except READ_ERRORS as error:
            # Some copy is right, because otherwise the fetch would have reported corruption. So this disk is failing,
            # which is no reason to try an older checkpoint.
            raise StoreUnavailable(f"{part} was just repaired, and reads back wrong from the spool: {error}") from error

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
