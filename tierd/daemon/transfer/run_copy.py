"""Copy a run, or one checkpoint of it, from one tier to another, for `tierd copy`: without spool or daemon.

Each part is relayed (`daemon/transfer/tier_fetch.py`): a chunk that the target has is compared there and not sent,
every other one is verified and confirmed, and the part's manifest is put last. So a copy that was killed continues,
and half a copy is never a checkpoint.

Invariant: whatever makes retention keep a checkpoint on the target is there before its manifest. A pin is put before
the first chunk, and the run's policies before the first checkpoint. The run's head is written after the manifests that
it describes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, pin_key, retention_key
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import complete_world_sizes, total_stored_size
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.retention.policy import encode_policy
from tierd.core.timeline.restore_order import not_found_error, restore_candidates
from tierd.daemon.concurrency import gather_limited
from tierd.daemon.tiers.intents import read_pin
from tierd.daemon.tiers.run_overview import check_encryption_key
from tierd.daemon.tiers.tier_objects import has_all_manifests, read_manifest
from tierd.daemon.tiers.tier_observer import TierObserver, find_base
from tierd.daemon.tiers.tier_run_records import next_head, put_head
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.confirmed_chunks import ConfirmedChunks
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.tier_fetch import relay
from tierd.stores.base import Store

_LISTINGS = 3  # of the source, because checkpoints may be pruned there, and newer ones arrive, during a copy
_PARTS = 4  # ranks' parts of one checkpoint that are copied at once, because small ones cost many requests in a row
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
    *,
    dry_run: bool = False,
) -> CopiedRun:
    """Copy the complete checkpoints of a run, oldest first, so that each shares chunks with the one before.

    A whole run comes with its pins, its head, and its policies unless the target has others of that run. A single
    checkpoint is pinned on the target, because a person asked for it and the policy there may not want it.

    Args:
        target: the tier to write; the same store if only the name differs.
        step: the checkpoint of this step only, as a restore would choose it; None: all.
        dry_run: put nothing, and return what a copy would put; `sent` then is what is stored at the source of parts
            that the target lacks, of which it may have chunks.

    Raises:
        CheckpointNotFound: the source has no such complete checkpoint, or it was pruned there meanwhile.
        ConfigError: `to_run` is another run on the target.
        StoreUnavailable, StoreRefused: a tier did not answer, or refused; the same call continues from there. Or the
            target has another key than `target`.
    """
    source_place = await TierObserver(source).observe({run}, spare_reads=_FEW, chunks=False, all_names=True)
    _check_readable(source_place, run, "the source")
    selected = _select_checkpoints(source_place, run, step, attempt)
    target_place = await TierObserver(target).observe({to_run}, {to_run: source_place.run(run).ranks}, chunks=False)
    work = _Copy(source, target, run, to_run, source_place, target_place, progress, TierUploadContext(target))
    _check_readable(target_place, to_run, "the target")
    await work.check_target()
    if not target_place.checkpoints:
        await check_encryption_key(target, to_run)
    if dry_run:
        forecast = tuple(work.forecast(checkpoint) for checkpoint in selected)
        return CopiedRun(run, to_run, forecast, (), 0, (), (), 0)
    policies = 0 if step is not None else await work.put_policies()
    results: dict[CheckpointId, CopiedCheckpoint | str | None] = {}
    pins: set[CheckpointId] = set()
    for _ in range(_LISTINGS):
        pins |= set(selected) if step is not None else work.source_place.pins.intersection(selected)
        results |= await work.copied(selected, pins)
        if step is not None or all(results[checkpoint] for checkpoint in selected):
            break
        work.source_place = await TierObserver(source).observe({run}, spare_reads=_FEW, chunks=False, all_names=True)
        complete = work.source_place.run(run).usable
        selected = [
            checkpoint
            for checkpoint in complete
            if attempt in (None, checkpoint.attempt) and results.get(checkpoint) is None
        ]
    copied = {checkpoint: result for checkpoint, result in results.items() if isinstance(result, CopiedCheckpoint)}
    vanished = [checkpoint.step for checkpoint, result in results.items() if result is None]
    if step is not None and vanished:
        raise CheckpointNotFound(f"run {run!r} step {step}: it was pruned at the source while it was copied")
    halves = [
        half for half in work.source_place.run(run).unusable if step is None and attempt in (None, half.id.attempt)
    ]
    failed = [_failure(half.id, next(iter(half.defects.values()))) for half in halves if half.complete]
    failed += [result for result in results.values() if isinstance(result, str)]
    if step is None:
        await work.put_head()
    pinned = tuple(checkpoint.step for checkpoint in copied if checkpoint in pins)
    incomplete = sum(not half.complete for half in halves)
    return CopiedRun(run, to_run, tuple(copied.values()), pinned, policies, tuple(failed), tuple(vanished), incomplete)


def _check_readable(place: Place, run: str, where: str) -> None:
    """Raise `StoreRefused` if a place has objects of the run that this process cannot read: it may lack the key."""
    strange = [str(why) for part, why in place.defects() if isinstance(why, FormatTooNew)]
    strange += [policy.why for policy in place.policies.get(run, ()) if policy.alien]
    if strange:
        raise StoreRefused(f"run {run}: {where} has what cannot be read here: {strange[0]}")


def _failure(checkpoint: CheckpointId, error: TierdError) -> str:
    return f"step {checkpoint.step} (attempt {checkpoint.attempt}): {error}"


def _select_checkpoints(place: Place, run: str, step: int | None, attempt: str | None) -> list[CheckpointId]:
    resume = restore_candidates(Inventory(Place(), {"source": place}), run, step, attempt)
    complete = [checkpoint for checkpoint in place.run(run).usable if attempt in (None, checkpoint.attempt)]
    selected = complete if step is None else [candidate.checkpoint for candidate in resume.candidates[:1]]
    if not selected:
        raise not_found_error(resume, run, step, [], attempt)
    return selected


def _complete_parts(place: Place, checkpoint: CheckpointId) -> Iterator[PartId]:
    """Yield the parts of a checkpoint, of the world sizes of which every rank is there."""
    ranks = place.checkpoints[checkpoint].sound_ranks
    return (PartId(checkpoint, rank, world) for world in complete_world_sizes(ranks) for rank in range(world))


def _size(place: Place, part: PartId) -> int:
    facts = place.facts(part)
    return facts.size if facts else 0


@dataclass(slots=True)
class _Copy:
    """A copy at work. `target_place` shows the target, with the parts that were copied."""

    source: Store
    target: Store
    run: str
    to_run: str
    source_place: Place
    target_place: Place
    progress: Progress
    route: TierUploadContext

    def renamed(self, checkpoint: CheckpointId) -> CheckpointId:
        return replace(checkpoint, run=self.to_run)

    async def check_target(self) -> None:
        """Raise `ConfigError` if the target has a run of the new name that was not copied from this one."""
        for checkpoint in self.target_place.run(self.to_run).newest_of_each if self.to_run != self.run else ():
            if self.run not in await self._copied_from(checkpoint):
                raise ConfigError(
                    f"--as {self.to_run}: the target has another run of that name (attempt {checkpoint.attempt} "
                    f"was not copied from {self.run}), and two histories do not mix; choose another name"
                )

    async def _copied_from(self, checkpoint: CheckpointId) -> tuple[str, ...]:
        for part in self.target_place.checkpoints[checkpoint].parts():
            try:
                return (await read_manifest(self.target, part)).copied_from
            except (ObjectNotFound, ManifestError):
                continue  # it tells nothing; another part may
        return ()

    def forecast(self, checkpoint: CheckpointId) -> CopiedCheckpoint:
        """Return what a copy of a checkpoint would do, by the listings of both places."""
        parts = list(_complete_parts(self.source_place, checkpoint))
        renamed = self.renamed(checkpoint)
        missing = [part for part in parts if not self.target_place.has(PartId(renamed, part.rank, part.world))]
        size = sum(_size(self.source_place, part) for part in parts)
        sent = total_stored_size({part: facts for part in missing if (facts := self.source_place.facts(part))})
        return CopiedCheckpoint(checkpoint.step, checkpoint.attempt, size, sent, not missing)

    async def put_policies(self) -> int:
        """Put the source's policies of the run on the target, unless other nodes gave it a policy there.

        Raises:
            StoreRefused: a policy at the source cannot be read, so what the copy has to keep is not known.
        """
        at_source = {(policy.by, policy.given): policy for policy in self.source_place.policies.get(self.run, ())}
        at_target = {(policy.by, policy.given) for policy in self.target_place.policies.get(self.to_run, ())}
        if any(provenance != "default" and (by, provenance) not in at_source for by, provenance in at_target):
            return 0
        fresh = [policy for key, policy in at_source.items() if key not in at_target]
        if unknown := [policy for policy in fresh if policy.retention is None]:
            raise StoreRefused(
                f"what run {self.run} keeps is not known at the source, so a copy could be pruned wrongly: "
                f"{unknown[0].why}; copy single steps with --step, which are pinned"
            )
        for policy in fresh:
            data = encode_policy(replace(policy, run=self.to_run, tiers=()))
            await self.target.put(retention_key(self.to_run, policy.by, policy.given), data)
        self.target_place = self.target_place.with_policies([replace(policy, run=self.to_run) for policy in fresh])
        return len(fresh)

    async def copied(
        self, checkpoints: Sequence[CheckpointId], pins: Collection[CheckpointId]
    ) -> dict[CheckpointId, CopiedCheckpoint | str | None]:
        """Copy these checkpoints, each after its pin if it is one of `pins`; return each one's `outcome`."""
        place = self.source_place
        parts = (part for checkpoint in checkpoints for part in _complete_parts(place, checkpoint))
        self.progress.begin(sum(_size(place, part) for part in parts))
        results = {}
        for checkpoint in checkpoints:
            if checkpoint in pins:
                text = await read_pin(self.source, checkpoint)
                await self.target.put(pin_key(self.renamed(checkpoint)), text or b"")
            results[checkpoint] = await self.outcome(checkpoint)
        return results

    async def outcome(self, checkpoint: CheckpointId) -> CopiedCheckpoint | str | None:
        """Copy one checkpoint; return why it is corrupt instead, or None if it was pruned at the source meanwhile."""
        try:
            return await self._checkpoint(checkpoint)
        except (CorruptChunk, ManifestError, ObjectNotFound) as error:
            worlds = {part.world for part in _complete_parts(self.source_place, checkpoint)}
            is_present = all([await has_all_manifests({"": self.source}, checkpoint, world) for world in worlds])
            return _failure(checkpoint, error) if is_present else None

    async def _checkpoint(self, checkpoint: CheckpointId) -> CopiedCheckpoint:
        route = replace(self.route, confirmed=ConfirmedChunks())
        parts = await gather_limited(
            _PARTS, [self._part(part, route) for part in _complete_parts(self.source_place, checkpoint)]
        )
        if not parts:
            raise ManifestError(f"{checkpoint}: no complete set of its manifests can be used")
        sent = sum(sent or 0 for _, sent in parts)
        was_present = all(sent is None for _, sent in parts)
        return CopiedCheckpoint(checkpoint.step, checkpoint.attempt, sum(size for size, _ in parts), sent, was_present)

    async def _part(self, part: PartId, route: TierUploadContext) -> tuple[int, int | None]:
        """Copy one part; return its size in bytes, and the bytes that were sent, None if the target had the part."""
        target_part = PartId(self.renamed(part.checkpoint), part.rank, part.world)
        if self.target_place.has(target_part) and (manifest := await self._same(part, target_part)) is not None:
            self._report_progress(_size(self.source_place, part))
            return manifest.size, None
        unread_bytes = _size(self.source_place, part)

        def read(size: int) -> None:
            nonlocal unread_bytes
            unread_bytes -= size
            self._report_progress(size)

        base, worn_out = await find_base(self.target, self.target_place, target_part)
        sources = {"the source": self.source}
        relayed = await relay(sources, part, route, base=base, worn_out=worn_out, run=self.to_run, read=read)
        self._report_progress(unread_bytes)  # the chunks that the target had
        self.target_place = self.target_place.adding(target_part, relayed.facts)
        return relayed.raw, relayed.sent

    def _report_progress(self, size: int) -> None:
        self.progress.done += size
        self.progress.on_progress(self.progress)

    async def _same(self, part: PartId, target_part: PartId) -> Manifest | None:
        """Return the target's manifest of a part if it describes what the source has; None if it is damaged.

        Raises:
            StoreRefused: it describes something else.
        """
        try:
            target_manifest = await read_manifest(self.target, target_part)
        except (ManifestError, ObjectNotFound):
            return None
        if not target_manifest.same_content((await read_manifest(self.source, part)).under(self.to_run)):
            raise StoreRefused(f"{target_part}: the target has other content by this name; copy with --as another name")
        return target_manifest

    async def put_head(self) -> None:
        """Write the run's head on the target, unless the heads there say the same of each launch.

        A launch of which the source has no checkpoint any more is known from the source's heads alone.
        """
        if not self.target_place.run(self.to_run).usable:
            return
        heads = tuple(
            msgspec.structs.replace(source_head, run=self.to_run)
            for source_head in self.source_place.heads.get(self.run, ())
        )
        target_heads = self.target_place.heads.get(self.to_run, ())
        inventory = Inventory(Place(), {"target": self.target_place, "source": Place(heads={self.to_run: heads})})
        head = next_head(inventory, self.target_place, self.to_run, secrets.token_hex(4), target_heads)
        before = Inventory(Place(), {"target": self.target_place}).remembered(self.to_run)
        if any(before.get(attempt) != launch for attempt, launch in head.launches.items()):
            await put_head(self.target, head, target_heads)
