"""Restore a state: find the checkpoint, load it on every rank, and prepare this launch to continue from it.

Invariant: no rank continues before every rank has loaded its part, or knows that some rank could not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from tierd.client import client_timings
from tierd.client.daemon_attachment import Attachment
from tierd.client.ranks.launch import Launch
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.device_uploads import DeviceUploads
from tierd.client.restoring.part_image import FindTargets
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restored, Restorer, VerifiedPart
from tierd.client.restoring.saved_entries import check_written_by_save
from tierd.client.save_schedule import SaveSchedule
from tierd.client.saving.save_pipeline import SavePipeline
from tierd.client.saving.slots import device_of, estimate
from tierd.client.saving.snapshot_handoff import HandoffClient
from tierd.client.saving.step_gate import OptimizerStepGate
from tierd.client.user_messages import SpaceCheck
from tierd.core.manifest import TENSORS, TREE
from tierd.core.planning.place import SPOOL
from tierd.core.save_rules import MetricGoal
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.logs import announce
from tierd.spool.spool import Spool
from tierd.state.kinds.live_parameters import rename_like
from tierd.state.live_tensors import direct_targets
from tierd.state.load_check import LoadFit, check_fit, select_entries
from tierd.state.replicas import ReplicaGroup
from tierd.state.state_loading import load_restored, unflatten

log = logging.getLogger("tierd")


class StateRestorer:
    """Restores checkpoints of the launch's run. The errors are those of `Checkpointer.restore`."""

    def __init__(
        self,
        spool: Spool,
        ranks: Ranks,
        launch: Launch,
        schedule: SaveSchedule,
        daemon: Attachment,
        handoff: HandoffClient | None,
        gate: OptimizerStepGate,
        pipeline: SavePipeline,
        space: SpaceCheck,
        group: Callable[[], ReplicaGroup],
        *,
        prefers_equal_replicas: bool,
    ) -> None:
        self._prefers_equal_replicas = prefers_equal_replicas
        self._group = group  # asked at each restore, because an adapter may declare entries later
        self._spool, self._ranks, self._launch, self._schedule = spool, ranks, launch, schedule
        self._daemon, self._handoff = daemon, handoff
        self._gate, self._pipeline, self._space = gate, pipeline, space
        # While this link is open, the daemon does not delete the last restored directory.
        self._hold: DaemonConnection | None = None

    def restore(
        self,
        state: MutableMapping[str, Any] | None,
        step: int | None,
        attempt: str | None,
        goal: MetricGoal | None,
        names: Collection[str] | None,
        at_least: int | None,
        fresh: Collection[str] = (),
        *,
        ignore_prefixes: bool,
    ) -> Restored | None:
        """Load a checkpoint into `state`, as `Checkpointer.restore` does: the best by `goal`, and only the entries in
        `names`.
        """
        device = None if state is None or names is not None else device_of(state)
        uploads = DeviceUploads(state, device) if state is not None and device is not None else None

        def find_targets(files: Mapping[str, memoryview]) -> Mapping[int, torch.Tensor]:
            assert state is not None
            tree = unflatten(files[TREE], files[TENSORS], is_read=False, siblings=files)
            return direct_targets(state, rename_like(state, tree) if ignore_prefixes else tree)

        restorer = self.restorer(
            keep=state is not None,
            best=None if goal is None else goal.metric,
            only=names,
            uploads=uploads,
            targets=None if state is None or names is not None else find_targets,
            fresh=fresh,
            replicated=() if state is None else self._group().entries(state),
        )

        fitting: list[LoadFit] = []  # that of the candidate which was tried last

        def build_tree(verified: VerifiedPart) -> dict[str, Any]:
            self._launch.check_given(verified.part.checkpoint, verified.attempts)
            into = _loaded_entries({} if state is None else state, names, verified)
            if state is None:
                return {}
            tree = rename_like(into, _tree(verified)) if ignore_prefixes else _tree(verified)
            fitting[:] = [check_fit(into, tree)]
            return tree

        self.release_directory()
        with self._ranks.attending(), contextlib.ExitStack() as ending:
            if uploads:
                ending.callback(uploads.close)
            avoids = self._prefers_equal_replicas and step is None
            verified = restorer.restore(
                step, attempt, build_tree, goal, at_least, equal_replicas=avoids, changing=self._launch.loading
            )
            if verified is not None:
                self._hold = verified.hold
                self._launch.started_from = verified.manifest.started_from
                self._load(verified, state, names, fitting, restorer, uploads)
                if state is not None and names is None:
                    self._gate.forget_interrupted()  # because no parameter of such a step is left
        self._schedule.resume(verified.part.checkpoint if verified else None, restorer.resume)
        run = self._launch.run
        if verified is None:
            self._start_anew(state, restorer)
            if self._ranks.rank == 0:
                announce(
                    "run %s: begins, because no checkpoint of it is in spool %s or on a tier", run, self._spool.root
                )
            return None
        self._go_on_from(verified, state)
        if verified.unreached:
            silent = ", ".join(verified.unreached) + restorer.describe_silent()
            log.warning("restored step %d; not asked for newer ones: %s", verified.manifest.step, silent)
        if self._ranks.rank == 0:
            passed_over = f", after {len(verified.skipped)} newer that cannot be used" if verified.skipped else ""
            place = f"spool {self._spool.root}" if verified.tier == SPOOL else verified.tier
            announce("run %s: restored step %d from %s%s", run, verified.manifest.step, place, passed_over)
        return Restored(
            step=verified.manifest.step,
            attempt=verified.manifest.attempt,
            tier=verified.tier,
            metrics=verified.manifest.numbers,
            skipped=verified.skipped,
            unreached=verified.unreached,
            directory=verified.directory,
        )

    def restorer(
        self,
        *,
        keep: bool,
        best: str | None = None,
        only: Collection[str] | None = None,
        uploads: DeviceUploads | None = None,
        targets: FindTargets | None = None,
        fresh: Collection[str] = (),
        replicated: Collection[str] = (),
    ) -> Restorer:
        """Make the `Restorer`, after every earlier save has become durable or has failed."""
        self._gate.confirm()
        self._pipeline.drain()
        self._daemon.renew()
        source = NodeSource(
            self._spool,
            self._launch.run,
            tiers=self._daemon.has_tiers,
            line=self._handoff if keep else None,
            keep=keep,
            metrics=tuple({name for name in (best, self._schedule.metric) if isinstance(name, str)}),
            silent=self._daemon.silence_reason,
            uploads=uploads,
            targets=targets,
            timings=client_timings.current_timings(),
        )
        launch = self._launch
        return Restorer(
            source, self._ranks, launch.clock, self._daemon.report, only, fresh, replicated, launch.node_ranks
        )

    def release_directory(self) -> None:
        """Let the daemon delete the last restored directory."""
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _load(
        self,
        verified: VerifiedPart,
        state: MutableMapping[str, Any] | None,
        names: Collection[str] | None,
        fitting: Sequence[LoadFit],
        restorer: Restorer,
        uploads: DeviceUploads | None = None,
    ) -> None:
        """Load the verified part, then wait until every rank has loaded its part: only then may any rank continue."""
        self._launch.loading()
        failure: Exception | None = None
        try:
            if state is not None:
                into = _loaded_entries(state, names, verified)
                staged = uploads.device_tensors(verified.tree) if uploads else {}
                for image in verified.images:
                    staged |= image.live_tensors(verified.tree)
                load_restored(
                    into,
                    verified.tree,
                    handed_over=verified.arena is not None,
                    files=[memory for path, memory in verified.files.items() if path != TREE],
                    staged=staged,
                    fitting=fitting[0],
                )
                # Any other mapping has no plain values to replace: `build_tree` has checked that.
                if into is not state and isinstance(state, MutableMapping):
                    state.update(into)
        except Exception as error:
            failure = error
        restorer.agreement.exchange_load_result(verified.part.checkpoint, failure)

    def _start_anew(self, state: MutableMapping[str, Any] | None, restorer: Restorer) -> None:
        self._launch.go_on_from(None, restorer.resume.attempts, restorer.agreement.clocks)
        if state is not None:
            size_bytes = estimate(state, self._group())
            self._pipeline.reserve(size_bytes, device_of(state))
            self._space.check(size_bytes)

    def _go_on_from(self, verified: VerifiedPart, state: MutableMapping[str, Any] | None) -> None:
        self._launch.go_on_from(verified.part.checkpoint, verified.attempts, verified.clocks)
        if state is not None:
            is_like_saved = verified.part.world == self._launch.world
            size_bytes = len(verified.files[TENSORS]) if is_like_saved else estimate(state, self._group())
            self._pipeline.adopt(verified.arena)
            self._pipeline.reserve(size_bytes, device_of(state))
            self._space.check(size_bytes)


def _tree(verified: VerifiedPart) -> dict[str, Any]:
    check_written_by_save(verified.part, verified.files)
    return unflatten(verified.files[TREE], verified.files[TENSORS], siblings=verified.files)


def _loaded_entries(
    state: Mapping[str, Any], names: Collection[str] | None, verified: VerifiedPart
) -> Mapping[str, Any]:
    into = select_entries(state, names)
    return into if not verified.kept else {name: value for name, value in into.items() if name not in verified.kept}
