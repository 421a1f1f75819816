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
from itertools import accumulate, zip_longest
from typing import NamedTuple

import msgspec
import xxhash

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.ranged_reader import PartFiles
from tierd.client.restoring.saved_entries import read_elsewhere
from tierd.client.restoring.tensor_locations import check_division, check_held, read_layout, sibling_of
from tierd.core.errors import CorruptChunk, ManifestError, StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS
from tierd.core.replicas.exchange_plan import ExchangePlan, ShareOffer, exchange_plans, reader_of_chunks
from tierd.spool.direct_io import finish_read, memory_for
from tierd.spool.file_io import digest
from tierd.state.tensor_file import TensorFileLayout
from tierd.state.tensor_header import header_length, parse_layout, sibling_path

log = logging.getLogger("tierd")


class ShareReady(msgspec.Struct, frozen=True):
    """Whether a rank holds all that it sends next; `error` says why not."""

    error: str = ""


class _TensorFile:
    """A part's tensor file in memory, of which some chunks are present."""

    def __init__(self, files: PartFiles, part: PartId) -> None:
        self._files, self._part = files, part
        self._file = files.span(part, TENSORS).file
        self.chunks = self._file.chunks
        self._begins = [0, *accumulate(chunk.size for chunk in self.chunks)]
        self._memory = memory_for(self._file.size)
        self._present: set[int] = set()
        self.replicated = [number for number, chunk in enumerate(self.chunks) if chunk.home is not None]

    def replicated_or_before(self, end: int) -> list[int]:
        """Return the chunks that are replicated, or begin before byte `end`."""
        return [
            number for number, chunk in enumerate(self.chunks) if chunk.home is not None or self._begins[number] < end
        ]

    def chunk_memory(self, number: int) -> memoryview:
        return self._memory[self._begins[number] : self._begins[number + 1]]

    def note_present(self, number: int) -> None:
        self._present.add(number)

    def fill_chunks(self, numbers: Collection[int]) -> None:
        """Read and verify these chunks. Raises as `PartFiles.fill`."""
        if missing := [number for number in numbers if number not in self._present]:
            span = self._files.span
            self._files.fill(
                self._memory,
                [span(self._part, TENSORS, self._begins[number], self.chunks[number].size) for number in missing],
            )
            self._present.update(missing)

    def _fill_range(self, offset: int, size: int) -> None:
        """Read and verify the chunks that hold a range of bytes, and are not present. Raises as `PartFiles.fill`."""
        span = self._files.span(self._part, TENSORS, offset, size)
        self.fill_chunks(range(span.first, span.end))

    def content(self) -> memoryview:
        return finish_read(self._memory, self._file.size)

    def with_tensors(self, names: Collection[str], part: PartId) -> memoryview:
        """Return the file for the tree of `part`, which says that these tensors lie here: read what is missing of them.

        Raises `ManifestError` if one is not here; and as `PartFiles.fill`.
        """
        self._fill_range(0, 1)
        self._fill_range(0, header_length(self._memory[:8], self._file.size, str(self._part)))
        layout = parse_layout(self._memory[: self._file.size], str(self._part))
        check_held(part, self._part.rank, layout, *names)
        for entry in map(layout.entries.__getitem__, names):
            if entry.nbytes:
                self._fill_range(entry.offset, entry.nbytes)
        return self.content()


class _Piece(NamedTuple):
    """A chunk that is exchanged, and the rank that sends it."""

    sender: int
    file: _TensorFile
    number: int

    @property
    def memory(self) -> memoryview:
        return self.file.chunk_memory(self.number)

    def verify(self) -> None:
        """Raise `StoreUnavailable` if these are not the bytes of the manifest."""
        if digest(self.memory) != self.file.chunks[self.number].xxh3_128:
            raise StoreUnavailable(f"rank {self.sender} sent wrong bytes of chunk {self.number}")
        self.file.note_present(self.number)


class ShareExchange:
    """Reads one part of a checkpoint that as many ranks saved as restore it. All ranks make the same calls.

    `node` is the lowest rank of this rank's node.
    """

    def __init__(self, ranks: Ranks, files: PartFiles, part: PartId, node: int) -> None:
        self._ranks, self._files, self._part, self._node = ranks, files, part, node
        self._images: dict[int, _TensorFile] = {}  # by rank
        self._layout: TensorFileLayout  # of the rank's own file, after a successful `_offer`

    def read(self) -> dict[str, memoryview] | None:
        """Return the part's files, and those of its siblings by `sibling_path`, in which all that its tree names is
        verified.

        None if nothing is gained, or the exchange failed: then the part is to be read as usual. Raises as
        `Ranks.gather`; and `CorruptChunk` or `ManifestError` if this rank has proven it, because the copies are
        quarantined then, and the next read would only find that they are gone.
        """
        offer, error = self._offer()
        offers = self._ranks.gather(offer)
        plans = exchange_plans(offers)
        if not plans:
            self._log_failures([offer.error for offer in offers])
            _raise_proof(error)
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
                    _raise_proof(error)
                    return None
                error = _failure(self._exchange, members_of(plan), pieces)
        try:
            if error is None:
                return self._finish(plan)
        except Exception as failure:
            error = failure
        _raise_proof(error)
        log.warning("%s: the exchange between ranks failed, and this rank reads for itself: %s", self._part, error)
        return None

    def _offer(self) -> tuple[ShareOffer, Exception | None]:
        """Return what this rank offers, and why it cannot."""
        try:
            layout = self._layout = read_layout(self._files, self._part)
            siblings = tuple(sorted(set(layout.elsewhere.values())))
            for rank in siblings:
                sibling = sibling_of(self._part, rank)
                check_division(self._files.manifest(self._part), self._files.manifest(sibling))
            own = self._images[self._part.rank] = _TensorFile(self._files, self._part)
            has_part = self._files.is_in_spool(self._part)
        except Exception as error:
            return ShareOffer(error=_text(error)), error
        content = xxhash.xxh3_128()
        for number in own.replicated:
            content.update(repr(own.chunks[number].content).encode())
        offer = ShareOffer(
            content=content.hexdigest() if own.replicated else "",
            siblings=siblings,
            node=self._node,
            has_part=has_part,
            header_bytes=len(layout.header),
        )
        return offer, None

    def _read_share(self, plan: ExchangePlan) -> None:
        """Read what this rank's part alone has, and those replicated chunks that no other rank sends."""
        own = self._images[self._part.rank]
        senders = plan.readers or plan.team[:1]
        received = {piece.number for piece in self._shared_pieces(senders) if piece.sender != self._part.rank}
        own.fill_chunks([number for number in range(len(own.chunks)) if number not in received])

    def _shared_pieces(self, senders: Sequence[int]) -> list[_Piece]:
        """Divide the replicated chunks of the rank's own part among `senders`; none without any."""
        own = self._images[self._part.rank]
        ranks = reader_of_chunks([own.chunks[number].size for number in own.replicated], senders)
        return [_Piece(rank, own, number) for rank, number in zip(ranks, own.replicated, strict=False)]

    def _sibling_pieces(self, siblings: Sequence[int], offers: Sequence[ShareOffer]) -> list[_Piece]:
        """Return what the siblings need of each other's files: the replicated chunks, and those of the header."""
        pieces = list[_Piece]()
        for rank in siblings:
            if rank not in self._images:
                self._images[rank] = _TensorFile(self._files, sibling_of(self._part, rank))
            file = self._images[rank]
            pieces += [_Piece(rank, file, number) for number in file.replicated_or_before(offers[rank].header_bytes)]
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

    def _finish(self, plan: ExchangePlan) -> dict[str, memoryview]:
        """Read what is still missing of the files, and return them."""
        part, own = self._part, self._images[self._part.rank]
        contents = {TENSORS: own.content()}
        for file in self._files.manifest(part).files:
            if file.path != TENSORS:
                contents[file.path] = memoryview(bytearray(file.size))
                if file.size:
                    self._files.fill(contents[file.path], [self._files.span(part, file.path)])
        if not plan.siblings:
            return contents | read_elsewhere(self._files, part, self._layout)
        needed: dict[int, list[str]] = {}
        for name, rank in self._layout.elsewhere.items():
            needed.setdefault(rank, []).append(name)
        for rank, names in needed.items():
            contents[sibling_path(rank)] = self._images[rank].with_tensors(names, part)
        return contents

    def _are_ready(self, error: Exception | None) -> bool:
        ready = self._ranks.gather(ShareReady("" if error is None else _text(error)))
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


def _raise_proof(error: Exception | None) -> None:
    if isinstance(error, CorruptChunk | ManifestError):
        raise error


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
