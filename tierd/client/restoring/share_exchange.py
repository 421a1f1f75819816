"""A part whose replicated chunks the ranks of several nodes read from a tier once, and send each other.

Invariants:

- Every rank has read and verified all that it sends before any rank begins to send. So no rank waits in a collective
  for another one's I/O.
- A rank returns only bytes whose digests it has compared itself, by manifests that it has read itself.
- An exchange that fails costs time alone: a rank for which it failed reads from the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec
import xxhash

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.consensus import text_of
from tierd.client.restoring.part_access import PartAccess
from tierd.client.restoring.part_image import PartImage, image_with_header
from tierd.client.restoring.part_reader import keep_tensors
from tierd.client.restoring.tensor_locations import check_division, sibling_of
from tierd.core.errors import CorruptChunk, DaemonSilent, ManifestError, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import TENSORS, ChunkPlace, Manifest
from tierd.core.planning.place import SPOOL
from tierd.core.replicas.exchange_plan import ExchangePlan, ShareOffer, exchange_plans, reader_of_chunks
from tierd.core.timeline.launch_chain import check_origin
from tierd.spool.file_io import digest
from tierd.state.tensor_header import parse_layout, sibling_path

log = logging.getLogger("tierd")


class ShareReady(msgspec.Struct, frozen=True):
    """Whether a rank holds all that it sends next; `error` says why not."""

    error: str = ""


class _Piece(NamedTuple):
    """A chunk that is exchanged, and the rank that sends it."""

    sender: int
    image: PartImage
    where: ChunkPlace

    @property
    def memory(self) -> memoryview:
        return self.image.chunk_memory(self.where)

    def verify(self) -> None:
        """Raise `StoreUnavailable` if these are not the bytes of the manifest."""
        if digest(self.memory) != self.image.manifest.chunk(self.where).xxh3_128:
            raise StoreUnavailable(f"rank {self.sender} sent wrong bytes of chunk {self.where[1]}")
        self.image.note_brought(self.where)


class ShareExchange:
    """Reads one part of a checkpoint that as many ranks saved as restore it. All ranks make the same calls.

    `node` is the lowest rank of this rank's node.

    Attributes:
        manifest: that of the part, after a successful `read`.
        place: where the bytes came from that this rank has read.
    """

    def __init__(self, ranks: Ranks, access: PartAccess, part: PartId, node: int) -> None:
        self._ranks, self._access, self._part, self._node = ranks, access, part, node
        self._images: dict[int, PartImage] = {}  # by rank
        self._elsewhere: dict[int, list[str]] = {}  # by rank, which tensors of this part's state lie in its file
        self.place = SPOOL

    @property
    def manifest(self) -> Manifest:
        return self._images[self._part.rank].manifest

    def read(self) -> dict[str, memoryview] | None:
        """Return the part's files, and those of its siblings by `sibling_path`, in which all that its tree names is
        verified.

        None if nothing is gained, or the exchange failed: then the part is to be read as usual. Raises as
        `Ranks.gather`; `CorruptChunk` or `ManifestError` if this rank has proven it, because the copies are quarantined
        then, and the next read would only find that they are gone; and `DaemonSilent`, for which it would only wait.
        """
        offer, error = self._offer()
        offers = self._ranks.gather(offer)
        plans = exchange_plans(offers)
        if not plans:
            self._log_failures([offer.error for offer in offers])
            _raise_final(error)
            return None
        plan = plans[self._part.rank]
        error = _failure(self._read_share, plan)
        steps: list[tuple[Callable[[ExchangePlan], Sequence[int]], Callable[[], Sequence[_Piece]]]] = [
            (lambda plan: plan.leaders, lambda: self._shared_pieces(plan.readers)),
            (lambda plan: plan.team, lambda: self._shared_pieces(plan.team[:1])),
            (lambda plan: plan.siblings, lambda: self._sibling_pieces(plan.siblings, offers)),
        ]
        for members_of, pieces in steps:
            if any(map(members_of, plans)):
                if not self._are_ready(error):
                    _raise_final(error)
                    return None
                error = _failure(self._exchange, members_of(plan), pieces)
        try:
            if error is None:
                return self._finish()
        except Exception as failure:
            error = failure
        _raise_final(error)
        log.warning("%s: the exchange between ranks failed, and this rank reads for itself: %s", self._part, error)
        return None

    def _offer(self) -> tuple[ShareOffer, Exception | None]:
        """Return what this rank offers, and why it cannot."""
        try:
            own = self._images[self._part.rank] = self._access.read(self._part, image_with_header)
            layout = parse_layout(own.files.get(TENSORS, b""), str(self._part))
            self._elsewhere = layout.elsewhere_by_rank()
            origins: dict[str, CheckpointId | None] = {}
            check_origin(own.manifest, origins)
            for rank in self._elsewhere:
                sibling = self._access.read(sibling_of(self._part, rank), lambda chunks: PartImage(chunks.manifest))
                check_origin(sibling.manifest, origins)
                check_division(own.manifest, sibling.manifest)
                self._images[rank] = sibling
            has_part = self._access.spool.has(self._part)
        except Exception as error:
            return ShareOffer(error=text_of(error)), error
        content = xxhash.xxh3_128()
        for where in (shared := own.shared_places()):
            content.update(repr(own.manifest.chunk(where).content).encode())
        offer = ShareOffer(
            content=content.hexdigest() if shared else "",
            siblings=tuple(self._elsewhere),
            node=self._node,
            has_part=has_part,
            header_bytes=len(layout.header),
        )
        return offer, None

    def _read_share(self, plan: ExchangePlan) -> None:
        """Read what this rank's part alone has, and those replicated chunks that no other rank sends."""
        own = self._images[self._part.rank]
        senders = plan.readers or plan.team[:1]
        received = {piece.where for piece in self._shared_pieces(senders) if piece.sender != self._part.rank}
        self._bring(own, [where for where in own.missing if where not in received])

    def _bring(self, image: PartImage, places: Collection[ChunkPlace]) -> None:
        if places:
            self.place = self._access.bring(image, places)

    def _shared_pieces(self, senders: Sequence[int]) -> list[_Piece]:
        """Divide the replicated chunks of the rank's own part among `senders`; none without any."""
        own = self._images[self._part.rank]
        shared = own.shared_places()
        ranks = reader_of_chunks([own.manifest.chunk(where).size for where in shared], senders)
        return [_Piece(rank, own, where) for rank, where in zip(ranks, shared, strict=False)]

    def _sibling_pieces(self, siblings: Sequence[int], offers: Sequence[ShareOffer]) -> list[_Piece]:
        """Return what the siblings need of each other's files: the replicated chunks, and those of the header."""
        pieces = list[_Piece]()
        for rank in siblings:
            image = self._images[rank]
            places = sorted({*image.shared_places(), *image.tensor_places(0, offers[rank].header_bytes)})
            pieces += [_Piece(rank, image, where) for where in places]
        return pieces

    def _exchange(self, members: Sequence[int], pieces: Callable[[], Sequence[_Piece]]) -> None:
        """Send and receive `pieces()`, which are the same on all `members`, and verify what was received."""
        if not members:
            return
        exchanged = pieces()
        by_sender = [[piece for piece in exchanged if piece.sender == member] for member in members]
        in_turns = [piece for turn in zip_longest(*by_sender) for piece in turn if piece is not None]
        with self._ranks.peer_group(members) as peers:
            peers.broadcast((piece.sender, piece.memory) for piece in in_turns)
        for piece in in_turns:
            if piece.sender != self._part.rank:
                piece.verify()

    def _finish(self) -> dict[str, memoryview]:
        """Read what is still missing of the files, and return them."""
        own = self._images[self._part.rank]
        self._bring(own, list(own.missing))
        contents = dict(own.files)
        for rank, names in self._elsewhere.items():
            image = self._images[rank]
            while places := image.missing_of_header():
                self._bring(image, places)
            keep_tensors(image, self._part, names)
            self._bring(image, list(image.missing))
            contents[sibling_path(rank)] = image.files[TENSORS]
        for image in self._images.values():
            image.finish()
        return contents

    def _are_ready(self, error: Exception | None) -> bool:
        ready = self._ranks.gather(ShareReady("" if error is None else text_of(error)))
        return not self._log_failures([rank.error for rank in ready])

    def _log_failures(self, errors: Sequence[str]) -> bool:
        """Log the first error; return whether there is one."""
        for rank, error in enumerate(errors):
            if error:
                log.info("%s: each rank reads for itself, because of rank %d: %s", self._part.checkpoint, rank, error)
                return True
        return False


def _failure(action: Callable[..., None], *arguments: object) -> Exception | None:
    try:
        action(*arguments)
    except Exception as error:
        return error
    return None


def _raise_final(error: Exception | None) -> None:
    if isinstance(error, CorruptChunk | DaemonSilent | ManifestError):
        raise error
