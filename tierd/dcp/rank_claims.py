"""What the ranks of a checkpoint of `Checkpointer.save` saved under each name, and whether it is one value.

Invariant: a name is loaded only if its ranks' values agree: as shards of one tensor, or byte for byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from tierd.client.restoring.ranged_reader import PartFiles
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

    def __init__(self, files: PartFiles, rank: int, world: int) -> None:
        self._files, self._rank, self._world = files, rank, world
        self._claims: dict[str, list[RankClaim]] = defaultdict(list)
        self._sides = {saved_rank: ComparedPart(files.part(saved_rank)) for saved_rank in range(files.world)}

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
        own_claim = self.own(name)
        if own_claim[1].placement is None:
            return [own_claim]
        alike_ones: dict[object, list[RankClaim]] = defaultdict(list)
        for rank, leaf in self._claims[name]:
            if isinstance(leaf, NativeLeaf) and leaf.placement is not None and leaf.placement.coordinate is not None:
                alike_ones[leaf.placement.place].append((rank, leaf))
        return [
            next(
                (claim for claim in claims if self._is_as_before and claim[0] == self._rank),
                claims[self._rank % len(claims)],
            )
            for claims in alike_ones.values()
        ]

    def contradiction(self, name: str) -> str | None:
        """Return why what the ranks saved under a name is not one value; None if it is. Raises as `PartFiles.read`."""
        claims = self._claims[name]
        placements = [
            leaf.placement for _, leaf in claims if isinstance(leaf, NativeLeaf) and leaf.placement is not None
        ]
        if placements:
            if len(placements) < len(claims):
                return "a DTensor on some of the ranks that saved it, and none on others"
            return _misplaced([leaf for _, leaf in claims]) or self._collision(claims)
        _, own_value = self.own(name)
        if generator := next((saved for _, saved in instances(own_value, SavedRng)), None):
            return f"{generator.label}, which DCP does not load; leave it out of the state that is loaded"
        if any(tensor.sharded for _, tensor in instances(own_value, SavedTensor)):
            return "a DTensor in a tuple or deque, which DCP does not enter; save it in a dict or a list"
        if self._is_as_before:
            return None
        other_claims = claims[1:]
        if not isinstance(own_value, NativeLeaf) and any(not alike(own_value, value) for _, value in other_claims):
            return self._differs()
        # Each loading rank compares a share of the ranks that saved, because DCP reports a difference to all ranks.
        share = [claim for claim in other_claims if claim[0] % self._world == self._rank]
        return None if all(self._is_same(claims[0], claim) for claim in share) else self._differs()

    def _collision(self, claims: list[RankClaim]) -> str | None:
        """Return why ranks with one coordinate do not have the same shard, or None.

        A submesh occurs several times in a larger mesh, so several ranks can have one coordinate. With tensor
        parallelism as the other dimension, each occurrence has the same tensor; with pipeline parallelism, each stage
        has another one.
        """
        first: dict[object, RankClaim] = {}
        for rank, leaf in claims:
            first_claim = first.setdefault(leaf.placement.coordinate, (rank, leaf))
            if (
                first_claim[0] != rank
                and rank % self._world == self._rank
                and not self._is_same(first_claim, (rank, leaf))
            ):
                return (
                    f"ranks {first_claim[0]} and {rank} saved different shards of one coordinate under this "
                    f"name; {_NAMES}"
                )
        return None

    def _differs(self) -> str:
        return (
            f"it differs between the {self._files.world} ranks that saved it, and {self._world} load: leave it out of "
            "the state that is loaded, or launch as many ranks"
        )

    def _is_same(self, first_claim: RankClaim, second_claim: RankClaim) -> bool:
        """Return whether two ranks' tensors are the same, or the arrays in two values that are otherwise equal."""
        first_part, second_part = self._sides[first_claim[0]], self._sides[second_claim[0]]
        if isinstance(first_claim[1], NativeLeaf) != isinstance(second_claim[1], NativeLeaf):
            return False
        if isinstance(first_claim[1], NativeLeaf):
            if (first_claim[1].dtype, first_claim[1].shape) != (second_claim[1].dtype, second_claim[1].shape):
                return False
            pairs = [(first_claim[1].entry, second_claim[1].entry)]
        else:
            arrays = zip(instances(first_claim[1], SavedArray), instances(second_claim[1], SavedArray), strict=True)
            pairs = [(first.entry, second.entry) for (_, first), (_, second) in arrays]
        return all(are_equal(self._files, first_part, first, second_part, second) for first, second in pairs)


def _misplaced(leaves: list[NativeLeaf]) -> str | None:
    """Return why the shards of several ranks are not shards of one tensor; None if they are."""
    placements = [leaf.placement for leaf in leaves if leaf.placement is not None]
    first = placements[0]
    if any(
        (placement.shape, placement.mesh, placement.names, placement.rules)
        != (first.shape, first.mesh, first.names, first.rules)
        for placement in placements
    ) or any(leaf.dtype != leaves[0].dtype for leaf in leaves):
        return f"ranks saved different tensors under this name; {_NAMES}"
    expected = 1
    for rule, count in zip(first.rules, first.mesh, strict=True):
        expected *= 1 if rule[0] == REPLICATE else count
    shards = len({placement.place for placement in placements if placement.coordinate is not None})
    if shards < expected:
        return (
            f"{shards} of {expected} shards were saved under this name; save the same state on every rank of the mesh"
        )
    return None


_NAMES = (
    "as with optimizer.state_dict() of several pipeline stages, which numbers parameters; save what "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives, which names them"
)
