"""Where one rank's view and one rank's part come from: a predecessor's memory, the spool, or the daemon and its tiers.

Law: what is handed on was verified on this read, in this process. A part is called corrupt only when every place it
could be in was asked; a place that cannot be asked is an error and no corruption.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from tierd.arena import Arena
from tierd.client.arriving import Arriving
from tierd.client.fetching import Fetching
from tierd.client.handoff import HandOff
from tierd.core.errors import (
    CheckpointNotFound,
    CorruptChunk,
    DaemonSilent,
    DaemonUnavailable,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    StoreUnavailable,
    TierdError,
    VersionMismatch,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.sight import Sight, see, told
from tierd.core.wire import Candidates, Fetch, Status, Wait
from tierd.core.world import SPOOL, Facts, Place, World
from tierd.link import Link
from tierd.persist import bad_chunks, check_bytes
from tierd.records import committed, heads
from tierd.spool import Spool, condition, translated

log = logging.getLogger("tierd")

MEMORY = "memory"  # where a tier's name can stand
_PATIENCE = 5.0  # seconds to wait for a daemon that may be starting, as at a node's boot
_FLUSH = 600.0  # seconds for what other nodes need of this spool to get to a tier
_TURN = 2.0  # of them, for which one part and one tier are waited for at a time
_REST = 0.2  # of them, between two rounds

Part = tuple[Manifest, Mapping[str, memoryview], str]


class Source:
    """What this node shows of a run, and gives of it. The line to the daemon is made at the first look.

    Args:
        tiers: whether there may be copies beyond the spool; without, the spool's word is final.
        line: to ask for what a predecessor left in memory; None where nothing can be there.
        keep: hand files on in memory; without, they are only verified, and their directory is held in the spool.
        metrics: those whose values a look tells.
        silent: why the daemon cannot be asked, where that is known already; it is not waited for once more.

    Attributes:
        link: the line to the daemon, which holds for it what it gives; None without one.
        alone: why there is none though tiers may have copies; empty where there are no tiers.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        *,
        tiers: bool,
        line: HandOff | None,
        keep: bool,
        metrics: tuple[str, ...] = (),
        silent: str = "",
    ) -> None:
        self._spool, self._run, self._tiers, self._line, self._keep = spool, run, tiers, line, keep
        self._metrics = metrics
        self.link: Link | None = None
        self._connected = bool(silent)
        self.alone = silent
        self.arena: Arena | None = None  # the memory that what was handed on lies in, when a predecessor left it there

    def sight(self) -> Sight:
        """Look: through the daemon, or at the spool where none is expected or none answers.

        Raises:
            SpoolUnusable: something of the run lies behind a link that is not followed.
        """
        with translated(f"spool {self._spool.root}"):
            self._spool.check_home(self._run)
        if not self._connected:
            self.link, self._connected = self._connect(), True
        if self.link:
            try:
                return told(self.link.ask(Candidates(run=self._run, metrics=self._metrics)))
            except DaemonSilent as error:
                self.alone = str(error)
                self.close()
                self.link = None
        seen = see(World(self._look(), {}), self._run, self._metrics)
        return msgspec.structs.replace(seen, alone=f"node {socket.gethostname()}: {self.alone}" if self.alone else "")

    def hand_over(self) -> Link | None:
        """The line, to be closed by the caller: while it is open, the daemon leaves what was obtained alone."""
        link, self.link = self.link, None
        return link

    def close(self) -> None:
        if self.link:
            self.link.close()

    def _connect(self) -> Link | None:
        if not self._tiers:
            return None
        end = time.monotonic() + _PATIENCE
        while True:
            link = None
            try:
                link = Link(self._spool)
                link.greet()
                return link
            except DaemonUnavailable as error:
                if link:
                    link.close()
                # One of a version too far apart, or that is silent, is as good as none: what the spool has whole is
                # restored all the same. One that is absent may be starting.
                if isinstance(error, VersionMismatch | DaemonSilent) or time.monotonic() >= end:
                    self.alone = str(error)
                    return None
            time.sleep(0.1)

    def _look(self) -> Place:
        """Raises `SpoolUnusable` where the spool cannot be listed: it is not empty then."""
        parts: dict[PartId, Facts | None] = {}
        defects: dict[PartId, TierdError] = {}
        with translated(f"spool {self._spool.root}"):
            before = committed(self._spool.control)
            for part in self._spool.parts():
                if part.checkpoint.run == self._run:
                    try:
                        parts[part] = Facts.of(self._spool.manifest(part))
                    except ObjectNotFound:
                        continue
                    except (TierdError, OSError) as error:  # found out, and said, when it is read
                        bad = condition(error, f"manifest of {part}") if isinstance(error, OSError) else error
                        parts[part], defects[part] = None, bad
            aside = {part: Facts.of(found) if found else None for part, found in self._spool.quarantined().items()}
            remembered = heads(self._spool.control)
        return replace(Place.of(parts, defects, quarantined=aside), committed=before, heads=remembered)

    def flush(self, checkpoint: CheckpointId) -> None:
        """See that what the spool holds of `checkpoint` gets to a tier, where other nodes find it. Best effort: whoever
        looks again finds out."""
        if self.link is None:
            return
        end = time.monotonic() + _FLUSH
        try:
            left = [part for part in self._spool.parts() if part.checkpoint == checkpoint]
            status = self.link.ask(Status())["status"]
            tiers = [] if status["paused"] else [tier["name"] for tier in status["tiers"]]
            while left and tiers and time.monotonic() < end:
                log.info("%s: other nodes find it only on a tier; %d parts are flushed first", checkpoint, len(left))
                left = [part for part in left if not any(self._is_on(part, tier) for tier in tiers)]
                left = [part for part in left if self._spool.has(part)]  # what proved corrupt is not waited for
                time.sleep(_REST if left else 0.0)  # what a tier refuses is answered at once
        except (TierdError, OSError) as error:
            log.warning("%s: %s", checkpoint, error)

    def _is_on(self, part: PartId, tier: str) -> bool:
        assert self.link is not None
        try:
            self.link.ask(Wait(part=part, tier=tier, timeout_s=_TURN, needed=True))
        except (CheckpointNotFound, StoreRefused, TimeoutError) as error:  # another tier may have it, or this one later
            log.debug("%s: %s", part, error)
            return False
        return True

    def obtain(self, part: PartId) -> Part:
        """A part's manifest, its files, and where bytes came from; every byte verified just now.

        Raises:
            CorruptChunk, ManifestError: every copy is proven bad; all are set aside.
            ObjectNotFound: no place has a copy.
            StoreUnavailable, DaemonUnavailable: a place that may have it right did not answer.
            FormatTooNew: it was written by a newer tierd.
        """
        link = self.link
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
        self.arena = found.arena
        return manifest, found.files

    def _alone(self, part: PartId, local: Exception) -> Part:
        if self._tiers:
            raise DaemonUnavailable(
                f"{part} is not whole in the spool ({local}), and whether a tier has it right cannot be asked: "
                f"{self.alone}. Restoring an older step is your decision: restore(state, step=…)"
            ) from local
        if isinstance(local, ObjectNotFound):
            raise local
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
