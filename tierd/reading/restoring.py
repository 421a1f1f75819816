"""Load a checkpoint from the tiers into a state, for `Reader.restore`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.search import Search, Skipped
from tierd.core.errors import CheckpointNotFound, ConfigError, CorruptChunk, ManifestError, StateMismatch
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.core.save_policy import Goal
from tierd.core.timeline.candidates import Candidate
from tierd.reading.gone import corrupt_or_gone, none_there
from tierd.reading.tiers import RunOnTiers, TierFiles, TierView
from tierd.reading.whole import read_part
from tierd.state.fit import Fitting, check_fit, chosen
from tierd.state.flatten import unflatten
from tierd.state.kinds.wrapped_names import with_names_of
from tierd.state.load import load


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of `Reader.restore`. Its members have the same meanings as those of `Restored`.

    Attributes:
        run: the run, so that `Checkpointer.start_from` can record it.
        rank: the rank whose part was loaded; 0 if the call named no rank, because all ranks have the same entries then.
        world_size: how many ranks saved the checkpoint.
    """

    run: str
    step: int
    attempt: str
    rank: int
    world_size: int
    tier: str
    metrics: dict[str, float]
    skipped: tuple[Skipped, ...]
    unreached: tuple[str, ...]


def restore(
    tiers: RunOnTiers,
    state: Mapping[str, Any],
    step: int | None,
    attempt: str | None,
    goal: Goal | None,
    names: Collection[str] | None,
    rank: int | None,
    at_least: int | None,
    *,
    ignore_prefixes: bool,
) -> Loaded:
    """Do the work of `Reader.restore`.

    Args:
        tiers: the run on its tiers.
        goal: what makes a checkpoint the best; None for the newest.
        names: the entries of `state` to load; None for all.
        state, step, attempt, rank, at_least, ignore_prefixes: as for `Reader.restore`.

    Raises:
        As `Reader.restore`.
    """
    chosen(state, names)
    metrics = (goal.metric,) if goal is not None and isinstance(goal.metric, str) else ()
    search = Search(tiers.run, Ranks(0, 1), TierView(tiers, metrics))
    for candidate in search.whole(step, attempt, goal, at_least, other_launches=True):
        files = TierFiles(tiers, candidate.checkpoint, candidate.world, search.resume.origins)
        loaded, error = _try(tiers, candidate, files, chosen(state, names), names, rank, ignore_prefixes)
        unfit = isinstance(error, StateMismatch | ConfigError)
        if search.settle(candidate, error, unfit=unfit).load:
            assert loaded is not None
            manifest, tree, tensors, fitting = loaded
            into = chosen(state, names)
            load(into, tree, handed_over=False, file=tensors, fitting=fitting)
            if into is not state and isinstance(state, MutableMapping):
                state.update(into)
            return Loaded(
                run=tiers.run,
                step=manifest.step,
                attempt=manifest.attempt,
                rank=manifest.rank,
                world_size=manifest.world_size,
                tier=files.used[0],
                metrics=manifest.numbers,
                skipped=search.skipped(candidate.checkpoint),
                unreached=search.resume.unreached,
            )
        del loaded, error  # frees the memory before the next candidate is read
    incomplete = [str(reason) for reason in search.skipped()]
    raise CheckpointNotFound("\n  ".join([none_there(tiers), *incomplete]))


def _try(
    tiers: RunOnTiers,
    candidate: Candidate,
    files: TierFiles,
    into: Mapping[str, Any],
    names: Collection[str] | None,
    rank: int | None,
    ignore_prefixes: bool,
) -> tuple[tuple[Manifest, dict[str, Any], memoryview, Fitting] | None, Exception | None]:
    """Read and verify `candidate`, and check that it fits `into`.

    Returns:
        The manifest, the tree, the tensors and the result of `check_fit`, or None and the error.
    """
    try:
        manifest, contents = read_part(files, names, rank)
        tree = unflatten(contents[TREE], contents[TENSORS])
        tree = with_names_of(into, tree) if ignore_prefixes else tree
        return (manifest, tree, contents[TENSORS], check_fit(into, tree)), None
    except (CorruptChunk, ManifestError) as error:
        return None, corrupt_or_gone(tiers, candidate, error)
    except Exception as error:
        return None, error
