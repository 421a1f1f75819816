"""What the ranks of a checkpoint of `Checkpointer.save` saved under each name, and whether it is one value.

Invariant: a name is loaded only if its ranks' values agree: as shards of one tensor, or byte for byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tierd.client.restoring.ranged_reader import Files
from tierd.client.restoring.tensor_equality import ComparedPart, are_equal
from tierd.core.shard_placement import REPLICATE
from tierd.dcp.native_leaves import NativeLeaf, SavedArray, SavedTensor
from tierd.state.aliasing import alike
from tierd.state.containers import instances
from tierd.state.kinds.generators import SavedRng

# A rank and the value that it saved under a name: a `NativeLeaf`, or a value without tensors.
RankClaim = tuple[int, Any]


class RankClaims:
    """The values of all ranks that saved, by name.

    Args:
        files: of the checkpoint.
        rank, world: this process's rank and the number of ranks that load together.
    """

    def __init__(self, files: Files, rank: int, world: int) -> None:
        self._files, self._rank, self._world = files, rank, world
        self._claims: dict[str, list[RankClaim]] = defaultdict(list)
        self._sides = {one: ComparedPart(files.part(one)) for one in range(files.world)}

    def add(self, rank: int, name: str, value: Any) -> None:
        """Add what a rank saved under a name. Ranks are added in order."""
        self._claims[name].append((rank, value))

    @property
    def names(self) -> Iterable[str]:
        return self._claims.keys()

    def own(self, name: str) -> RankClaim:
        """Return this rank's value of a name if as many ranks load as saved.

        Otherwise return the value of the first rank that has one.
        """
        claims = self._claims[name]
        return next((claim for claim in claims if self._is_as_before and claim[0] == self._rank), claims[0])

    def value(self, name: str) -> Any:
        """Return what `own` does, without the rank; None if no rank saved this name."""
        return self.own(name)[1] if name in self._claims else None

    @property
    def _is_as_before(self) -> bool:
        return self._world == self._files.world

    def read_from(self, name: str) -> list[RankClaim]:
        """Return the ranks from whose parts a tensor is read, one for each distinct shard.

        If as many ranks load as saved, this rank reads its own shard. Among other ranks with the same shard, each
        loading rank chooses by its number, so that not all request the same part.
        """
        own = self.own(name)
        if own[1].placement is None:
            return [own]
        alike_ones: dict[object, list[RankClaim]] = defaultdict(list)
        for rank, leaf in self._claims[name]:
            if isinstance(leaf, NativeLeaf) and leaf.placement is not None and leaf.placement.coordinate is not None:
                alike_ones[leaf.placement.place].append((rank, leaf))
        return [
            next((one for one in some if self._is_as_before and one[0] == self._rank), some[self._rank % len(some)])
            for some in alike_ones.values()
        ]

    def contradiction(self, name: str) -> str | None:
        """Return why what the ranks saved under a name is not one value; None if it is. Raises as `Files.read`."""
        claims = self._claims[name]
        placements = [
            leaf.placement for _, leaf in claims if isinstance(leaf, NativeLeaf) and leaf.placement is not None
        ]
        if placements:
            if len(placements) < len(claims):
                return "a DTensor on some of the ranks that saved it, and none on others"
            return _misplaced([leaf for _, leaf in claims]) or self._collision(claims)
        _, own = self.own(name)
        if generator := next((saved for _, saved in instances(own, SavedRng)), None):
            return f"{generator.label}, which DCP does not load; leave it out of the state that is loaded"
        if any(tensor.sharded for _, tensor in instances(own, SavedTensor)):
            return "a DTensor in a tuple or deque, which DCP does not enter; save it in a dict or a list"
        if self._is_as_before:
            return None
        others = claims[1:]
        if not isinstance(own, NativeLeaf) and any(not alike(own, value) for _, value in others):
            return self._differs()
        # Each loading rank compares a share of the ranks that saved, because DCP reports a difference to all ranks.
        mine = [claim for claim in others if claim[0] % self._world == self._rank]
        return None if all(self._is_same(claims[0], claim) for claim in mine) else self._differs()

    def _collision(self, claims: list[RankClaim]) -> str | None:
        """Return why ranks with one coordinate do not have the same shard, or None.

        A submesh occurs several times in a larger mesh, so several ranks can have one coordinate. With tensor
        parallelism as the other dimension, each occurrence has the same tensor; with pipeline parallelism, each stage
        has another one.
        """
        first: dict[object, RankClaim] = {}
        for rank, leaf in claims:
            one = first.setdefault(leaf.placement.coordinate, (rank, leaf))
            if one[0] != rank and rank % self._world == self._rank and not self._is_same(one, (rank, leaf)):
                return f"ranks {one[0]} and {rank} saved different shards of one coordinate under this name; {_NAMES}"
        return None

    def _differs(self) -> str:
        return (
            f"it differs between the {self._files.world} ranks that saved it, and {self._world} load: leave it out of "
            "the state that is loaded, or launch as many ranks"
        )

    def _is_same(self, one: RankClaim, other: RankClaim) -> bool:
        """Return whether two ranks' tensors are the same, or the arrays in two values that are otherwise equal."""
        here, there = self._sides[one[0]], self._sides[other[0]]
        if isinstance(one[1], NativeLeaf) != isinstance(other[1], NativeLeaf):
            return False
        if isinstance(one[1], NativeLeaf):
            if (one[1].dtype, one[1].shape) != (other[1].dtype, other[1].shape):
                return False
            pairs = [(one[1].entry, other[1].entry)]
        else:
            found = zip(instances(one[1], SavedArray), instances(other[1], SavedArray), strict=True)
            pairs = [(mine.entry, theirs.entry) for (_, mine), (_, theirs) in found]
        return all(are_equal(self._files, here, mine, there, theirs) for mine, theirs in pairs)


def _misplaced(leaves: list[NativeLeaf]) -> str | None:
    """Return why the shards of several ranks are not shards of one tensor; None if they are."""
    placements = [leaf.placement for leaf in leaves if leaf.placement is not None]
    first = placements[0]
    if any(
        (one.shape, one.mesh, one.names, one.rules) != (first.shape, first.mesh, first.names, first.rules)
        for one in placements
    ) or any(leaf.dtype != leaves[0].dtype for leaf in leaves):
        return f"ranks saved different tensors under this name; {_NAMES}"
    expected = 1
    for rule, count in zip(first.rules, first.mesh, strict=True):
        expected *= 1 if rule[0] == REPLICATE else count
    found = len({one.place for one in placements if one.coordinate is not None})
    if found < expected:
        return f"{found} of {expected} shards were saved under this name; save the same state on every rank of the mesh"
    return None


_NAMES = (
    "as with optimizer.state_dict() of several pipeline stages, which numbers parameters; save what "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives, which names them"
)
