"""One trial: a world is harmed, tierd's own code is asked, and its answer compared with what was worked out before.

Invariant: what is owed follows from what lies there before tierd acts, read by none of its code.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.corruption.harms import LOCAL, Harms
from faults.corruption.judge import Judge
from faults.corruption.launch import launch
from faults.corruption.places import OTHER, RUN, TIERS, WORLD, Places
from faults.rounds import Lost
from support.by_hand import chain
from support.world import read, reconciler, running, settle

from tierd.client.restoring.restorer import VerifiedPart
from tierd.core.errors import CheckpointNotFound, CorruptChunk, ManifestError, ObjectNotFound, StoreRefused
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.background_schedule import ScrubbedCopy
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.scrub.copy_verifier import CopyVerifier
from tierd.daemon.scrub.repairer import Repairer
from tierd.daemon.tiers.tier_objects import verify_part
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.tiers.tier_pauses import no_pause
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.restore_to_directory import restore_to_directory
from tierd.events.journal import Journal
from tierd.spool.verified_reads import bad_chunks
from tierd.threads import mark_foreground

Whole = dict[tuple[str, PartId], bool]  # a place and a part -> whether its copy is right

PLACES = (LOCAL, *TIERS)
KINDS = {"verify": 20, "heal": 30, "scrub": 25, "restore": 15, "export": 8, "settle": 2, "prune": 2}
STREAM = "stream"  # asked beside a trial of these kinds, so that their seeds stay what they are
_REASON = 20  # characters that say why, at least
_RANK = re.compile(r"/(\d{5})/[0-9a-f]{32}|rank (\d+)")
_PATIENCE = 240.0  # seconds that a daemon may take to settle: only a hang is meant


@dataclass(frozen=True)
class Line:
    """The complete checkpoints in the order in which they must be tried, and of each the ranks whose part cannot be
    had. `lenient`: some harmed object still means what it should."""

    checkpoints: list[CheckpointId]
    bad: list[list[int]]
    lenient: bool

    @property
    def first(self) -> CheckpointId | None:
        return next((one for one, ranks in zip(self.checkpoints, self.bad, strict=True) if not ranks), None)


def _skipped(lines: Iterable[str]) -> dict[CheckpointId, str]:
    """What a message says it passed over, and why."""
    found = [re.match(r"(?:  skipped )?step (\d+) \(attempt (\S+)\): (.*)", line) for line in lines]
    return {CheckpointId(RUN, match[2], int(match[1])): match[3] for match in found if match}


def restored_together(found: Sequence[object]) -> tuple[CheckpointId, dict[CheckpointId, str]]:
    """The checkpoint that all ranks restored, and what they passed over, with the reasons."""
    same = [(rank.part.checkpoint, rank.skipped) for rank in found if isinstance(rank, VerifiedPart)]
    if same != same[:1] * WORLD:
        raise Lost(f"the ranks restored, and skipped, otherwise: {same}")
    got, skipped = same[0]
    return got, {CheckpointId(RUN, each.attempt, each.step): each.reason for each in skipped}


class Trials:
    """The trials of one process, on its own world."""

    def __init__(self, places: Places, root: Path) -> None:
        self.places, self.judge, self._root = places, Judge(places), root

    async def one(self, noise: random.Random, kind: str = "") -> tuple[int, list[str]]:
        """Harm, ask, compare, put back."""
        mark_foreground()  # a machine that others load has no idle time to give
        kind = kind or noise.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            mine = [part for part in self.places.parts if part.checkpoint.run == RUN]
            focus = mine[min(int(noise.expovariate(0.35)), len(mine) - 1) * -1 - 1]
            if noise.random() < 0.35:  # retention has taken it from the spool
                for rank in range(WORLD) if noise.random() < 0.5 else (focus.rank,):
                    self.places.drop(PartId(focus.checkpoint, rank, WORLD))
            if noise.random() < 0.2:
                for part in mine[: noise.randrange(len(mine))]:
                    if part not in self.places.gone:
                        self.places.drop(part)
            harms = Harms(self.places, focus, noise, deep=kind in ("heal", "restore", "export", STREAM))
            many = kind in ("settle", "prune")
            number = noise.randrange(8, 26) if many else 1 + min(int(noise.expovariate(0.3)), 11)
            chosen = TIERS if kind in ("export", STREAM) else (LOCAL, *TIERS)
            done = harms.inflict(number, chosen, everywhere=0.6 if kind == "prune" else 0.1)
            before, journal = self._whole(), Journal()
            answer = await getattr(self, f"_{kind}")(focus, noise, before, journal)
            self._nothing_got_worse(before, journal, pruned=kind == "prune")
            return len(done), [f"asked: {kind}: {answer}", *(f"harm: {what}" for what in done)]
        finally:
            self.places.reset()

    def _whole(self) -> Whole:
        return {(place, part): self.judge.copy_is_right(place, part) for part in self.places.parts for place in PLACES}

    def _there(self, place: str, part: PartId) -> bool:
        return self.judge.is_local(part) if place == LOCAL else self.judge.manifest(place, part) is not None

    def _nothing_got_worse(self, before: Whole, journal: Journal, *, pruned: bool = False) -> None:
        """That what was right is right, and was not called otherwise; `pruned`: or is gone."""
        for (place, part), right in before.items():
            if right and not self.judge.copy_is_right(place, part) and not (pruned and not self._there(place, part)):
                raise Lost(f"{place}'s copy of {part} was right, and is not any more")
        good = {(place, str(part)) for (place, part), right in before.items() if right}
        for event in journal.events:
            if event.what in ("corrupt", "quarantined") and (event.place, event.subject) in good:
                raise Lost(f"a false alarm: {event}")

    # -- verify and look ----------------------------------------------------------------------------------------------

    async def _verify(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """Every byte of some copies read and compared; what is named must be what is wrong."""
        answers = Counter[bool]()
        for part in {focus, *noise.sample(self.places.parts, 2)}:
            for tier in TIERS:
                answers[await self._verify_tier(tier, part)] += 1
            if self.judge.is_local(part):
                answers[self._verify_local(part)] += 1
        world = await observe_places(self.places.spool, self.places.stores, RUN)
        for place, seen in (("local", world.spool), *world.tiers.items()):
            assert seen is not None
            for part in (one for one in self.places.parts if one.checkpoint.run == RUN):
                there = self._there(place, part)
                found = seen.checkpoints.get(part.checkpoint)
                listed = found is not None and part.rank in found.ranks.get(part.world, ())
                usable = found is not None and part in found.facts
                if listed != there or usable != (self.judge.readable(place, part) is not None):
                    raise Lost(f"a look at {place} takes {part} for {'usable' if usable else 'unusable'}")
        return "all right" if not answers[False] else "some wrong"

    async def _verify_tier(self, tier: str, part: PartId) -> bool:
        reported = self.judge.readable(tier, part)
        if self.judge.manifest(tier, part) is None:
            return True
        try:
            _, wrong = await verify_part(self.places.stores[tier], part, lambda size: None)
        except ManifestError:
            if reported is not None:
                raise Lost(f"{tier}: the manifest of {part} is right and was refused") from None
            return False
        if reported is None:
            raise Lost(f"{tier}: the manifest of {part} is wrong and was taken")
        chunks = [chunk for file in reported["files"] for chunk in file["chunks"]]
        bad = [chunk for chunk in chunks if not self.judge.stored(tier, part, chunk)]
        if len(bad) != len(wrong):
            raise Lost(f"{tier}: {len(bad)} chunks of {part} are wrong, and these were named: {wrong}")
        for chunk, text in zip(bad, wrong, strict=True):
            if not any(one.get("stored", {}).get("key", one["xxh3_128"]) in text for one in chain(chunk)):
                raise Lost(f"{tier}: {chunk} is wrong, and {text!r} was said")
        return not bad

    def _verify_local(self, part: PartId) -> bool:
        spool = self.places.spool
        try:
            manifest = spool.manifest(part)
        except ManifestError:
            if self.judge.readable(LOCAL, part) is not None:
                raise Lost(f"the spool's manifest of {part} is right and was refused") from None
            return False
        if self.judge.readable(LOCAL, part) is None:
            raise Lost(f"the spool's manifest of {part} is wrong and was taken")
        for number, (path, pieces) in enumerate(self.judge.truth[part].pieces):
            data, right = self.judge.local(part, path), self.judge.truth[part].files[path]
            bad = {index for index in range(len(pieces)) if not self.judge.chunk_in_spool(part, number, index)}
            if data is None or len(data) != len(right):
                bad.add(max(len(pieces) - 1, 0))
            named = {index for index, _, _ in bad_chunks(spool.path(part) / path, manifest.files[number])}
            if bad != named:
                raise Lost(f"{part}: chunks {sorted(bad)} of {path} are wrong, {sorted(named)} were named")
        right = self.judge.copy_is_right(LOCAL, part)
        if (self._read(part) is not None) != right:
            raise Lost(f"{part}: the spool's copy is {'right' if right else 'wrong'}, and was read otherwise")
        return right

    def _read(self, part: PartId) -> dict[str, bytes] | None:
        """What the spool gives of a part; None where it is proven corrupt. Wrong bytes are a loss for any reader."""
        try:
            files = read(self.places.spool, part)
        except (CorruptChunk, ManifestError, ObjectNotFound):
            return None
        found = {path: bytes(data) for path, data in files.items()}
        if found != self.places.held[part]:
            raise Lost(f"{part}: wrong bytes were given")
        return found

    # -- repair -------------------------------------------------------------------------------------------------------

    async def _heal(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        repairer = Repairer(self.places.spool, self.places.stores, journal, MemoryBudget())
        there = self.judge.exists(focus)
        can, lenient = self.judge.can_be_had(focus), self.judge.lenient(focus)
        try:
            await repairer.repair_spool(focus)
        except CorruptChunk as error:
            if can:
                raise Lost(f"{focus} can be had and was given up: {error}") from error
            if self.judge.exists(focus):
                raise Lost(f"{focus} is proven corrupt everywhere and was not set aside") from error
            return "lost"
        except ObjectNotFound as error:
            if there:
                raise Lost(f"{focus} is there and was not found") from error
            return "absent"
        if not self.judge.copy_is_right(LOCAL, focus) or self._read(focus) is None:
            raise Lost(f"{focus} was healed, and is not right")
        if not can and not lenient:
            raise Lost(f"{focus} cannot be had and was given all the same")
        return "right before" if before[LOCAL, focus] else "healed"

    # -- scrub --------------------------------------------------------------------------------------------------------

    async def _scrub(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        place = noise.choice(PLACES)
        judge = self.judge
        repairer = Repairer(self.places.spool, self.places.stores, journal, MemoryBudget())
        reader = CopyVerifier(repairer, 1 << 50, no_pause, Counter())
        lenient = judge.lenient(focus)
        there = self._there(place, focus)
        must = self._mendable(place, focus)
        quarantined = place in TIERS and judge.honest(place, focus) is None and judge.readable(LOCAL, focus) is not None
        try:
            whole = await reader.read(ScrubbedCopy(place, focus))
        except ObjectNotFound:
            if there:
                raise Lost(f"{place}: {focus} is there and was not found") from None
            return "absent"
        found = journal.counters["scrub_findings"]
        if before[place, focus]:
            if found or not whole:
                raise Lost(f"{place}: {focus} is right, and scrubbing found {found} findings")
            return "right"
        if not found:
            raise Lost(f"{place}: {focus} is wrong, and scrubbing found nothing")
        if whole != judge.copy_is_right(place, focus):
            raise Lost(f"{place}: {focus} was called {'right' if whole else 'wrong'} after mending, and is not")
        if whole and not must and not lenient:
            raise Lost(f"{place}: {focus} cannot be mended and was called right")
        if whole:
            return "mended"
        if must and not quarantined:
            raise Lost(f"{place}: {focus} can be mended and was not")
        if judge.exists(focus, spool=False) and place in TIERS and judge.manifest(place, focus) is not None:
            raise Lost(f"{place}: {focus} was not mended and not set aside")
        if place in TIERS and judge.copy_is_right(LOCAL, focus):
            await flush(self.places.spool, focus, TierUploadContext(self.places.stores[place]))
            if not judge.copy_is_right(place, focus):
                raise Lost(f"{place}: {focus} was flushed anew and is not right")
            return "flushed anew"
        return "set aside"

    def _mendable(self, place: str, part: PartId) -> bool:
        if place == LOCAL:
            return self.judge.can_be_had(part)
        if self.judge.honest(place, part) is None and not any(
            self.judge.honest(tier, part) for tier in TIERS if tier != place
        ):
            return False
        return self.judge.can_be_repaired(place, part)

    # -- restore and export -------------------------------------------------------------------------------------------

    async def _restore(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """What the ranks of a launch do: the newest on the timeline of which every part is right, or can be made so."""
        repairer = Repairer(self.places.spool, self.places.stores, journal, MemoryBudget())
        line = self._line(spool=True)
        found = await launch(self.places, repairer, WORLD, self._read)
        one = found[0]
        if isinstance(one, VerifiedPart):
            return self._compared(line, *restored_together(found))
        if one is None and any(line.checkpoints):
            raise Lost(f"a launch began from nothing, with {line.checkpoints} there")
        return self._compared(line, None, _skipped((one or "").splitlines()))

    async def _export(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        line = self._line(spool=False)
        target = self._root / "exported"
        got: CheckpointId | None = None
        reported: dict[CheckpointId, str] = {}
        try:
            found = await restore_to_directory(self.places.stores, RUN, target, None, None, Progress())
            got, reported = CheckpointId(RUN, found.attempt, found.step), _skipped(found.skipped)
            for rank in range(WORLD):
                part = PartId(got, rank, WORLD)
                for path, data in self.places.held[part].items():
                    if (target / part.name / path).read_bytes() != data:
                        raise Lost(f"{part}: wrong bytes of {path} were exported")
        except CheckpointNotFound as error:
            reported = _skipped(str(error).splitlines())
            if target.exists():
                raise Lost("nothing was found, and something was exported") from None
        finally:
            shutil.rmtree(target, ignore_errors=True)
            shutil.rmtree(target.with_name(".exported.partial"), ignore_errors=True)
        return self._compared(line, got, reported)

    def _line(self, *, spool: bool) -> Line:
        """What must be tried, in order, by what lies there now."""
        line = self.judge.line(spool=spool)
        bad = [[part.rank for part in parts if not self.judge.can_be_had(part, spool=spool)] for parts in line]
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        return Line([parts[0].checkpoint for parts in line], bad, lenient)

    def _compared(self, line: Line, got: CheckpointId | None, reported: dict[CheckpointId, str]) -> str:
        """That it is the first that can be had, and that what was passed over is named, each with a rank whose part is
        nowhere right."""
        wanted = line.first
        if got != wanted:
            order = line.checkpoints
            better = got in order and (wanted is None or order.index(got) < order.index(wanted))
            if not (better and line.lenient):
                raise Lost(f"{wanted or 'nothing'} can be had, and {got or 'nothing'} was given, of {order}")
        passed = line.checkpoints[: line.checkpoints.index(got)] if got else line.checkpoints
        for one, ranks in zip(passed, line.bad, strict=False):
            why = reported.get(one, "")
            named = {int(rank) for either in _RANK.findall(why) for rank in either if rank}
            if len(why) < _REASON or (named and not named & set(ranks) and not line.lenient):
                raise Lost(f"{one} was passed over for ranks {ranks}, and this was said of it: {why!r}, in {reported}")
        if got in reported:
            raise Lost(f"{got} was given, and is among what was skipped: {reported}")
        return "nothing" if got is None else f"passed over {len(passed)}"

    # -- everything ---------------------------------------------------------------------------------------------------

    async def _settle(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """Scrub every copy, and let the reconciler work until nothing is left to do: what can be right is, and what is
        not is out of sight."""
        owed = self._owed()
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        daemon = self._daemon(journal, scrub="30d")
        async with running(daemon):
            await self._scrub_all(daemon)
        self._all_paid(owed, lenient)
        return "right" if all(self._whole().values()) else "what could be"

    def _daemon(self, journal: Journal, **options: Any) -> Reconciler:
        daemon = reconciler(self.places.spool, self.places.stores, **options)
        journal.events = daemon.journal.events = deque()
        daemon.requests.requested_runs |= {RUN, OTHER}
        return daemon

    async def _scrub_all(self, daemon: Reconciler) -> None:
        for _ in range(2):
            for name in daemon.workers:
                await daemon.observe(name)
            world: dict[str, Any] = {LOCAL: daemon.inventory().spool, **daemon.inventory().tiers}
            for name, place in world.items():
                for part in sorted(place.parts()):
                    copy = ScrubbedCopy(name, part)
                    try:
                        await daemon.scrubber.scrub(copy)
                    except StoreRefused:
                        # The daemon replaced an object that was too long between its read and the listing of its size.
                        # A scrub that was refused is tried again later.
                        await daemon.scrubber.scrub(copy)
            await settle(daemon, _PATIENCE)

    def _owed(self) -> set[tuple[str, PartId]]:
        """The copies that must be right in the end, by what lies there now: of what can be had, each place's that has
        one, right or wrong, and each tier's where the spool can send it one."""
        owed = set()
        for part in self.places.parts:
            if self.judge.can_be_had(part):
                local = self.judge.is_local(part)
                owed |= {(LOCAL, part)} if local else set()
                owed |= {(tier, part) for tier in TIERS if local or self.judge.manifest(tier, part) is not None}
        return owed

    def _all_paid(self, owed: set[tuple[str, PartId]], lenient: bool) -> None:
        for place, part in sorted(owed):
            if not self.judge.copy_is_right(place, part):
                raise Lost(f"{place}: {part} could be had and is not right after all was scrubbed and flushed")
        for part in self.places.parts:
            right = [self.judge.copy_is_right(place, part) for place in PLACES]
            if any(one == part for _, one in owed) and not any(right):
                raise Lost(f"{part} could be had and is right nowhere")
            for place, whole in zip(PLACES, right, strict=True):
                if self._there(place, part) and not whole and not lenient:
                    raise Lost(f"{place}: {part} is wrong, and still offered after all was scrubbed")

    # -- retention ----------------------------------------------------------------------------------------------------

    async def _prune(self, focus: PartId, noise: random.Random, before: Whole, journal: Journal) -> str:
        """Let retention keep few, before or after all was scrubbed: what is corrupt counts for nothing."""
        scrubbed = noise.random() < 0.7
        lenient = any(self.judge.lenient(part) for part in self.places.parts)
        if scrubbed:
            owed, daemon = self._owed(), self._daemon(journal, scrub="30d")
            async with running(daemon):
                await self._scrub_all(daemon)
            self._all_paid(owed, lenient)
        restored, whole = self._line(spool=True).first, self._whole()
        good, offered = ({place: self._good(place, by) for place in PLACES} for by in (whole, None))
        keep, keep_local = noise.randrange(1, 4), noise.randrange(1, 4)
        daemon = self._daemon(journal, keep=keep, keep_local=keep_local)
        async with running(daemon):
            await settle(daemon, _PATIENCE)
        now = {place: self._good(place, self._whole() if scrubbed else None) for place in PLACES}
        for tier in TIERS:
            for one in good[tier] - now[tier]:
                aside = set() if scrubbed else self._quarantined_since(one, tier, offered[tier], daemon.journal)
                self._may_be_gone(one, tier, now[tier] | aside, keep)
        self._local_may_be_gone(whole, now, keep)
        if scrubbed and not lenient and self._line(spool=True).first != restored:
            raise Lost(f"{restored} could be restored, and after a prune {self._line(spool=True).first} can")
        pruned = daemon.journal.counters["pruned"]
        return f"{'scrubbed' if scrubbed else 'unscrubbed'}, {'pruned' if pruned else 'nothing to prune'}"

    def _good(self, place: str, whole: Whole | None) -> set[CheckpointId]:
        """What a place has every part of, right as `whole` says, or by their manifests if it is None."""
        parts = [
            part
            for part in self.places.parts
            if (whole[place, part] if whole else self.judge.readable(place, part) is not None)
        ]
        count = Counter(part.checkpoint for part in parts)
        return {one for one, ranks in count.items() if ranks == WORLD}

    def _quarantined_since(
        self, one: CheckpointId, place: str, offered: set[CheckpointId], journal: Journal
    ) -> set[CheckpointId]:
        """Those of `offered` that were found corrupt after `one` was pruned: retention counted them until then."""
        events = (event for event in journal.events if event.place == place)
        pruned = ("pruned", str(one))
        later = itertools.dropwhile(lambda event: (event.what, event.subject) != pruned, events)
        aside = {event.subject for event in later if event.what == "quarantined"}
        return {other for other in offered if any(str(PartId(other, rank, WORLD)) in aside for rank in range(WORLD))}

    def _may_be_gone(self, one: CheckpointId, place: str, left: set[CheckpointId], keep: int) -> None:
        newer = [other for other in left if other.run == one.run and other > one]
        if len(newer) < keep:
            raise Lost(f"{place}: {one} was right and is gone, with {len(newer)} newer good ones, of {keep} to be kept")

    def _local_may_be_gone(self, whole: Whole, now: dict[str, set[CheckpointId]], keep: int) -> None:
        """A right copy goes from the spool only if a tier has it, or no tier wants it any more."""
        for part in self.places.parts:
            if not whole[LOCAL, part] or self.judge.is_local(part):
                continue
            if not any(self.judge.honest(tier, part) for tier in TIERS):
                for tier in TIERS:
                    self._may_be_gone(part.checkpoint, tier, now[tier], keep)
