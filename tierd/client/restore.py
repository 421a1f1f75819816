"""The way back: candidates newest first, each read and verified from the spool, healed by the daemon where it must be.

Law: what is handed on was verified on this read, in this process. A proven-bad copy steps back to the next candidate; a
place that cannot be asked never does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierd.arena import Arena
from tierd.client.arriving import Arriving
from tierd.client.fetching import Fetching
from tierd.client.handoff import HandOff
from tierd.client.launch import exchange
from tierd.core.errors import (
    CorruptChunk,
    DaemonUnavailable,
    ManifestError,
    ObjectNotFound,
    StateMismatch,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.resume import Candidate, Resume, not_found, own_part, restore_candidates
from tierd.core.wire import Candidates, Fetch
from tierd.core.world import SPOOL, Facts, Place, World
from tierd.link import Link
from tierd.persist import bad_chunks, check_bytes
from tierd.spool import Spool

log = logging.getLogger("tierd")

MEMORY = "memory"  # where a tier's name can stand
_ASIDE = "set aside before: some of it was proven corrupt, and no place had it right"
_PATIENCE = 5.0  # seconds to wait for a daemon that may be starting, as at a node's boot


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that a restore passed over, and why."""

    step: int
    attempt: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.attempt}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore gave.

    Attributes:
        step: the checkpoint's step; training goes on at `step + 1`.
        attempt: the launch that wrote it.
        tier: where its bytes came from: `"local"`, or the tier that healed or supplied them; `"memory"` when a trainer
            that was killed had left them in the daemon's hands.
        metrics: as given to `save`.
        skipped: newer checkpoints that were passed over, each with its reason.
        unreached: tiers that did not answer; a newer checkpoint could lie there.
        directory: the verified files.
    """

    step: int
    attempt: str
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]
    directory: Path


@dataclass(frozen=True, slots=True)
class Found:
    """A part whose every byte was verified just now. `tier` is where bytes came from: as `Restored.tier`.

    `arena`: the memory that `files` lie in when a predecessor left them there; it will be used for saves.
    """

    part: PartId
    manifest: Manifest
    files: Mapping[str, memoryview]
    tier: str
    skipped: tuple[Skipped, ...]
    directory: Path
    attempts: tuple[str, ...]
    unreached: tuple[str, ...]
    arena: Arena | None
    hold: Link | None  # to be closed by whoever is done with `directory`


class Restorer:
    """Finds the newest verified checkpoint for one rank.

    Args:
        tiers: whether there may be copies beyond the spool; without, the spool's word is final.
        line: to ask for what a predecessor left in memory; None where nothing can be there.
        keep: hand the files on in memory; without, they are only verified, and their directory is held in the spool.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        rank: int,
        world: int,
        *,
        tiers: bool,
        line: HandOff | None = None,
        keep: bool = True,
    ) -> None:
        self._spool, self._run, self._rank, self._world = spool, run, rank, world
        self._tiers, self._line, self._keep = tiers, line, keep
        self._arena: Arena | None = None
        self._why_alone = ""

    def agreed(self, step: int | None, attempt: str | None) -> Found | None:
        """As `find`, and the same checkpoint on every rank: where one rank's part is beyond repair, all step back.

        Ranks that have no process group cannot agree here; each then finds its own.

        Raises:
            StoreUnavailable: another rank could not restore; says which and why.
        """
        limit: CheckpointId | None = None
        while True:
            found, error = None, None
            try:
                found = self.find(step, attempt, limit)
            except Exception as raised:  # the others are told before it is raised: they would wait for ever
                error = raised
            all_found = exchange((found.part.checkpoint if found else None, error and str(error)), self._world)
            if error is not None:
                raise error
            for rank, (_, text) in enumerate(all_found or ()):
                if text is not None:
                    raise StoreUnavailable(f"rank {rank} could not restore: {text}")
            seen = {checkpoint for checkpoint, _ in all_found or ()}
            if len(seen) <= 1:
                return found
            if None in seen:
                raise StoreUnavailable(f"run {self._run!r}: some ranks see checkpoints and some see none; try again")
            limit = min(checkpoint for checkpoint in seen if checkpoint)

    def find(self, step: int | None, attempt: str | None, limit: CheckpointId | None = None) -> Found | None:
        """Read the checkpoint to resume from, none newer than `limit`; None when the run has none at all.

        Raises:
            CheckpointNotFound: there are some, and none could be verified, or not the one asked for.
            StoreUnavailable, DaemonUnavailable: stepping back, or starting anew, would rest on a place that did not
                answer.
            StateMismatch: it was written by another number of ranks.
            FormatTooNew: the newest was written by a newer tierd.
        """
        link = self._connect()
        found = None
        try:
            found = self._walk(link, self._ask(link, step, attempt), step, limit)
            return found
        finally:
            if link and not (found and found.hold):
                link.close()

    def _connect(self) -> Link | None:
        if not self._tiers:
            return None
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return Link(self._spool)
            except DaemonUnavailable as error:
                if time.monotonic() >= end:
                    self._why_alone = str(error)
                    return None
            time.sleep(0.1)

    def _ask(self, link: Link | None, step: int | None, attempt: str | None) -> Resume:
        if link:
            reply = link.ask(Candidates(run=self._run, step=step, attempt=attempt))
            return msgspec.convert(reply["resume"], Resume)
        return restore_candidates(World(self._look(), {}), self._run, step, attempt)

    def _look(self) -> Place:
        parts: dict[PartId, Facts | None] = {}
        for part in self._spool.parts():
            if part.checkpoint.run == self._run:
                try:
                    parts[part] = Facts.of(self._spool.manifest(part))
                except ObjectNotFound:
                    continue
                except TierdError:
                    parts[part] = None
        aside = {part: Facts.of(found) if found else None for part, found in self._spool.quarantined().items()}
        return Place.of(parts, quarantined=aside)

    def _walk(self, link: Link | None, resume: Resume, step: int | None, limit: CheckpointId | None) -> Found | None:
        skipped = [Skipped(c.step, c.attempt, "incomplete: not every rank's part is there") for c in resume.incomplete]
        if resume.incomplete and resume.unreached and step is None:
            # Known to be there, and perhaps whole: the missing part may lie where nobody answers.
            raise StoreUnavailable(
                f"{resume.incomplete[0]} lacks parts in the places that answered, and {', '.join(resume.unreached)} "
                "did not; restoring an older step is your decision: restore(state, step=…)"
            )
        for candidate in resume.candidates:
            if limit and candidate.checkpoint > limit:
                reason = "another rank's part of it could not be verified"
                skipped.append(Skipped(candidate.checkpoint.step, candidate.checkpoint.attempt, reason))
                continue
            self._check_world(candidate)
            part = own_part(candidate, self._rank)
            try:
                manifest, files, tier = self._obtain(link, part)
            except (CorruptChunk, ManifestError) as error:
                self._log_skip(candidate.checkpoint, str(error))
                skipped.append(Skipped(candidate.checkpoint.step, candidate.checkpoint.attempt, str(error)))
                continue
            home = self._spool.path(part)
            skipped = _with_aside(skipped, [one for one in resume.quarantined if one > candidate.checkpoint])
            hold = None if self._keep else link
            left = resume.unreached
            return Found(part, manifest, files, tier, tuple(skipped), home, resume.attempts, left, self._arena, hold)
        self._nothing(link, resume, step, _with_aside(skipped, resume.quarantined))
        return None

    def _check_world(self, candidate: Candidate) -> None:
        if candidate.world != self._world:
            raise StateMismatch(
                f"{candidate.checkpoint} was saved by {candidate.world} ranks, and this launch has {self._world}: "
                f"launch {candidate.world} ranks"
            )

    def _obtain(self, link: Link | None, part: PartId) -> tuple[Manifest, Mapping[str, memoryview], str]:
        local: Exception | None = None
        remembered = self._remembered(part) if self._keep else None
        if remembered:
            return *remembered, MEMORY
        if link is None or self._keep:  # a directory is asked for in any case: the daemon then holds it
            try:
                return *self._read(part), SPOOL
            except (CorruptChunk, ManifestError, ObjectNotFound, OSError) as error:
                local = error.with_traceback(None)  # whose frames hold what was read
                if link is None:
                    return self._alone(part, error)
            log.warning("%s is not whole in the spool, asking the tiers: %s", part, local)
        assert link is not None
        try:
            with Arriving(self._spool, part, worth=self._keep) as arriving:
                tiers = link.ask(Fetch(part=part), told=Fetching(part))["tiers"]
        except CorruptChunk as error:
            told = local is None or SPOOL in str(error)
            raise CorruptChunk(str(error) if told else f"local: {local}; {error}") from error
        try:
            return *self._read(part, arriving), tiers[0] if tiers else SPOOL
        except (CorruptChunk, ManifestError, ObjectNotFound, OSError) as error:
            # Some copy is right, or the fetch would have said so: this disk is failing, and no reason to step back.
            raise StoreUnavailable(f"{part} was just healed, and reads back wrong from the spool: {error}") from error

    def _remembered(self, part: PartId) -> tuple[Manifest, Mapping[str, memoryview]] | None:
        """The part from a predecessor's memory, every byte compared with its manifest in the spool."""
        found = self._line.recall(part) if self._line else None
        if found is None:
            return None
        try:
            manifest = self._spool.manifest(part)
            if {file.path for file in manifest.files} != found.files.keys():
                return None
            for file in manifest.files:
                check_bytes(found.files[file.path], file)
        except (TierdError, OSError) as error:  # it was overwriting that memory when it died, say
            log.info("%s is not whole in memory, and read from the spool: %s", part, error)
            return None
        self._arena = found.arena
        return manifest, found.files

    def _alone(self, part: PartId, local: Exception) -> tuple[Manifest, Mapping[str, memoryview], str]:
        if self._tiers:
            raise DaemonUnavailable(
                f"{part} is not whole in the spool ({local}), and whether a tier has it right cannot be asked: "
                f"{self._why_alone}. Restoring an older step is your decision: restore(state, step=…)"
            ) from local
        if isinstance(local, OSError):
            raise StoreUnavailable(f"{part}: the spool cannot be read: {local}") from local
        self._spool.quarantine(part)
        raise CorruptChunk(f"local: {local}") from local

    def _read(self, part: PartId, arriving: Arriving | None = None) -> tuple[Manifest, Mapping[str, memoryview]]:
        manifest = self._spool.manifest(part)
        if self._keep and arriving:
            return manifest, arriving.read(self._spool.path(part), manifest)
        if self._keep:
            return manifest, self._spool.read(part, manifest)
        for file in manifest.files:
            for _, _, bad in bad_chunks(self._spool.path(part) / file.path, file):
                raise bad
        return manifest, {}

    def _nothing(self, link: Link | None, resume: Resume, step: int | None, skipped: list[Skipped]) -> None:
        """Return when starting anew is right; raise when it would be a silent loss."""
        if self._tiers and link is None:
            raise DaemonUnavailable(
                f"run {self._run!r}: no checkpoint in the spool, and the tiers cannot be asked: {self._why_alone}"
            )
        if resume.unreached:
            raise StoreUnavailable(
                f"run {self._run!r}: no checkpoint was found, but {', '.join(resume.unreached)} did not answer"
            )
        tried = [one for one in skipped if not one.reason.startswith("incomplete")]
        if step is not None or tried or resume.branches:
            raise not_found(resume, self._run, step, [str(one) for one in skipped])
        for one in skipped:
            log.warning("run %s: starting anew, past %s", self._run, one)

    def _log_skip(self, checkpoint: CheckpointId, reason: str) -> None:
        log.error("restore skips %s: %s", checkpoint, reason)


def _with_aside(skipped: list[Skipped], aside: Sequence[CheckpointId]) -> list[Skipped]:
    """Newest first, those among them that an earlier restore or the daemon had set aside."""
    told = {(one.attempt, one.step) for one in skipped}
    more = [Skipped(one.step, one.attempt, _ASIDE) for one in aside if (one.attempt, one.step) not in told]
    return sorted((*skipped, *more), key=lambda one: (one.attempt, one.step), reverse=True)
