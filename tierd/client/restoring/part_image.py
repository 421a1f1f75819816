"""The files of a part in memory, filled chunk by chunk; chunks of live tensors are copied there and nowhere else.

Invariants:

- The image is not touched where live tensors take the bytes, so there it costs no memory.
- Live tensors are written only by `bring_rest`, after every rank knows that its part fits.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from tierd.client.restoring.verified_chunks import VerifiedChunks, bring
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
            start = chunks.start(where)
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

    def brought_bytes(self, chunks: VerifiedChunks, number: int) -> int:
        """Return how many bytes of a file were brought, from its first one on without a gap."""
        return min(
            (chunks.start(where) for where in self.missing if where[0] == number),
            default=self.manifest.files[number].size,
        )

    def bring_all_but_direct(self, chunks: VerifiedChunks, find: FindTargets) -> None:
        """Bring everything but the chunks that consist of live tensors' bytes alone; they are `missing` afterwards.

        Raises as `VerifiedChunks.each`.
        """
        files = {file.path: number for number, file in enumerate(self.manifest.files)}
        if TREE in files and TENSORS in files:
            self.bring(chunks, [where for where in self.missing if where[0] == files[TREE]])
            # The header alone first, because it says how long it is.
            self.bring(chunks, self._first_chunks(chunks, 8))
            try:
                head = header_length(self.files[TENSORS][:8], len(self.files[TENSORS]))
                self.bring(chunks, self._first_chunks(chunks, head))
                self._choose(chunks, find(self.files), head)
            except (StateMismatch, RecursionError):  # reported when the whole part is there
                pass
        direct = self._late(chunks)
        self.bring(chunks, [where for where in self.missing if where not in direct])

    def _first_chunks(self, chunks: VerifiedChunks, size: int) -> list[ChunkPlace]:
        """Return the chunks of the first `size` bytes of the tensor file."""
        return [(self._tensors, index) for index in chunks.indexes(self._tensors, 0, size)]

    def _choose(self, chunks: VerifiedChunks, targets: Mapping[int, torch.Tensor], head: int) -> None:
        """Keep those targets whose chunks hold nothing else."""
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
            late = self._late(chunks)
            direct = [
                tensor
                for tensor in direct
                if all((self._tensors, at) in late for at in chunks.indexes(self._tensors, tensor.begin, tensor.end))
            ]

    def _late(self, chunks: VerifiedChunks) -> set[ChunkPlace]:
        """Return the missing chunks of which every byte is a direct tensor's."""
        late = set()
        for where in self.missing:
            if where[0] != self._tensors:
                continue
            start = chunks.start(where)
            end = start + self.manifest.chunk(where).size
            at = start
            for tensor in self._direct_between(start, end):
                at = tensor.end if tensor.begin <= at else at
            if at >= end:
                late.add(where)
        return late

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
