"""What the ranks of a node have committed together: whether they divided alike, and what each of them stores again.

Invariant: no rank waits for another one. A rank looks at what the others have committed when it has committed itself,
so of each checkpoint the last one sees all parts. The others see them when they commit the next one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from tierd.core.chunk_boundaries import GRAIN
from tierd.core.errors import TierdError
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, Manifest
from tierd.core.replicas.shares import stored_by_all
from tierd.spool.spool import Spool
from tierd.state.tensor_file import TensorFileLayout

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

    def divide_alike(self, committed: PartId, layout: TensorFileLayout) -> bool:
        """Compare a part that was committed now with those of the node's other ranks, and log what is wrong.

        Parts that the others had not committed yet are compared at the next call, because a rank that always commits
        first would never see them.

        Returns:
            Whether the ranks divided the same tensors. If not, some tensor may be in no part.
        """
        if len(self.ranks) < 2:
            return True
        earlier, self._unseen = self._unseen, None
        return all(self._is_alike(part, layout) for part in (earlier, committed) if part is not None)

    def _is_alike(self, part: PartId, layout: TensorFileLayout) -> bool:
        manifests = self._manifests(part)
        if (own := manifests.pop(part, None)) is None:
            return True
        if len(manifests) < len(self.ranks) - 1:
            self._unseen = part
        elif not self._is_advised and part.rank == self.ranks[0]:
            self._advise(own, list(manifests.values()), layout)
        others = [sibling.rank for sibling, manifest in manifests.items() if manifest.division != own.division]
        if not own.division or not others:
            return True
        log.error(
            "%s: rank %d and this rank divide different states, so this checkpoint may lack tensors: `replicated` "
            "names an entry that is not the same on all ranks. From now on this rank stores everything itself",
            part,
            others[0],
        )
        return False

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
