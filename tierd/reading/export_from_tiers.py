"""Find the checkpoint that `Reader.export` writes, as a restore finds the one that it loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.search import CandidateSearch
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    CorruptChunk,
    ManifestError,
    StateMismatch,
    StateRefused,
)
from tierd.core.save_policy import MetricGoal
from tierd.core.timeline.candidates import Candidate
from tierd.exporting.checkpoint_export import ExportedFiles, ExportOptions, export
from tierd.reading.run_on_tiers import RunOnTiers, TierFiles, TierView, error_if_pruned, no_checkpoint_text

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
    search = CandidateSearch(tiers.run, Ranks(0, 1), TierView(tiers, () if best is None else (best.metric,)))
    for candidate in search.complete_candidates(step, attempt, best, other_launches=True):
        files = TierFiles(tiers, candidate.checkpoint, candidate.world, search.resume.origins)
        exported, error = _try(tiers, candidate, files, target, options)
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


def _try(
    tiers: RunOnTiers, candidate: Candidate, files: TierFiles, target: Path, options: ExportOptions
) -> tuple[ExportedFiles | None, Exception | None]:
    try:
        while True:
            try:
                return export(files, files.part(0), target, options), None
            except CorruptChunk:
                if not files.try_next():  # the tiers contradict each other, and another content may verify
                    raise
    except (CorruptChunk, ManifestError) as error:
        return None, error_if_pruned(tiers, candidate, error)
    except Exception as error:
        return None, error
