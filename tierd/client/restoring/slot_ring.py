"""A part's stored chunks through a few slots of memory that the daemon fills from the tiers, and this process decodes.

Invariants:

- The daemon's bytes are never used where they lie, because it could change them after the check. Each chunk is copied
  to memory of this process, and verified and decoded there.
- This is a shortcut: whatever goes wrong here is `SlotsUnavailable`, which says nothing about the part. The caller then
  asks the daemon to `Fetch` the part into the spool, which finds out what is wrong where. Only the silence of a stopped
  daemon is `DaemonSilent`, because that request would wait for the same daemon as long again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec

from tierd.client.restoring.part_fetch import FetchProgress
from tierd.client.restoring.verified_chunks import ChunkMemory, VerifiedChunks, Work
from tierd.client.saving.handoff_packets import (
    AnswerTimeout,
    close_fds,
    open_packet_socket,
    receive_packet,
    send_packet,
)
from tierd.core.errors import DaemonSilent, DaemonUnavailable, StoreUnavailable, TierdError, VersionMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import Chunk, ChunkPlace, StoredChunk
from tierd.core.manifest_codec import decode as decode_manifest
from tierd.ipc.daemon_connection import (
    GREETING_S,
    HELLO,
    OWN_PEER,
    SILENCE_S,
    connect_to_daemon,
    describe_hung_daemon,
    spool_holder_pid,
)
from tierd.ipc.message_codec import FillSlot, LendSlots, parse_greeting
from tierd.ipc.protocol import explain_outdated
from tierd.spool.arena import Arena
from tierd.spool.direct_io import PAGE, copy_bytes
from tierd.spool.file_io import digest, flat_bytes
from tierd.spool.spool import Spool

_SLOTS_BYTES = 128 << 20  # of all slots; with both hands' own memory, 256 MiB for chunks of 32 MiB
_MIN_SLOTS, _MAX_SLOTS = 3, 8  # at least one for each hand, and one that is filled meanwhile


class SlotsUnavailable(DaemonUnavailable):
    """The part cannot be had in this way, or not any more."""


class SlotMemory(ChunkMemory):
    """The memory of a restore's rings, of which one fills it after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: Arena | None = None

    def slots(self) -> Arena:
        """Return the slots. Raises MemoryError."""
        self._slots = self._slots or Arena(_SLOTS_BYTES)
        return self._slots


class SlotRing(VerifiedChunks):
    """The chunks of `part` from the tiers of the node's daemon, over a connection of its own.

    `progress` shows how far it is, until `release`. Raises `SlotsUnavailable`; `DaemonSilent`; `StoreUnavailable` only
    if `progress` does, because no byte comes.

    Attributes:
        readers: how many ranks of this node read the chunks that ranks hold alike, this one included.
    """

    def __init__(self, spool: Spool, part: PartId, progress: FetchProgress, memory: SlotMemory) -> None:
        self._spool, self._progress = spool, progress
        self._done, self._total, self.place = -1, 0, ""
        self._given_up: StoreUnavailable | None = None
        self._connection = open_packet_socket()
        self.readers = 1
        try:
            self._arena = memory.slots()
            connect_to_daemon(self._connection, spool.handoff_socket)
            daemon = parse_greeting(receive_packet(self._connection, GREETING_S)[0])
            if why := explain_outdated(OWN_PEER, daemon):
                raise VersionMismatch(why)
            send_packet(self._connection, HELLO)
            send_packet(self._connection, LendSlots(part=part), self._arena.fd)
            reply, fds = receive_packet(self._connection, SILENCE_S, 1, self._report)
            manifest = decode_manifest(_received(fds, int(reply["manifest"])), part)
        except (TierdError, OSError, MemoryError, KeyError, ValueError, TypeError) as error:
            self._connection.close()
            progress.__exit__()
            raise self._translated(error) from error
        super().__init__(manifest, "", memory)
        chunks = [chunk for file in manifest.files for chunk in file.chunks]
        self._slot_bytes = -(-max((chunk.size for chunk in chunks), default=1) // PAGE) * PAGE
        count = min(_MAX_SLOTS, _SLOTS_BYTES // self._slot_bytes)
        if count < _MIN_SLOTS:
            self.release()
            raise SlotsUnavailable(f"{part}: its chunks of {self._slot_bytes >> 20} MiB are too large for it")
        self._free = [number * self._slot_bytes for number in range(count)]
        self._asked: dict[int, ChunkPlace] = {}  # by the slot's first byte
        self._asking, self._receiving = threading.Lock(), threading.Lock()
        self._done, self._total = 0, sum(chunk.size for chunk in chunks)

    def each(self, work: Work) -> Iterator[tuple[ChunkPlace, memoryview]]:
        try:
            with self._memory.hold(self._slot_bytes) as stored, self._memory.hold(self._slot_bytes) as raw:
                self._ask(work)
                while (answer := self._receive()) is not None:
                    begin, where, entry = answer
                    chunk = self.manifest.chunk(where)
                    into = (raw if entry.codec == "raw" else stored)[: entry.size]
                    copy_bytes(into, self._arena.view[begin : begin + entry.size])
                    with self._asking:
                        self._free.append(begin)
                    self._ask(work)  # the slot is filled again while this chunk is decoded
                    yield where, _decoded(chunk, entry, into, raw[: chunk.size])
        except (TierdError, OSError, MemoryError, KeyError, ValueError, TypeError) as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> TierdError:
        if isinstance(error, AnswerTimeout):
            return DaemonSilent(describe_hung_daemon(spool_holder_pid(self._spool), "sends no chunk"))
        return self._given_up or (error if isinstance(error, SlotsUnavailable) else SlotsUnavailable(str(error)))

    def _ask(self, work: Work) -> None:
        with self._asking:
            while self._free and work:
                begin, where = self._free.pop(), work.popleft()
                self._asked[begin] = where
                number, index = where
                readers = 1 if self.manifest.chunk(where).home is None else self.readers
                request = FillSlot(file=number, index=index, begin=begin, room=self._slot_bytes, readers=readers)
                send_packet(self._connection, request)

    def _receive(self) -> tuple[int, ChunkPlace, StoredChunk] | None:
        """Return the next slot that is filled, its chunk, and how that is stored; None if no slot is asked for."""
        with self._receiving:
            if not self._asked:
                return None
            reply, _ = receive_packet(self._connection, SILENCE_S, on_sign_of_life=self._report)
            begin = int(reply["begin"])
            where = self._asked.pop(begin)
            entry = msgspec.convert(
                {"codec": reply["codec"], "size": reply["size"], "xxh3_128": reply["digest"], "key": str(where)},
                StoredChunk,
            )
            if entry.size > self._slot_bytes:
                raise ValueError(f"{entry.size} bytes in a slot of {self._slot_bytes}")
            self.place = str(reply["tier"])
            self._done += self.manifest.chunk(where).size
            self._report()
            return begin, where, entry

    def _report(self) -> None:
        try:
            tiers = [self.place] if self.place else []
            self._progress({"done": self._done, "total": self._total, "tiers": tiers})
        except StoreUnavailable as error:
            self._given_up = error
            raise

    def close(self) -> None:
        # Not closed: a thread may wait for an answer, and another descriptor could get the number.
        try:
            self._connection.shutdown(2)
        except OSError:
            pass

    def release(self) -> None:
        """Close the connection, so that the daemon lets go of the memory. No thread uses this any more."""
        self._connection.close()
        self._progress.__exit__()


def _received(fds: list[int], size: int) -> bytes:
    """Return what a descriptor that came with an answer holds."""
    try:
        box = Arena.received(fds.pop())
        return bytes(box.view[:size])
    finally:
        close_fds(fds)


def _decoded(chunk: Chunk, entry: StoredChunk, data: memoryview, into: memoryview) -> memoryview:
    from tierd.codec.chunk_codec import RAW, decode  # only a process that restores from a tier loads the codec

    where = "the daemon's slots"
    if entry.codec == RAW:
        if len(data) != chunk.size or digest(data) != chunk.xxh3_128:
            raise SlotsUnavailable(f"{where}: chunk {entry.key}: its bytes differ from their digest")
        return data
    raw = flat_bytes(decode(msgspec.structs.replace(chunk, stored=entry), data, where, into))
    return raw if not raw.readonly else memoryview(bytearray(raw))
