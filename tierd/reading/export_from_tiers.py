"""Find the checkpoint that `Reader.export` writes, as a restore finds the one that it loads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.candidate_trials import CandidateTrials
from tierd.core.errors import CheckpointNotFound, ConfigError, StateMismatch, StateRefused
from tierd.core.save_rules import MetricGoal
from tierd.exporting.checkpoint_export import ExportOptions, export
from tierd.reading.run_on_tiers import RunOnTiers, TierFiles, TierView, no_checkpoint_text, read_verified

__all__ = ["ExportOptions", "StateExport", "export_state"]


@dataclass(frozen=True, slots=True)
class StateExport:
    """A checkpoint that was written in another format.

    Attributes:
        directory: the directory with the files.
        files: by name, the sizes of the files in bytes.
        tensors: how many tensors were written.
        left_out: values that the format, or the program that reads it, does not take.
        converted: values that have another type in the files, with their types before, as `scores (numpy.ndarray)`.
        stripped: how many names lost the prefix.
        overflowed: tensors in which the other dtype made finite values infinite.
        tiers: the tiers from which bytes came.
        skipped: newer checkpoints that could not be used, and why.
    """

    run: str
    step: int
    attempt: str
    directory: str
    files: dict[str, int]
    tensors: int
    left_out: tuple[str, ...]
    converted: tuple[str, ...]
    stripped: int
    overflowed: tuple[str, ...]
    tiers: tuple[str, ...]
    skipped: tuple[str, ...]


def export_state(
    tiers: RunOnTiers,
    target: Path,
    options: ExportOptions,
    step: int | None,
    attempt: str | None,
    best: MetricGoal | None,
) -> StateExport:
    """Export the first checkpoint, in the order of a restore, that verifies. Raises as `Reader.export`."""
    search = CandidateTrials(tiers.run, Ranks(0, 1), TierView(tiers, () if best is None else (best.metric,)))
    for candidate in search.candidates(step, attempt, best, other_launches=True):
        files = TierFiles(tiers, candidate.checkpoint, candidate.world, search.resume.origins)
        read = partial(export, files, files.part(0), target, options)
        exported, error = read_verified(tiers, candidate, files, read)
        unfit = isinstance(error, StateMismatch | StateRefused | ConfigError)
        if search.settle(candidate, error, unfit=unfit).should_load:
            assert exported is not None
            checkpoint = candidate.checkpoint
            skipped = tuple(map(str, search.skipped(checkpoint)))
            return StateExport(
                tiers.run,
                checkpoint.step,
                checkpoint.attempt,
                str(target),
                exported.file_sizes,
                exported.tensors,
                exported.left_out,
                exported.converted,
                exported.stripped,
                exported.overflowed,
                files.used_tiers,
                skipped,
            )
    raise CheckpointNotFound("\n  ".join([no_checkpoint_text(tiers), *map(str, search.skipped())]))
