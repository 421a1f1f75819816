"""Load a checkpoint from the tiers into a state, for `Reader.restore`: one rank's part, or what all ranks share.

Invariant: two entries count as equal only if their trees are the same JSON and their tensors the same bytes. The
manifests' digests decide that where they suffice; otherwise the verified bytes are compared.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring.candidate_trials import CandidateTrials, Skipped
from tierd.client.restoring.saved_entries import (
    check_names,
    check_written_by_save,
    parse_entries,
    read_elsewhere,
    read_entries,
    read_tree,
    referenced_tensors,
)
from tierd.client.restoring.tensor_locations import PartTensors, TensorComparison, TensorLocator
from tierd.core.errors import CheckpointNotFound, ConfigError, StateMismatch
from tierd.core.ids import PartId
from tierd.core.manifest import TENSORS, TREE, Manifest
from tierd.core.save_rules import MetricGoal
from tierd.reading.run_on_tiers import RunOnTiers, TierFiles, TierView, no_checkpoint_text, read_verified
from tierd.spool.direct_io import finish_read, memory_for
from tierd.state.kinds.live_parameters import rename_like
from tierd.state.load_check import LoadFit, check_fit, select_entries
from tierd.state.single_values import path_part_text
from tierd.state.state_loading import load_restored, unflatten
from tierd.state.tensor_header import parse_layout

_READERS = 8  # ranks compared at once


@dataclass(slots=True)
class _Part:
    """One rank's part: each entry's JSON and tensor names, and where the tensors lie."""

    id: PartId
    entries: dict[str, str]
    names: dict[str, set[str]]
    tensors: PartTensors


def differing_entries(files: TierFiles, names: Collection[str] | None) -> list[str]:
    """List the entries, of these or of all, that are not the same on all ranks, in the order in which they were saved.

    Raises `StateMismatch` if `save` did not write the checkpoint, or it has no such entry; and as `PartRanges.fill`.
    """
    manifest = files.manifest(files.part(0))
    check_written_by_save(manifest.part, [file.path for file in manifest.files])
    if files.world == 1:
        return []
    locator, comparison = TensorLocator(files), TensorComparison(files)
    first = _describe(locator, files.part(0))
    if names is not None:
        check_names(first.entries, names, str(first.id))

    def compare(rank: int) -> set[str]:
        part = files.part(rank)
        if _content(files.manifest(part)) == _content(manifest):
            return set()
        described = _describe(locator, part)
        entry_names = dict.fromkeys((*first.entries, *described.entries)) if names is None else names
        return {name for name in entry_names if not _is_same(comparison, first, described, name)}

    with ThreadPoolExecutor(_READERS, thread_name_prefix="tierd-compare") as pool:
        differences = set[str]().union(*pool.map(compare, range(1, files.world)))
    return [*(name for name in first.entries if name in differences), *sorted(differences - first.entries.keys())]


def _content(manifest: Manifest) -> list[tuple[str, list[str]]]:
    return [(file.path, [chunk.xxh3_128 for chunk in file.chunks]) for file in manifest.files]


def _describe(locator: TensorLocator, part: PartId) -> _Part:
    files = locator.files
    check_written_by_save(part, [file.path for file in files.manifest(part).files])
    parsed = parse_entries(read_tree(files, part), str(part))
    # Compared as text, because 1, 1.0 and true are different values.
    entries = {name: json.dumps(value) for name, value in parsed.items()}
    names = {name: referenced_tensors(text) for name, text in entries.items()}
    return _Part(part, entries, names, locator.tensors_of(part))


def _is_same(comparison: TensorComparison, first: _Part, second: _Part, name: str) -> bool:
    if name not in first.entries or first.entries[name] != second.entries.get(name):
        return False
    return all(_are_equal(comparison, first, second, tensor) for tensor in sorted(first.names[name]))


def _are_equal(comparison: TensorComparison, first: _Part, second: _Part, tensor: str) -> bool:
    ours, theirs = first.tensors.locate_if_known(tensor), second.tensors.locate_if_known(tensor)
    if ours is None or theirs is None:
        return ours is theirs is None
    return comparison.are_equal(ours, theirs)


def _part(files: TierFiles, names: Collection[str] | None, rank: int | None) -> PartId:
    if rank is not None:
        if type(rank) is not int or not 0 <= rank < files.world:
            raise ConfigError(f"rank={rank!r}: {files.checkpoint} has ranks 0..{files.world - 1}")
        return files.part(rank)
    entries = differing_entries(files, names)
    if entries:
        entry_texts = ", ".join(map(path_part_text, entries))
        raise StateMismatch(
            f"{files.checkpoint} was saved by {files.world} ranks, and {entry_texts} differ{'s' * (len(entries) == 1)} "
            f"between them: say whose is wanted, restore(state, rank=0), or load others alone, restore(state, only=…)"
        )
    return files.part(0)


def _read(files: TierFiles, part: PartId, names: Collection[str] | None) -> tuple[Manifest, Mapping[str, memoryview]]:
    manifest = files.manifest(part)
    check_written_by_save(part, [file.path for file in manifest.files])
    if names is not None:
        return read_entries(files, part, names)
    contents: dict[str, memoryview] = {}
    for file in manifest.files:
        memory = memory_for(file.size)
        if file.size:
            files.fill(memory, [files.span(part, file.path)])
        contents[file.path] = finish_read(memory, file.size)
    return manifest, contents | read_elsewhere(files, part, parse_layout(contents[TENSORS]))


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
    goal: MetricGoal | None,
    names: Collection[str] | None,
    rank: int | None,
    at_least: int | None,
    *,
    ignore_prefixes: bool,
) -> Loaded:
    """Do the work of `Reader.restore`, whose arguments and errors it has; `goal` is None for the newest."""
    select_entries(state, names)
    metrics = (goal.metric,) if goal is not None and isinstance(goal.metric, str) else ()
    search = CandidateTrials(tiers.run, Ranks(0, 1), TierView(tiers, metrics))
    for candidate in search.candidates(step, attempt, goal, at_least, other_launches=True):
        files = TierFiles(tiers, candidate.checkpoint, candidate.world, search.resume.origins)
        read = partial(_read_fitting, files, select_entries(state, names), names, rank, ignore_prefixes)
        loaded, error = read_verified(tiers, candidate, files, read)
        unfit = isinstance(error, StateMismatch | ConfigError)
        if search.settle(candidate, error, unfit=unfit).should_load:
            assert loaded is not None
            manifest, tree, memories, fitting = loaded
            into = select_entries(state, names)
            load_restored(into, tree, handed_over=False, files=memories, fitting=fitting)
            if into is not state and isinstance(state, MutableMapping):
                state.update(into)
            return Loaded(
                run=tiers.run,
                step=manifest.step,
                attempt=manifest.attempt,
                rank=manifest.rank,
                world_size=manifest.world_size,
                tier=files.used_tiers[0],
                metrics=manifest.numbers,
                skipped=search.skipped(candidate.checkpoint),
                unreached=search.resume.unreached,
            )
        del loaded, error  # frees the memory before the next candidate is read
    incomplete = [str(reason) for reason in search.skipped()]
    raise CheckpointNotFound("\n  ".join([no_checkpoint_text(tiers), *incomplete]))


def _read_fitting(
    files: TierFiles, into: Mapping[str, Any], names: Collection[str] | None, rank: int | None, ignore_prefixes: bool
) -> tuple[Manifest, dict[str, Any], list[memoryview], LoadFit]:
    """Read and verify the rank's part, or the part that all ranks share, and check that it fits `into`.

    The third value is the memory of the tensor files, of which tensors of the tree are views.
    """
    manifest, contents = _read(files, _part(files, names, rank), names)
    tree = unflatten(contents[TREE], contents[TENSORS], siblings=contents)
    tree = rename_like(into, tree) if ignore_prefixes else tree
    memories = [memory for path, memory in contents.items() if path != TREE]
    return manifest, tree, memories, check_fit(into, tree)
