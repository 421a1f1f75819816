"""What the ranks of a node have committed together: whether they divided alike, and what each of them stores again.

Invariant: no rank waits for another one. A rank looks at what the others have committed when it has committed itself,
so of each checkpoint the last one sees all parts. The others see them when they commit the next one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence

from tierd.core.chunk_boundaries import GRAIN
from tierd.core.errors import DivisionMismatch, TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, Manifest
from tierd.core.replicas.shares import differing_divisions, stored_by_all
from tierd.core.units import list_few
from tierd.spool.spool import Spool
from tierd.state.tensor_file import TensorFileLayout
from tierd.state.tensor_header import header_length, parse_header

log = logging.getLogger("tierd")


class NodeParts:
    """The parts of this node's ranks.

    Attributes:
        ranks: the ranks of the node, this one included.
    """

    def __init__(self, spool: Spool, ranks: Sequence[int]) -> None:
        self._spool, self.ranks = spool, ranks
        self._is_advised = False  # whether the log has said what each rank stores again
        self._unseen: PartId | None = None  # the last part, if some rank had not committed its own of that checkpoint

    def mismatches(self, committed: PartId | None, layout: TensorFileLayout) -> dict[PartId, DivisionMismatch]:
        """Compare a part that was committed now, if any, with those of the node's other ranks.

        Parts that the others had not committed yet are compared at the next call, because a rank that always commits
        first would never see them.

        Returns:
            Why, of each compared part whose ranks did not divide the same tensors. Some tensor may be in no part then.
        """
        if len(self.ranks) < 2:
            return {}
        earlier, self._unseen = self._unseen, None
        parts = [part for part in (earlier, committed) if part is not None]
        return {part: why for part in parts if (why := self._mismatch(part, layout))}

    def _mismatch(self, part: PartId, layout: TensorFileLayout) -> DivisionMismatch | None:
        manifests = self._manifests(part)
        if part not in manifests:
            return None
        if len(manifests) < len(self.ranks):
            self._unseen = part
        elif not self._is_advised and part.rank == self.ranks[0]:
            self._advise(manifests[part], [manifests[other] for other in manifests if other != part], layout)
        differing = differing_divisions({sibling: manifest.division for sibling, manifest in manifests.items()})
        others = {differing[part]} if part in differing else differing.keys()
        if not others:
            return None
        other = min(others)
        return DivisionMismatch(
            f"nobody can restore this checkpoint, because this rank and rank {other.rank} divided different "
            f"states: {self._difference(layout, other)} is declared replicated, and is not the same on both. From the "
            "next save on, this rank stores everything itself; declare only entries that all ranks hold alike, and "
            "save again"
        )

    def _difference(self, own: TensorFileLayout, part: PartId) -> str:
        """Name the tensors that only one of two ranks has, or has in another form; else the entries that may differ."""
        try:
            with (self._spool.path(part) / TENSORS).open("rb") as file:
                prefix, size = file.read(8), os.fstat(file.fileno()).st_size
                other = parse_header(prefix + file.read(header_length(prefix, size) - 8), size)
        except (TierdError, OSError) as error:
            log.debug("%s: %s", part, error)
            other = own
        entries = {*own.replicated, *other.replicated}
        names = {*own.entries, *own.elsewhere} ^ {*other.entries, *other.elsewhere}
        stored_twice = own.entries.keys() & other.entries.keys()
        names |= {name for name in stored_twice if own.entries[name][1:] != other.entries[name][1:]}
        differing = sorted(name for name in names if name.partition("/")[0] in entries)
        return list_few(differing or sorted(entries))

    def _manifests(self, part: PartId) -> dict[PartId, Manifest]:
        """Return those that are there of a part and of its siblings on this node."""
        parts = [PartId(part.checkpoint, rank, part.world) for rank in self.ranks]
        try:
            return {sibling: self._spool.manifest(sibling) for sibling in parts if self._spool.has(sibling)}
        except (TierdError, OSError) as error:
            log.debug("%s: %s", part, error)
            return {}

    def _advise(self, own: Manifest, others: Sequence[Manifest], layout: TensorFileLayout) -> None:
        """Name, once, the undeclared entries of which every rank stores much, and that are equal on all."""
        self._is_advised = True
        file = next((file for file in own.files if file.path == TENSORS), None)
        ranges = stored_by_all(file, others) if file is not None else []
        equal_bytes = Counter[str]()
        differing = set(layout.replicated)  # their large tensors are stored once already
        for name, entry in layout.entries.items():
            state_entry = name.partition("/")[0]
            if any(begin <= entry.offset and entry.offset + entry.nbytes <= end for begin, end in ranges):
                equal_bytes[state_entry] += entry.nbytes
            elif entry.nbytes >= GRAIN:  # smaller ones share their chunks with others, so nothing is known of them
                differing.add(state_entry)
        if names := [name for name, size in equal_bytes.items() if size >= GRAIN and name not in differing]:
            log.warning(
                "run %s: %s of the state were the same on all %d ranks of this node, and each rank stored them: if "
                "they always are, Checkpointer(replicated=%r) stores them once",
                own.run,
                ", ".join(names),
                len(self.ranks),
                tuple(names),
            )
