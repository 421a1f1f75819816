"""The launch: its attempt, which all its ranks share, the checkpoint it resumed from, and the steps that it has saved.

Invariant: ranks of one launch agree on one attempt or refuse to begin. They agree when they begin and when they
restore, never inside `save`. An attempt has one origin, and writes a step once. No state is saved that a restore has
changed in part, or that a restore should have replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

import msgspec

from tierd import __version__
from tierd.client.ranks.attempts import (
    Beginning,
    CurrentAttempt,
    LaunchClock,
    RankClock,
    agreed_attempt_name,
    has_saved,
    make_rank_clock,
    new_attempt,
    record_saved,
    report_failure,
)
from tierd.client.ranks.launchers import slurm_attempt
from tierd.client.ranks.ranks import Ranks
from tierd.core.errors import ConfigError, StepRefused, StoreUnavailable
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_run, check_step
from tierd.core.manifest import Ancestor, Manifest
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors

log = logging.getLogger("tierd")


class ResumeSource(Protocol):
    """What names another run's checkpoint, such as `tierd.Loaded`."""

    @property
    def run(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def attempt(self) -> str: ...


class Launch:
    """One rank of one launch: its names, the checkpoint it resumed from, and the steps that it has saved.

    Several ranks agree on their attempt here, by a gather, so that no save needs an agreement. Ranks that cannot talk
    are given an attempt, or derive one from SLURM's environment, which then counts as given.

    Args:
        list_attempts: returns every attempt that existed before.
        options: the arguments of a `Checkpointer` that have to be the same on every rank, as text.
        saving: called with each part that is about to be written.

    Raises:
        ConfigError: the ranks were given different runs, attempts or `options`, or cannot agree on an attempt; or
            the given attempt is an earlier launch's. Ranks that cannot talk notice that only if the earlier launch
            saved the same rank in the same spool.
        StoreUnavailable: another rank cannot begin; the message names it and says why.
    """

    def __init__(
        self,
        spool: Spool,
        run: str,
        ranks: Ranks,
        attempt: str | None,
        list_attempts: Callable[[], set[str]],
        options: Mapping[str, str] = MappingProxyType({}),
        saving: Callable[[PartId], None] = lambda part: None,
    ) -> None:
        self.run, self.rank, self.world = run, ranks.rank, ranks.world
        self.node_ranks: tuple[int, ...] = (ranks.rank,)  # the ranks that save in this spool, as far as they can talk
        self.nodes: tuple[tuple[int, ...], ...] = (self.node_ranks,)  # those of each spool
        self.started_from: Ancestor | None = None  # the other run's checkpoint from which this run started, if known
        self._shared = False  # whether another process may save for this launch
        self._spool, self._fixed_attempt, self._list_attempts, self._saving = spool, attempt, list_attempts, saving
        self._derived = False  # whether `_fixed_attempt` comes from SLURM's environment
        self._restores: set[object] = set()  # the `restoring` blocks that run now
        self._refused = ""  # why nothing may be saved after them
        self._has_started = False  # whether a restore has succeeded, or a save has begun
        self._changing = False  # whether one of them has come to load the state
        self._later = ""  # why the state is still to be loaded after them
        self._origins: dict[str, CheckpointId] = {}  # by attempt, because a save may end after the next restore
        self._current = CurrentAttempt()
        self._clock = LaunchClock()
        self._talks = ranks.can_communicate
        if self.world == 1:
            return
        if ranks.can_communicate:
            self._begin(ranks, dict(options))
        elif attempt is None:
            self._fixed_attempt = slurm_attempt(self.rank, self.world)
            self._derived = self._fixed_attempt is not None
            if self._fixed_attempt is None:
                raise ConfigError(
                    f"{self.world} ranks must share one attempt: initialise torch.distributed first, or pass attempt= "
                    "(tierd.new_attempt() makes one; give every rank the same)"
                )
        else:
            self._check_unused(attempt)

    def _begin(self, ranks: Ranks, options: dict[str, str]) -> None:
        try:
            attempts = self._list_attempts()
        except Exception as error:  # raised later, because the other ranks wait and must be notified first
            report_failure(ranks, self.run, error)
            raise
        me = Beginning(
            run=self.run,
            world=self.world,
            given=self._fixed_attempt,
            options=options,
            clock=make_rank_clock(attempts),
            used=self._fixed_attempt in attempts,
            saved=self._fixed_attempt is not None and self._saved_here(self._fixed_attempt),
            node=self._spool.node_id,
        )
        beginnings = ranks.gather(me, first=True)
        for rank, beginning in enumerate(beginnings):
            if beginning.error:
                raise StoreUnavailable(f"rank {rank} cannot begin: {beginning.error}")
            for option, their_value, own_value in (
                ("run", repr(beginning.run), repr(self.run)),
                ("world_size", str(beginning.world), str(self.world)),
                ("attempt", repr(beginning.given), repr(self._fixed_attempt)),
                *((name, beginning.options.get(name, "not known"), value) for name, value in options.items()),
            ):
                if their_value != own_value:
                    raise ConfigError(
                        f"{option}={own_value} on rank {self.rank}, and {option}={their_value} on rank {rank}: "
                        "the ranks of a launch "
                        "are one run's, and share one attempt; give every rank the same"
                    )
        nodes: dict[str, list[int]] = {}
        for rank, beginning in enumerate(beginnings):
            nodes.setdefault(beginning.node, []).append(rank)
        self.node_ranks, self.nodes = tuple(nodes[me.node]), tuple(map(tuple, nodes.values()))
        if self._fixed_attempt is None:
            self._current = CurrentAttempt(
                agreed_attempt_name((), [beginning.clock for beginning in beginnings if beginning.clock])
            )
        # No rank saves before all have begun, unless a process of this launch makes a second Checkpointer.
        elif any(beginning.used for beginning in beginnings) and not any(beginning.saved for beginning in beginnings):
            raise self._attempt_used_error(self._fixed_attempt)

    def _check_unused(self, attempt: str) -> None:
        if self._saved_here(attempt):
            return
        with spool_errors(f"spool {self._spool.root}", self._spool.root):
            parts = self._spool.parts(self.run)
        if any(part.rank == self.rank and part.checkpoint.attempt == attempt for part in parts):
            raise self._attempt_used_error(attempt)

    def _saved_here(self, attempt: str) -> bool:
        return has_saved(self._spool.control, self.run, attempt, self.rank)

    @property
    def attempt(self) -> str:
        return self._current.name_or_make(lambda: self._fixed_attempt or new_attempt(self._list_attempts()))

    @property
    def origin(self) -> CheckpointId | None:
        return self._origins.get(self._current.name or "")

    @property
    def steps(self) -> dict[int, PartId]:
        """The steps that saves of this attempt have claimed, with the part that each writes or has written."""
        return self._current.claims

    def part(self, step: int) -> PartId:
        """Return the id of the part that this rank writes at `step`. A save that begins claims it next (`claim`).

        Raises:
            StepRefused: `step` is no int, is negative, or is committed or claimed in this attempt.
            ConfigError: a restore runs, or the last one failed (`restoring`); or ranks that cannot talk were given an
                attempt under which another process has saved this rank.
        """
        number = check_step(step)
        self._check_not_refused()
        part = PartId(CheckpointId(self.run, self.attempt, number), self.rank, self.world)
        # No other process uses a name that this launch made. A given name may have been used before.
        if number in self.steps or ((self._shared or self._fixed_attempt is not None) and self._spool.has(part)):
            raise self._step_taken_error(part)
        self._saving(part)
        if not self._talks and not self._derived:  # the process that held the lease may have saved since `__init__`
            self._check_unused(part.checkpoint.attempt)
        record_saved(self._spool.control, self.run, part.checkpoint.attempt, self.rank)
        self._has_started = True
        self._warn_of_twin(part.checkpoint)
        return part

    def claim(self, part: PartId) -> None:
        """Refuse the step of `part` to every other save, of any thread, until `release` gets this very object.

        Raises `StepRefused` if another save has claimed it since `part` returned this object, `ConfigError` if a
        restore began.
        """
        current = self._current
        if not current.claim(part):
            raise self._step_taken_error(part)
        try:  # after the claim, so that a restore that begins later counts this save as an earlier one
            self._check_not_refused()
            if self._current is not current or current.name != part.checkpoint.attempt:
                raise ConfigError(f"{part} is not saved, because a restore began another attempt: save again")
        except ConfigError:
            current.release(part)
            raise

    def release(self, part: PartId) -> None:
        """Let the step of `part` be saved again, because its save failed. Another save's claim is left alone."""
        self._current.release(part)

    def keep(self, part: PartId) -> None:
        """Refuse the step of a committed `part` from now on, if its save had not claimed it."""
        current = self._current
        if part.checkpoint.attempt == current.name:
            current.claim(part)

    def _check_not_refused(self) -> None:
        refused = "a checkpoint is being restored in this process" if self._restores else self._refused
        if refused:
            raise ConfigError(f"nothing is saved, because {refused}")

    def _step_taken_error(self, part: PartId) -> StepRefused:
        return StepRefused(
            f"{part} is already committed by this attempt, or being saved; a checkpoint is never overwritten"
        )

    def _warn_of_twin(self, checkpoint: CheckpointId) -> None:
        resumed = self._origins.get(checkpoint.attempt)
        if resumed is not None and resumed.step == checkpoint.step and not self.steps and self.rank == 0:
            log.warning(
                "run %s: step %d is saved again, right after this launch resumed from step %d of attempt %s: keep_last "
                "counts the two as two checkpoints, so an older step may be deleted. If nothing was trained since the "
                "restore, do not save: `if step > restored.step`",
                self.run,
                checkpoint.step,
                checkpoint.step,
                resumed.attempt,
            )

    def share(self) -> None:
        """Let another process save for this launch from now on: its steps show only in the spool."""
        self._shared = True
        record_saved(self._spool.control, self.run, self.attempt, self.rank)

    def manifest(
        self,
        part: PartId,
        metrics: Mapping[str, float],
        division: str = "",
        senders: Mapping[int, tuple[int, int, bool]] = MappingProxyType({}),
    ) -> Manifest:
        created, origin = self._clock.now(), self._origins.get(part.checkpoint.attempt)
        made = Manifest.of(part, origin, metrics, created, __version__, started_from=self.started_from)
        return msgspec.structs.replace(made, division=division, senders=dict(senders))

    def start_from(self, source: ResumeSource) -> None:
        """Record in the manifests from now on that the run started from another run's checkpoint."""
        try:
            run, step, attempt = source.run, source.step, source.attempt
        except AttributeError as error:
            raise ConfigError(
                f"start_from(source): what tierd.open(…).restore(…) returns, with run, step and attempt: {error}"
            ) from None
        ancestor = Ancestor(run=check_run(run), step=check_step(step), attempt=check_attempt(attempt))
        if run == self.run:
            raise ConfigError(f"start_from: {ancestor} is of this run; restore() resumes from it")
        if self.origin is not None:
            raise ConfigError(
                f"start_from: this launch resumed from {self.origin}, so it did not start from {ancestor}"
            )
        self.started_from = ancestor

    def check_given(self, origin: CheckpointId | None, attempts: Collection[str]) -> None:
        """Raise `ConfigError` if a given attempt cannot continue from `origin`, or cannot be the run's latest."""
        attempt = self._attempt_for(origin)
        if attempt is None:
            return
        # Ranks that can talk restore together, so none of them has saved before this launch's first restore.
        if self._talks and not self._has_started and attempt in attempts:
            raise self._attempt_used_error(attempt)
        latest = max(attempts, default="")
        if attempt < latest or (origin and (self.steps or self._fixed_attempt == origin.attempt)):
            raise ConfigError(
                f"attempt {attempt} cannot go on from attempt {latest}: an attempt has one origin, and is later "
                "than what it resumes from; make a new Checkpointer with a new attempt="
            )

    def _attempt_used_error(self, attempt: str) -> ConfigError:
        return ConfigError(
            f"attempt {attempt} of run {self.run} is an earlier launch's, and a checkpoint could be made of parts of "
            "both. Each launch, also a restarted one, needs an attempt of its own (tierd.new_attempt() makes one)"
        )

    def _attempt_for(self, origin: CheckpointId | None) -> str | None:
        # Another rank that restored earlier may already have saved under this name.
        return slurm_attempt(self.rank, self.world, str(origin or "")) if self._derived else self._fixed_attempt

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Refuse saves during the block, and after it if it fails, until another such block succeeds.

        The state may then be loaded in part, or other ranks may have loaded the checkpoint. If this launch had not
        begun, the state is not the run's at all, and its save would replace everything that the run has. Only a launch
        that had begun saves on after a failure that came before `loading`.

        Blocks may overlap: a signal's handler restores, or another thread. The last one that ends decides.
        """
        token = object()
        self._restores.add(token)
        try:
            yield
            self._refused, self._has_started = self._later, True
        except BaseException as error:
            if self._changing or not self._has_started:
                self._refused = (
                    f"the last restore failed ({str(error) or type(error).__name__}): restore again on every rank, or "
                    "end; for a fresh start on purpose make another Checkpointer and do not call restore"
                )
            raise
        finally:
            self._restores.discard(token)
            if not self._restores:
                self._changing, self._later = False, ""

    def loading(self, later: str = "") -> None:
        """Record in a `restoring` block that the state is no longer that of this launch.

        If another such block will load the state, `later` says why saves are refused until that one has succeeded.
        """
        self._changing, self._later = True, later

    def clock(self) -> RankClock:
        return make_rank_clock([name for name in (self._current.name, self._fixed_attempt) if name])

    def go_on_from(self, origin: CheckpointId | None, attempts: Collection[str], clocks: Sequence[RankClock]) -> None:
        """Begin another attempt after a restore, because an attempt has one origin.

        The new attempt is the same on every rank, and later than `attempts`: every attempt that any rank has seen. If
        nothing was restored (`origin` is None), the attempt is kept if it is the latest. Raises as `check_given`.
        """
        self.check_given(origin, attempts)
        current, attempt = self._current, self._attempt_for(origin)
        if origin is None and (attempt or current.name is None or max(attempts, default="") <= current.name):
            if self._derived:
                self._current = current.renamed(attempt)
        else:  # an attempt that has no name yet is named at its first use, after another listing
            name = attempt or agreed_attempt_name(attempts, clocks)
            if origin is not None:
                self._origins[name] = origin  # before the attempt, because a save may read both at once
            self._current = CurrentAttempt(name)
        self._fixed_attempt = attempt
