"""Copy a run, or one checkpoint of it, from one tier to another, for `tierd copy`: without spool or daemon.

Each part is relayed (`daemon/transfer/relay.py`): a chunk that the target has is compared there and not sent, every
other one is verified and confirmed, and the part's manifest is put last. So a copy that was killed continues, and half
a copy is never a checkpoint.

Invariant: whatever makes retention keep a checkpoint on the target is there before its manifest. A pin is put before
the first chunk, and the run's policies before the first checkpoint. The run's head is written after the manifests that
it describes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from tierd.core.errors import ConfigError, CorruptChunk, ManifestError, ObjectNotFound, StoreRefused, WrongKey
from tierd.core.ids import CheckpointId, PartId, pin_key, retention_key
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import complete_world_sizes
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.stored import encode
from tierd.core.timeline.candidates import not_found, restore_candidates
from tierd.core.timeline.head import together
from tierd.daemon.tiers.heads import following, write
from tierd.daemon.tiers.observe import TierObserver, base_of
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import Route
from tierd.daemon.transfer.relay import relay
from tierd.daemon.transfer.replicas import is_there, read_manifest
from tierd.stores.base import Store

_FEW = 1000  # manifests at the source, up to which all are read beforehand, for the size of the work


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """One checkpoint of a copy.

    Attributes:
        size: bytes of its files, before compression.
        sent: bytes that were sent; the target had the other chunks already.
        was_there: whether every part was on the target before.
    """

    step: int
    attempt: str
    size: int
    sent: int
    was_there: bool


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """What a copy put on the target.

    Attributes:
        run: the run's name at the source.
        to_run: its name on the target.
        checkpoints: the checkpoints that are verified on the target, oldest first.
        pinned: the steps that were pinned on the target.
        policies: how many of the run's policies were put on the target.
        failed: the checkpoints that are proven corrupt at the source, and why.
        vanished: the steps that were pruned at the source meanwhile.
        incomplete: how many checkpoints lack parts at the source; they are not copied.
    """

    run: str
    to_run: str
    checkpoints: tuple[CopiedCheckpoint, ...]
    pinned: tuple[int, ...]
    policies: int
    failed: tuple[str, ...]
    vanished: tuple[int, ...]
    incomplete: int


async def copy_run(
    source: Store,
    target: Store,
    run: str,
    to_run: str,
    step: int | None,
    attempt: str | None,
    progress: Progress,
) -> CopiedRun:
    """Copy the complete checkpoints of a run, oldest first, so that each shares chunks with the one before.

    A whole run comes with its pins, its head, and its policies unless the target has others of that run. A single
    checkpoint is pinned on the target, because a person asked for it and the policy there may not want it.

    Args:
        source: the tier to read.
        target: the tier to write; the same store if only the name differs.
        run: the run's name at the source.
        to_run: its name on the target.
        step: the checkpoint of this step only, as a restore would choose it; None: all.
        attempt: checkpoints of this attempt only; None: of all.
        progress: updated during the copy, in raw bytes.

    Raises:
        CheckpointNotFound: the source has no such complete checkpoint.
        ConfigError: `to_run` is another run on the target.
        StoreUnavailable, StoreRefused: the source could not be asked, or the target did not accept something; the same
            call continues from there.
    """
    here = await TierObserver(source).look({run}, few=_FEW, chunks=False)
    wanted = _chosen(here, run, step, attempt)
    eye = TierObserver(target)
    there = await eye.look({to_run}, {to_run: here.run(run).ranks}, chunks=False)
    work = _Copy(source, target, run, to_run, here, there, progress)
    await work.check_target()
    pins = set(wanted) if step is not None else here.pins.intersection(wanted)
    policies = 0 if step is not None else await work.put_policies()
    progress.begin(sum(_size(here, part) for one in wanted for part in _parts(here, one)))
    done, failed, vanished = [], [], []
    for one in wanted:
        if one in pins:
            await target.put(pin_key(work.renamed(one)), b"")
        try:
            done.append(await work.checkpoint(one))
        except (CorruptChunk, ManifestError, ObjectNotFound) as error:
            if all([await is_there({"": source}, one, world) for world in {part.world for part in _parts(here, one)}]):
                failed.append(f"step {one.step} (attempt {one.attempt}): {error}")
            else:
                vanished.append(one.step)
    if step is None:
        await work.put_head()
    pinned = tuple(sorted(one.step for one in pins))
    incomplete = len(here.run(run).halves)
    return CopiedRun(run, to_run, tuple(done), pinned, policies, tuple(failed), tuple(vanished), incomplete)


def _chosen(here: Place, run: str, step: int | None, attempt: str | None) -> list[CheckpointId]:
    inventory = Inventory(Place(), {"source": here})
    if step is None:
        found = [one for one in here.run(run).whole if attempt in (None, one.attempt)]
    else:
        found = [one.checkpoint for one in restore_candidates(inventory, run, step, attempt).candidates[:1]]
    if not found:
        raise not_found(restore_candidates(inventory, run, step, attempt), run, step, [], attempt)
    return found


def _parts(place: Place, one: CheckpointId) -> Iterator[PartId]:
    """Yield the parts of a checkpoint, of the world sizes of which every rank is there."""
    ranks = place.checkpoints[one].sound
    return (PartId(one, rank, world) for world in complete_world_sizes(ranks) for rank in range(world))


def _size(place: Place, part: PartId) -> int:
    facts = place.facts(part)
    return facts.size if facts else 0


@dataclass(slots=True)
class _Copy:
    """A copy at work. `there` shows the target, with the parts that were copied."""

    source: Store
    target: Store
    run: str
    to_run: str
    here: Place
    there: Place
    progress: Progress

    def renamed(self, one: CheckpointId) -> CheckpointId:
        return replace(one, run=self.to_run)

    async def check_target(self) -> None:
        """Refuse a target whose objects of the run this process cannot read, or which are of another run.

        Raises:
            StoreRefused: the target has objects of the run with another key, or without one.
            ConfigError: a run that was not copied from this one has the new name.
        """
        strange = [str(why) for _, why in self.there.defects() if isinstance(why, WrongKey)]
        strange += [one.why for one in self.there.policies.get(self.to_run, ()) if one.alien]
        if strange:
            raise StoreRefused(f"nothing is put beside what cannot be read on the target: {strange[0]}")
        for one in self.there.run(self.to_run).newest_of_each if self.to_run != self.run else ():
            if self.run not in await self._copied_from(one):
                raise ConfigError(
                    f"--as {self.to_run}: the target has another run of that name (attempt {one.attempt} was not "
                    f"copied from {self.run}), and two histories do not mix; choose another name"
                )

    async def _copied_from(self, one: CheckpointId) -> tuple[str, ...]:
        for part in self.there.checkpoints[one].parts():
            try:
                return (await read_manifest(self.target, part)).copied_from
            except (ObjectNotFound, ManifestError):
                continue  # it tells nothing; another part may
        return ()

    async def put_policies(self) -> int:
        """Put the source's policies of the run on the target, unless other nodes gave it a policy there.

        Raises:
            StoreRefused: a policy at the source cannot be read, so what the copy has to keep is not known.
        """
        own = {(one.by, one.given): one for one in self.here.policies.get(self.run, ())}
        known = {(one.by, one.given) for one in self.there.policies.get(self.to_run, ())}
        if any(given != "default" and (by, given) not in own for by, given in known):
            return 0
        fresh = [one for key, one in own.items() if key not in known]
        if lost := [one for one in fresh if one.retention is None]:
            raise StoreRefused(
                f"what run {self.run} keeps is not known at the source, so a copy could be pruned wrongly: "
                f"{lost[0].why}; copy single steps with --step, which are pinned"
            )
        for one in fresh:
            data = encode(replace(one, run=self.to_run, tiers=()))
            await self.target.put(retention_key(self.to_run, one.by, one.given), data)
        self.there = self.there.with_policies([replace(one, run=self.to_run) for one in fresh])
        return len(fresh)

    async def checkpoint(self, one: CheckpointId) -> CopiedCheckpoint:
        """Copy one checkpoint.

        Raises:
            CorruptChunk, ManifestError: it is proven corrupt at the source, or was pruned there.
            ObjectNotFound: it was pruned there.
            StoreUnavailable, StoreRefused: as `copy_run`.
        """
        size = sent = new = 0
        for part in _parts(self.here, one):
            own = PartId(self.renamed(one), part.rank, part.world)
            before = self.progress.done
            if self.there.has(own) and (manifest := await self._same(part, own)) is not None:
                size += manifest.size
            else:
                base, worn_out = await base_of(self.target, self.there, own)
                done = await relay(
                    {"the source": self.source},
                    part,
                    Route(self.target),
                    lender=base,
                    worn_out=worn_out,
                    run=self.to_run,
                    read=self._moved,
                )
                size, sent, new = size + done.raw, sent + done.sent, new + 1
                self.there = self.there.adding(own, done.facts)
            self.progress.done = before
            self._moved(_size(self.here, part))
        return CopiedCheckpoint(one.step, one.attempt, size, sent, not new)

    def _moved(self, size: int) -> None:
        self.progress.done += size
        self.progress.told(self.progress)

    async def _same(self, part: PartId, own: PartId) -> Manifest | None:
        """Return the target's manifest of a part if it describes what the source has; None if it is damaged.

        Raises:
            StoreRefused: it describes something else.
        """
        try:
            theirs = await read_manifest(self.target, own)
        except (ManifestError, ObjectNotFound):
            return None
        if not theirs.same_content((await read_manifest(self.source, part)).under(self.to_run)):
            raise StoreRefused(f"{own}: the target has other content by this name; copy with --as another name")
        return theirs

    async def put_head(self) -> None:
        """Write the run's head on the target, unless the heads there say the same of each launch.

        A launch of which the source has no checkpoint any more is known from the source's heads alone.
        """
        heads = tuple(msgspec.structs.replace(one, run=self.to_run) for one in self.here.heads.get(self.run, ()))
        known = self.there.heads.get(self.to_run, ())
        if not self.there.run(self.to_run).whole:
            return
        inventory = Inventory(Place(), {"target": self.there, "source": Place(heads={self.to_run: heads})})
        head = following(inventory, self.there, self.to_run, secrets.token_hex(4), known)
        before = together(known)
        if any(before.get(attempt) != launch for attempt, launch in head.launches.items()):
            await write(self.target, head, known)
