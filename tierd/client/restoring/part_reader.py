"""This node's copy of a part: from a predecessor's memory, the spool, or the daemon and its tiers.

Invariant: returned bytes were verified on this read, in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from tierd.client.client_timings import ClientTimings
from tierd.client.restoring.device_uploads import DeviceUploads
from tierd.client.restoring.part_access import READ_ERRORS, PartAccess
from tierd.client.restoring.part_image import FindTargets, PartImage, image_with_header
from tierd.client.restoring.slot_ring import SlotRing, SlotsUnavailable
from tierd.client.restoring.tensor_locations import check_division, check_held, sibling_of
from tierd.client.restoring.verified_chunks import VerifiedChunks
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.core.errors import StateMismatch, TierdError
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import TENSORS, TREE, ChunkPlace, Manifest
from tierd.core.planning.place import SPOOL
from tierd.core.timeline.launch_chain import check_origin
from tierd.spool.arena import Arena
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import bad_chunks, check_bytes
from tierd.state.tensor_header import parse_layout, sibling_path

log = logging.getLogger("tierd")

MEMORY = "memory"  # stands in place of a tier's name

LoadedPart = tuple[Manifest, Mapping[str, memoryview], str]


class _PartInHand(NamedTuple):
    """A part of which chunks are brought into an image."""

    image: PartImage
    chunks: VerifiedChunks | None  # of the own part; None of another rank's, for which a place is searched each time

    @property
    def rank(self) -> int:
        return self.image.manifest.rank


class _SiblingFailed(Exception):
    """Another rank's part cannot be read. That says nothing of the own part's copies, so it passes their fallbacks."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def keep_tensors(image: PartImage, part: PartId, names: Collection[str]) -> None:
    """Forget what an image of another rank's file lacks, but for these tensors of the state of `part`.

    Its header is there. Raises `ManifestError` if it does not have such a tensor, `StateMismatch` if it is none.
    """
    rank = image.manifest.rank
    layout = parse_layout(image.files.get(TENSORS, b""), sibling_path(rank))
    check_held(part, rank, layout, *names)
    entries = (layout.entries[name] for name in names)
    image.keep_only((entry.offset, entry.offset + entry.nbytes) for entry in entries if entry.nbytes)


class PartReader(PartAccess):
    """Reads parts of a run, one after the other.

    Args:
        tiers: whether copies may exist beyond the spool. If not, the spool decides alone.
        line: asks for a snapshot that a predecessor left in memory; None if there cannot be one.
        keep: return files in memory. If not, files are only verified, and the daemon keeps their directory in the
            spool.
        uploads: copies files to devices while more is read.
        targets: finds live tensors that may receive bytes directly; None: none may.

    Attributes:
        arena: the memory that holds the returned files, if a predecessor left them there, or it is for a device.
        images: of the part that was returned last, and of its siblings; live tensors may still lack some of them, which
            `finish` brings.
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
        super().__init__(spool, tiers, timings)
        self.keep, self._line = keep, line
        self._uploads, self._targets = uploads, targets
        self.arena: Arena | None = None
        self._in_hand: list[_PartInHand] = []  # by rank
        self._ring: SlotRing | None = None
        self._place = SPOOL  # of the bytes of the part that was returned last
        self._readers = 1

    @property
    def images(self) -> tuple[PartImage, ...]:
        return tuple(in_hand.image for in_hand in self._in_hand)

    def obtain(self, part: PartId, *, direct: bool = False, node_ranks: Collection[int] = ()) -> LoadedPart:
        """Return a part's manifest, its files and the place of its bytes, with every byte verified on this read.

        Files of other ranks in which tensors of the part lie are among them, by `sibling_path`, with these tensors
        alone. With `direct`, chunks of live tensors alone are left out; `finish` brings them. `node_ranks` are the
        ranks of this node, if each obtains the part that it saved.

        Raises:
            CorruptChunk, ManifestError: every copy is proven corrupt, and all are quarantined; or the parts of the
                ranks do not belong together.
            ObjectNotFound: no place has a copy.
            StoreUnavailable, DaemonUnavailable: a place that may hold a right copy did not answer.
            FormatTooNew: the part was written by a newer tierd.
        """
        try:
            return self._obtain(part, direct, node_ranks)
        except _SiblingFailed as failure:
            raise failure.error from failure

    def _obtain(self, part: PartId, direct: bool, node_ranks: Collection[int]) -> LoadedPart:
        local: Exception | None = None
        self.forget()
        remembered = self._remembered(part) if self.keep else None
        if remembered:
            manifest, files = remembered
            self._in_hand = self._siblings(manifest, files, node_ranks)
            for sibling in self._in_hand:
                self._bring_early(sibling)
            return manifest, self._with_siblings(files), MEMORY

        def load(place: str) -> LoadedPart:
            return self._read(part, place, direct, node_ranks)

        # For a directory the daemon is asked in any case, because it then keeps the directory.
        if self.link is None or self.keep:
            try:
                return load(SPOOL)
            except READ_ERRORS as error:
                local = error.with_traceback(None)  # without its traceback, whose frames hold the bytes that were read
                self.forget()
            if self.link is not None and not self.spool.has(part):  # a fresh node, where nothing is wrong
                log.info("%s is fetched from the tiers", part)
                if self.is_streamable(part):
                    try:
                        self._ring = self.open_ring(part)
                        return self._load(self._ring, direct, node_ranks)
                    except SlotsUnavailable as error:
                        self.forget()
                        log.info("%s: the daemon fetches it into the spool first: %s", part, error)
        return self.put_right(part, local, load)

    def finish(self) -> str:
        """Bring what `obtain` left out into live tensors; return the place of the own part's bytes.

        Raises as `obtain`; the tensors are partly new then.
        """
        for in_hand in self._in_hand:
            if in_hand.image.missing:
                self._bring(in_hand, list(in_hand.image.missing))
        return self._place

    def _bring(self, in_hand: _PartInHand, places: Collection[ChunkPlace]) -> None:
        place = self.bring(in_hand.image, places, in_hand.chunks, self._readers)
        if in_hand.chunks is not None:
            self._place = place

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
        self.arena, self._in_hand = None, []
        self._end_ring()
        if self._uploads:
            self._uploads.begin()

    def _end_ring(self) -> None:
        if self._ring is not None:
            self._ring.release()
            self._ring = None

    def _read(self, part: PartId, place: str, direct: bool, node_ranks: Collection[int]) -> LoadedPart:
        if self.keep:
            return self._load(self.spool_chunks(part, place), direct, node_ranks)
        manifest = self.spool.manifest(part)
        for file in manifest.files:
            for _, _, defect in bad_chunks(self.spool.path(part) / file.path, file):
                raise defect
        return manifest, {}, place

    def _load(self, chunks: VerifiedChunks, direct: bool, node_ranks: Collection[int]) -> LoadedPart:
        uploads, manifest = self._uploads, chunks.manifest
        image = PartImage(manifest, uploads.memory if uploads else lambda file: None)
        image.bring_tree(chunks)
        image.bring_header(chunks)
        siblings = self._siblings(manifest, image.files, node_ranks)
        if isinstance(chunks, SlotRing):
            chunks.readers = self._readers
        own = _PartInHand(image, chunks)
        self._in_hand = sorted([own, *siblings], key=lambda in_hand: in_hand.rank)
        files = self._with_siblings(image.files)
        if direct and self._targets and not uploads and files.keys() >= {TREE, TENSORS}:
            with suppress(StateMismatch, RecursionError):  # reported when the whole part is there
                targets = self._targets(files)
                for in_hand in self._in_hand:
                    in_hand.image.choose(targets)
        # In the order of ranks, because the ranks of a node read the same chunks then at about the same time.
        for in_hand in self._in_hand:
            if in_hand is not own:
                self._bring_early(in_hand)
            elif uploads:
                uploads.bring(image, chunks)
                self.arena = uploads.arena
            else:
                image.bring(chunks, image.early())
        image.finish()
        self._place = chunks.place or SPOOL
        return manifest, files, self._place

    # -- other ranks' files -------------------------------------------------------------------------------------------

    def _siblings(
        self, manifest: Manifest, files: Mapping[str, memoryview], node_ranks: Collection[int]
    ) -> list[_PartInHand]:
        """Find other ranks' files in which tensors of a part lie, and bring their headers.

        Of `files`, the part's own, the header is read.
        """
        self._readers = 1
        if manifest.world_size == 1 or TENSORS not in files:
            return []
        try:
            by_rank = parse_layout(files[TENSORS]).elsewhere_by_rank()
        except StateMismatch:  # reported when the whole part is there
            return []
        self._readers = max(len({manifest.part.rank, *by_rank}.intersection(node_ranks)), 1)
        try:
            origins: dict[str, CheckpointId | None] = {}
            check_origin(manifest, origins)
            return [self._sibling(manifest, rank, names, origins) for rank, names in by_rank.items()]
        except Exception as error:
            raise _SiblingFailed(error) from error

    def _sibling(
        self, manifest: Manifest, rank: int, names: Collection[str], origins: dict[str, CheckpointId | None]
    ) -> _PartInHand:
        """Make an image of another rank's file, for the tensors `names` alone, and bring its header."""
        image = self.read(sibling_of(manifest.part, rank), image_with_header)
        check_origin(image.manifest, origins)
        check_division(manifest, image.manifest)
        keep_tensors(image, manifest.part, names)
        return _PartInHand(image, None)

    def _bring_early(self, in_hand: _PartInHand) -> None:
        if places := in_hand.image.early():
            try:
                self._bring(in_hand, places)
            except Exception as error:
                raise _SiblingFailed(error) from error
        in_hand.image.finish()

    def _with_siblings(self, files: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """Return the own part's files, with those of the siblings in hand."""
        siblings = (in_hand for in_hand in self._in_hand if in_hand.chunks is None)
        return {**files, **{sibling_path(sibling.rank): sibling.image.files[TENSORS] for sibling in siblings}}
