"""The files of a part in memory, filled chunk by chunk; chunks of live tensors are copied there and nowhere else.

Invariants:

- The image is not touched where live tensors take the bytes, so there it costs no memory.
- Live tensors are written only by chunks that are not `early`, which are brought after every rank knows that its part
  fits.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import torch

from tierd.client.restoring.verified_chunks import VerifiedChunks, bring, chunk_starts
from tierd.core.errors import StateMismatch
from tierd.core.manifest import TENSORS, TREE, ChunkPlace, File, Manifest
from tierd.spool.direct_io import copy_bytes, finish_read, memory_for
from tierd.state.kinds.dtensors import tensors_in
from tierd.state.tensor_header import header_length

# From a part's files, of which the tree and the header of the tensor file are read, to `live_tensors.direct_targets`.
FindTargets = Callable[[Mapping[str, memoryview]], Mapping[int, torch.Tensor]]


class _DirectTensor(NamedTuple):
    begin: int  # of its bytes in the tensor file
    end: int
    live: torch.Tensor
    memory: memoryview


class PartImage:
    """The files of one part.

    Args:
        memory: the memory for a file, in whole pages; None to allocate it here.

    Attributes:
        manifest: that of the part.
        files: their bytes, by path.
        missing: the chunks that were not brought yet.
    """

    def __init__(self, manifest: Manifest, memory: Callable[[File], memoryview | None] = lambda file: None) -> None:
        self.manifest = manifest
        given = [memory(file) for file in manifest.files]
        self._memory = [
            memory_for(file.size) if place is None else place for file, place in zip(manifest.files, given, strict=True)
        ]
        self.files = {file.path: memory[: file.size] for file, memory in zip(manifest.files, self._memory, strict=True)}
        self.missing = dict.fromkeys(where for where, _ in manifest.places())  # a dict, because it keeps their order
        self._direct: list[_DirectTensor] = []
        self._starts = chunk_starts(manifest)
        self._head = 0  # bytes of the tensor file's header, once it is there
        self._tensors = next((n for n, file in enumerate(manifest.files) if file.path == TENSORS), -1)

    def bring(
        self,
        chunks: VerifiedChunks,
        places: Iterable[ChunkPlace],
        done: Callable[[ChunkPlace], None] = lambda where: None,
    ) -> None:
        """Bring those of `places` that are missing. Raises as `VerifiedChunks.each`."""

        def put(where: ChunkPlace, data: memoryview) -> None:
            number, _ = where
            start = self._start(where)
            if number == self._tensors and (tensors := self._direct_between(start, start + len(data))):
                for tensor in tensors:
                    begin, end = max(tensor.begin, start), min(tensor.end, start + len(data))
                    copy_bytes(
                        tensor.memory[begin - tensor.begin : end - tensor.begin], data[begin - start : end - start]
                    )
            else:
                copy_bytes(self._memory[number][start : start + len(data)], data)

        def brought(where: ChunkPlace) -> None:
            del self.missing[where]
            done(where)

        bring(chunks, [where for where in places if where in self.missing], put, brought)

    def shared_places(self) -> list[ChunkPlace]:
        """Return the chunks of the tensor file that several ranks hold by declaration."""
        return [
            (n, index) for (n, index), chunk in self.manifest.places() if n == self._tensors and chunk.home is not None
        ]

    def chunk_memory(self, where: ChunkPlace) -> memoryview:
        """Return the memory of a chunk. A caller that writes verified bytes there calls `note_brought`."""
        start = self._start(where)
        return self._memory[where[0]][start : start + self.manifest.chunk(where).size]

    def note_brought(self, where: ChunkPlace) -> None:
        """Take a chunk for brought."""
        self.missing.pop(where, None)

    def brought_bytes(self, number: int) -> int:
        """Return how many bytes of a file were brought, from its first one on without a gap."""
        return min(
            (self._start(where) for where in self.missing if where[0] == number),
            default=self.manifest.files[number].size,
        )

    def bring_tree(self, chunks: VerifiedChunks) -> None:
        """Bring the tree. Raises as `VerifiedChunks.each`."""
        self.bring(chunks, [where for where in self.missing if self.manifest.files[where[0]].path == TREE])

    def bring_header(self, chunks: VerifiedChunks) -> None:
        """Bring the header of the tensor file. Raises as `VerifiedChunks.each`."""
        while places := self.missing_of_header():
            self.bring(chunks, places)

    def missing_of_header(self) -> list[ChunkPlace]:
        """Return the missing chunks that are known to hold some of the tensor file's header; none if it is there."""
        if self._tensors < 0:
            return []
        # Its first bytes alone first, because they say how long it is.
        if not (missing := self.missing.keys() & self.tensor_places(0, 8)):
            with suppress(StateMismatch):  # reported when the whole part is there
                self._head = header_length(self.files[TENSORS][:8], len(self.files[TENSORS]))
            missing = self.missing.keys() & self.tensor_places(0, self._head)
        return sorted(missing)

    def keep_only(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Forget what is missing, but for the chunks that have these bytes of the tensor file: from begin to end."""
        wanted = {where for begin, end in ranges for where in self.tensor_places(begin, end)}
        self.missing = {where: None for where in self.missing if where in wanted}

    def _start(self, where: ChunkPlace) -> int:
        number, index = where
        return self._starts[number][index]

    def tensor_places(self, begin: int, end: int) -> list[ChunkPlace]:
        """Return the chunks that have the bytes from `begin` to before `end` of the tensor file."""
        starts = self._starts[self._tensors]
        return [(self._tensors, n) for n in range(bisect_right(starts, begin) - 1, bisect_left(starts, end))]

    def choose(self, targets: Mapping[int, torch.Tensor]) -> None:
        """Have those of `targets` receive bytes of this image whose chunks hold nothing else.

        They are by the address of a tensor in any image. Chunks that are not in `early` are brought into them.
        """
        head = self._head
        if not head:
            return
        base = torch.frombuffer(self.files[TENSORS], dtype=torch.uint8, count=1).data_ptr()
        size = len(self.files[TENSORS])
        direct = [
            _DirectTensor(begin, begin + live.nbytes, live, _memory_of(live))
            for begin, live in sorted((address - base, live) for address, live in targets.items())
            if head <= begin and begin + live.nbytes <= size
        ]
        if any(before.end > after.begin for before, after in pairwise(direct)):
            return
        while len(direct) != len(self._direct):
            self._direct = direct
            late = self._late()
            direct = [
                tensor
                for tensor in direct
                if all(where in late for where in self.tensor_places(tensor.begin, tensor.end))
            ]

    def _late(self) -> set[ChunkPlace]:
        """Return the missing chunks of which every byte is a direct tensor's."""
        late = set()
        for where in self.missing:
            if where[0] != self._tensors:
                continue
            start = self._start(where)
            end = start + self.manifest.chunk(where).size
            at = start
            for tensor in self._direct_between(start, end):
                at = tensor.end if tensor.begin <= at else at
            if at >= end:
                late.add(where)
        return late

    def early(self) -> list[ChunkPlace]:
        """Return the missing chunks but those that consist of live tensors' bytes alone."""
        late = self._late()
        return [where for where in self.missing if where not in late]

    def _direct_between(self, start: int, end: int) -> list[_DirectTensor]:
        first = max(bisect_right(self._direct, start, key=lambda tensor: tensor.begin) - 1, 0)
        last = bisect_right(self._direct, end - 1, key=lambda tensor: tensor.begin)
        return [tensor for tensor in self._direct[first:last] if tensor.end > start]

    def live_tensors(self, restored: Mapping[str, object]) -> dict[int, torch.Tensor]:
        """Return the live tensors that were brought, by the id of the restored tensor of which they have the values."""
        if not self._direct:
            return {}
        base = torch.frombuffer(self.files[TENSORS], dtype=torch.uint8, count=1).data_ptr()
        live = {tensor.begin: tensor.live for tensor in self._direct}
        return {
            id(tensor): live[tensor.data_ptr() - base]
            for tensor in tensors_in(restored)
            if tensor.numel() and tensor.data_ptr() - base in live
        }

    def finish(self) -> None:
        """Let forked children inherit the files again."""
        for memory in self._memory:
            finish_read(memory, len(memory))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's bytes; the tensor must outlive them."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def image_with_header(chunks: VerifiedChunks) -> PartImage:
    """Make an image of a part, and bring the header of its tensor file. Raises as `VerifiedChunks.each`."""
    image = PartImage(chunks.manifest)
    image.bring_header(chunks)
    return image
