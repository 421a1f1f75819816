"""A node's view of a run: from its daemon, or without one from the spool alone."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace

import msgspec

from tierd.client.client_timings import USUAL_TIMINGS, ClientTimings
from tierd.client.restoring.device_uploads import DeviceUploads
from tierd.client.restoring.part_image import FindTargets
from tierd.client.restoring.part_reader import PartReader
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.core.errors import (
    CheckpointNotFound,
    DaemonSilent,
    DaemonUnavailable,
    ObjectNotFound,
    StoreRefused,
    TierdError,
    VersionMismatch,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.timeline.run_view import RunView, run_view_of, with_missing, without_older
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.ipc.messages import CandidatesRequest, StatusRequest, Wait
from tierd.spool.run_records import committed_parts, recorded_heads
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_error, spool_errors

_NEWEST = 4  # checkpoints in the first listing; nearly every restore takes one of them


def observe_spool(spool: Spool, run: str, *, deep: bool) -> tuple[Place, CheckpointId | None, dict[CheckpointId, str]]:
    """List the run in the spool: every checkpoint if `deep`, else the newest few.

    Also return the oldest checkpoint that was listed, if older ones exist, and what `Spool.odd_places` found. Raises
    `SpoolUnusable` if the spool cannot be listed, so that it does not count as empty.
    """
    parts: dict[PartId, ManifestFacts | None] = {}
    defects: dict[PartId, TierdError] = {}
    with spool_errors(f"spool {spool.root}", spool.root):
        before = committed_parts(spool.control)
        newest = [] if deep else spool.newest(run, _NEWEST + 1)
        listed = newest[:_NEWEST] if len(newest) > _NEWEST else None
        spool.check_run_directory(run)
        odd = spool.odd_places(run, listed)
        for part in (
            spool.parts(run)
            if listed is None
            else [part for checkpoint in listed for part in spool.parts_of(checkpoint)]
        ):
            try:
                parts[part] = ManifestFacts.of(spool.manifest(part))
            except ObjectNotFound:
                continue
            except (TierdError, OSError) as error:  # the error is found again, and reported, when the part is read
                defect = spool_error(error, f"manifest of {part}") if isinstance(error, OSError) else error
                parts[part], defects[part] = None, defect
        quarantined = {
            part: ManifestFacts.of(manifest) if manifest else None for part, manifest in spool.quarantined().items()
        }
        remembered = recorded_heads(spool.control)
    place = replace(Place.of(parts, defects, quarantined=quarantined), committed=before, heads=remembered)
    return place, listed[-1] if listed else None, odd


log = logging.getLogger("tierd")

_WAIT_S = 2.0  # seconds to wait for one part and one tier at a time
_POLL_S = 0.2  # seconds between two rounds


class NodeSource(PartReader):
    """This node's view of a run, and its copies of the run's parts. It connects to the daemon at the first `run_view`.

    Args:
        tiers, line, keep, uploads, targets: as for `PartReader`.
        metrics: names of the metrics whose values the view contains.
        silent: why the daemon cannot be asked, if that is already known; the daemon is then not waited for again.

    Attributes:
        deep: whether a listing of the spool alone contains every checkpoint, not only the newest few.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        *,
        tiers: bool,
        line: HandoffClient | None = None,
        keep: bool = True,
        metrics: tuple[str, ...] = (),
        silent: str = "",
        uploads: DeviceUploads | None = None,
        targets: FindTargets | None = None,
        timings: ClientTimings = USUAL_TIMINGS,
    ) -> None:
        super().__init__(spool, tiers, line, keep, uploads, targets, timings)
        self.run, self._metrics = run, metrics
        self._connected = bool(silent)
        self.alone = silent
        self.deep = False

    def run_view(self) -> RunView:
        """Observe the run through the daemon, or in the spool if no daemon is expected or none answers."""
        if not self._connected:
            self.link, self._connected = self._connect(), True
        if self.link:
            with spool_errors(f"spool {self.spool.root}", self.spool.root):
                self.spool.check_run_directory(self.run)
                odd = self.spool.odd_places(self.run)
            try:
                view = read_member(
                    self.link.ask(CandidatesRequest(run=self.run, metrics=self._metrics)), "sight", RunView
                )
                return self._without(odd, view)
            except DaemonSilent as error:
                self.alone = str(error)
                self.close()
                self.link = None
        place, oldest, odd = observe_spool(self.spool, self.run, deep=self.deep)
        view = self._without(odd, run_view_of(Inventory(place, {}), self.run, self._metrics))
        view = view if oldest is None else without_older(view, self.run, oldest)
        return msgspec.structs.replace(view, alone=f"node {socket.gethostname()}: {self.alone}" if self.alone else "")

    def _without(self, odd: dict[CheckpointId, str], view: RunView) -> RunView:
        """Report the copies that count as absent, and return a view that has their checkpoints as gone if no place has
        them whole: they were here, so a restore must not pass over them in silence.
        """
        for checkpoint in odd.keys() - self.odd.keys():
            log.warning("%s: its copy in the spool counts as absent: %s", checkpoint, odd[checkpoint])
        self.odd = odd
        return with_missing(view, self.run, odd.keys() - view.complete(self.run).keys()) if odd else view

    def hand_over(self) -> DaemonConnection | None:
        """Return the connection, for the caller to close. Until then the daemon keeps the obtained directories."""
        link, self.link = self.link, None
        return link

    def close(self) -> None:
        self._end_ring()
        if self.link:
            self.link.close()

    def _connect(self) -> DaemonConnection | None:
        if not self._tiers:
            return None
        end = time.monotonic() + self._timings.start_s
        while True:
            link = None
            try:
                link = DaemonConnection(self.spool)
                link.greet()
                return link
            except DaemonUnavailable as error:
                if link:
                    link.close()
                # A daemon that is silent or of an incompatible version counts as absent, because checkpoints that are
                # whole in the spool can still be restored. An absent daemon may be starting.
                if isinstance(error, VersionMismatch | DaemonSilent) or time.monotonic() >= end:
                    self.alone = str(error)
                    return None
            time.sleep(0.1)

    def flush(self, checkpoint: CheckpointId) -> None:
        """Get this spool's parts of `checkpoint` to a tier, where other nodes find them. The next listing shows the
        result.
        """
        if self.link is None:
            return
        end = time.monotonic() + self._timings.flushed_s
        try:
            unflushed = [part for part in self.spool.parts() if part.checkpoint == checkpoint]
            status = self.link.ask(StatusRequest())["status"]
            tiers = [] if status["paused"] else [tier["name"] for tier in status["tiers"]]
            while unflushed and tiers and time.monotonic() < end:
                log.info(
                    "%s: other nodes find it only on a tier; %d parts are flushed first", checkpoint, len(unflushed)
                )
                unflushed = [part for part in unflushed if not any(self._is_on(part, tier) for tier in tiers)]
                # A part that proved corrupt was quarantined, and is not waited for.
                unflushed = [part for part in unflushed if self.spool.has(part)]
                time.sleep(_POLL_S if unflushed else 0.0)  # a tier that refuses answers at once
        except (TierdError, OSError) as error:
            log.warning("%s: %s", checkpoint, error)

    def _is_on(self, part: PartId, tier: str) -> bool:
        assert self.link is not None
        try:
            self.link.ask(Wait(part=part, tier=tier, timeout_s=_WAIT_S, needed=True))
        except (CheckpointNotFound, StoreRefused, TimeoutError) as error:  # another tier may hold it, or this one later
            log.debug("%s: %s", part, error)
            return False
        return True
