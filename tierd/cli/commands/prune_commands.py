"""Commands that delete from tiers without a daemon: `prune` by retention, `disown` the names of a planted launch.

Invariant: `disown` deletes only the objects that it has shown. Objects that can be read need `--yes`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from tierd.cli.checkpoint_table import runs_in, shown_attempts
from tierd.cli.missing_runs import check_run_exists, full_attempt, naming_known_runs
from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, RunArgument, RunOption, SpoolOption, UrlArgument
from tierd.cli.output import print_answer, print_json, terminal_width
from tierd.cli.places import Places, resolve_places
from tierd.cli.tables import Table
from tierd.core.errors import (
    CheckpointNotFound,
    ConfigError,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreUnavailable,
    TierdError,
)
from tierd.core.ids import CheckpointId, PartId, check_attempt, check_run, pruning_prefix
from tierd.core.planning.copies import most_freed_size, total_stored_size
from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory, known_policy, observed_runs, unknown_policy_reason
from tierd.core.planning.place import Place
from tierd.core.planning.prune_batches import MAX_BATCH_CHECKPOINTS
from tierd.core.planning.pruning import judge_place
from tierd.core.run_report import reasons_of
from tierd.core.units import format_size
from tierd.daemon.tiers.intents import intent_protections
from tierd.daemon.tiers.manifest_index import ManifestIndex
from tierd.daemon.tiers.run_removal import LaunchObjectCounts, LaunchObjects, list_launch_objects, local_leases
from tierd.daemon.tiers.run_removal import disown as take_away
from tierd.daemon.tiers.tier_identity import check_identities
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.tiers.tier_probes import QuarantinedCopy
from tierd.daemon.tiers.tier_prune import prune as prune_tier
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.open import open_tiers
from tierd.stores.store_wrappers import DeletionGuard


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (prune, disown):
        app.command()(command)


@dataclass(frozen=True, slots=True)
class PruneVerdict:
    """The verdict of retention on one checkpoint on one tier.

    Attributes:
        keep: whether a rule keeps it.
        reasons: the rules that keep it, or why nothing does.
        pruned: whether it was deleted.
        held: why it is not deleted although no rule keeps it, and until when; empty: nothing holds it.
        stored_bytes: its stored size there, by the manifests that were read, also of chunks that other checkpoints
            share, so that a sum over checkpoints may count these several times.
    """

    tier: str
    run: str
    step: int
    attempt: str
    keep: bool
    reasons: tuple[str, ...]
    pruned: bool
    held: str = ""
    stored_bytes: int = 0

    @property
    def outcome(self) -> str:
        """The verdict in one or two words."""
        if self.keep:
            return "keep"
        return "pruned" if self.pruned else "held back" if self.held else "would prune"

    def cells(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """The cells of a table, with each attempt as `names` has it."""
        reasons = "; ".join(filter(None, (*self.reasons, self.held)))
        return str(self.step), names[self.attempt], self.outcome, reasons


def prune(
    url: UrlArgument = None,
    config: ConfigOption = None,
    run: RunOption = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="The policy, in place of each run's own.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted, and why the others are kept.")
    ] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Apply retention to the tiers now, by each run's own policy or the one given. A spool is pruned by its daemon
    alone, which does both by itself."""
    where = resolve_places(None, url, config, keep_last, key_file, tiers=True)
    judged, freed_bytes = asyncio.run(_prune(where, run, dry_run=dry_run))
    if json:
        print_json({"verdicts": judged})
    if run and not judged:
        check_run_exists(where, run)
    if json:
        return
    _print_verdicts(judged)
    for tier, size in freed_bytes.items():
        verdicts = [verdict for verdict in judged if verdict.tier == tier]
        count = sum(verdict.outcome in ("pruned", "would prune") for verdict in verdicts)
        if not count:
            print_answer(f"{tier}: nothing to prune, {len(verdicts)} kept")
            continue
        # At most, because chunks that kept checkpoints share stay; which these are, only a prune reads.
        verb, effect = ("would prune", "would free at most") if dry_run else ("pruned", "freed")
        print_answer(f"{tier}: {verb} {count} of {len(verdicts)} checkpoints, which {effect} {format_size(size)}")


def _print_verdicts(judged: Sequence[PruneVerdict]) -> None:
    """Print one line for each checkpoint; on a terminal a run's name is a title."""
    columns = ("STEP", "ATTEMPT", "VERDICT", "BECAUSE")
    if terminal_width() is None:
        names = {verdict.attempt: verdict.attempt for verdict in judged}
        rows = [(verdict.tier, verdict.run, *verdict.cells(names)) for verdict in judged]
        print_answer(Table(("TIER", "RUN", *columns), rows))
        return
    by_run = sorted(judged, key=lambda verdict: verdict.run)
    for run, of_run in runs_in(by_run, lambda verdict: verdict.run):
        names = shown_attempts(verdict.attempt for verdict in of_run)
        rows = [(verdict.tier, *verdict.cells(names)) for verdict in of_run]
        print_answer(Table(("TIER", *columns), rows, title=run))


async def _prune(where: Places, run: str | None, *, dry_run: bool) -> tuple[list[PruneVerdict], dict[str, int]]:
    """Prune, or only judge; also return the bytes that this frees on each tier, for a dry run at most."""
    assert where.config is not None
    judged: list[PruneVerdict] = []
    freed_bytes: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack)
        await _check_identities(where, stores, keep=not dry_run)
        inventory = await observe_places(where.spool, stores, run)
        if where.has_policy:  # a person's policy replaces the runs' own
            answered = {name: place and replace(place, policies={}) for name, place in inventory.tiers.items()}
            inventory = replace(inventory, tiers=answered)
        run_names = [candidate for candidate in observed_runs(inventory) if run in (None, candidate)]
        _check_policies(inventory, where, run_names)
        for name, place in inventory.tiers.items():
            if place is None:
                raise StoreUnavailable(f"{name} did not answer; nothing more was pruned")
            manifests, guard = ManifestIndex(stores[name]), DeletionGuard(stores[name])
            for pruned_run in run_names:
                verdicts = judge_place(Demand(inventory, where.config, pruned_run), name)
                going = [verdict.id for verdict in verdicts if not verdict.keep and not dry_run]
                deleted, all_going = set[CheckpointId](), frozenset(going)
                hold_reasons = await intent_protections(stores[name], pruned_run) if dry_run else {}
                if going:  # a mark that cannot be deleted would delay flushes
                    await guard.check(f"{pruning_prefix(pruned_run)}none")
                    hold_reasons = await _release(stores[name], place, going)
                    going = [verdict for verdict in going if verdict not in hold_reasons]
                while going:
                    batch, going = going[:MAX_BATCH_CHECKPOINTS], going[MAX_BATCH_CHECKPOINTS:]
                    # Without the other batches: a prune counts on the rest, and a daemon may have deleted them first.
                    other_batches = all_going.difference(batch)
                    counted = {
                        each_checkpoint: copies
                        for each_checkpoint, copies in place.checkpoints.items()
                        if each_checkpoint not in other_batches
                    }
                    await _check_identities(where, stores, name)
                    outcome = await prune_tier(
                        stores[name], batch, manifest_index=manifests, decided_on=replace(place, checkpoints=counted)
                    )
                    deleted |= outcome.deleted
                    freed_bytes[name] += outcome.freed_bytes
                    hold_reasons |= dict.fromkeys(
                        set(batch) - outcome.deleted, "nothing of it is left but what others name"
                    )
                    hold_reasons |= outcome.kept_reasons
                freed_bytes[name] += most_freed_size(
                    [
                        place.checkpoints[verdict.id]
                        for verdict in verdicts
                        if dry_run and not verdict.keep and verdict.id in place.checkpoints.keys() - hold_reasons.keys()
                    ],
                    place.checkpoints,
                )
                for verdict in verdicts:
                    checkpoint, copy = verdict.id, place.checkpoints.get(verdict.id)
                    defects = [str(copy.defects[part]) for part in sorted(copy.defects)[:1]] if copy else []
                    judged.append(
                        PruneVerdict(
                            name,
                            checkpoint.run,
                            checkpoint.step,
                            checkpoint.attempt,
                            verdict.keep,
                            (*reasons_of(copy, verdict), *defects),
                            checkpoint in deleted,
                            "" if verdict.keep else hold_reasons.get(checkpoint, ""),
                            total_stored_size(copy.facts) if copy else 0,
                        )
                    )
    return judged, freed_bytes


async def _check_identities(where: Places, stores: Mapping[str, Store], tier: str = "", *, keep: bool = True) -> None:
    """Compare the tiers' identities as `check_identities` does.

    Raises `ConfigError` if two tiers are one place, and `StoreUnavailable` if a tier did not answer, so it is not
    known.
    """
    assert where.config is not None
    if silent := await check_identities(where.config.urls(), stores, tier, keep=keep):
        raise StoreUnavailable(f"{', '.join(sorted(silent))} did not answer; nothing more was pruned")


async def _release(store: Store, place: Place, going: Collection[CheckpointId]) -> dict[CheckpointId, str]:
    """Verify the quarantined copies among `going` once more; return those that must be kept, each with the reason."""
    reasons: dict[CheckpointId, str] = {}
    for part in sorted(place.quarantined):
        if part.checkpoint in going and not place.has(part):
            try:
                if await QuarantinedCopy(store, part).release():
                    reasons[part.checkpoint] = "its quarantined copy was read again, proved right, and is used again"
            except (TierdError, OSError) as error:
                reasons[part.checkpoint] = f"its quarantined copy cannot be read: {error}"
    return reasons


def _check_policies(inventory: Inventory, where: Places, run_names: list[str]) -> None:
    """Raise `ConfigError` if a run has no policy on a tier, or one that cannot be read, before anything is deleted."""
    assert where.config is not None
    for name, place in inventory.tiers.items():
        if place is None or where.has_policy:
            continue
        for run in run_names:
            if why := unknown_policy_reason(place, run):
                raise ConfigError(f"{name}: what run {run!r} keeps is not known: {why}; give --keep-last N")
            on_tiers = {tier for policy in place.policies.get(run, ()) for tier in policy.tiers}
            if len(on_tiers) > len(where.config.tier):
                raise ConfigError(
                    f"{name}: run {run!r} is kept on {', '.join(sorted(on_tiers))}, and what a tier that is not named "
                    "here still wants from this one is not known; name every tier, give --config FILE, or decide "
                    "yourself by --keep-last N"
                )
            if known_policy(inventory, where.config, run, name) is None and any(place.copies(run)):
                raise ConfigError(
                    f"{name}: no policy of run {run!r} is there; give --keep-last N, --config FILE, or another --run"
                )


@dataclass(frozen=True, slots=True)
class DisownResult:
    """The objects of a launch that `disown` found, by tier, and whether it deleted them there."""

    run: str
    attempt: str
    disowned: bool
    places: tuple[LaunchObjectCounts, ...]


def disown(
    run: RunArgument,
    attempt: Annotated[str, typer.Argument(metavar="ATTEMPT", help="The launch, as an error or `ls` names it.")],
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, also where some of it can be read.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is there, and delete nothing.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a launch's names (manifests, quarantined ones, intents, pins, marks) from tiers: they are nobody's."""
    where = resolve_places(spool, url, config, key_file=key_file, tiers=True)
    if where.config is None:
        raise ConfigError("disown takes names from tiers: give their URLs, or --config FILE")
    attempt = check_attempt(full_attempt(where, check_run(run), attempt) or "")
    _check_leases(where, run, attempt)
    claimed_by_tier = asyncio.run(_find_claims(where, run, attempt))
    claims = tuple(claimed.count(name) for name, claimed in claimed_by_tier.items() if claimed.keys)
    if not claims:
        with naming_known_runs(where, run):
            raise CheckpointNotFound(f"run {run!r}: no place named holds anything under the name of attempt {attempt}")
    if not json:
        rows = [
            (claim.place, *map(str, (claim.checkpoints, claim.readable, claim.complete, claim.objects)))
            for claim in claims
        ]
        print_answer(Table(("WHERE", "CHECKPOINTS", "READABLE", "COMPLETE", "OBJECTS"), rows))
    if not dry_run:
        if not yes:
            _confirm(run, attempt, claims)
        asyncio.run(_delete_claims(where, claimed_by_tier))
    if json:
        print_json(DisownResult(run, attempt, not dry_run, claims))
    elif not dry_run:
        print_answer(f"attempt {attempt} of {run} counts for nothing on {', '.join(claim.place for claim in claims)}")


def _check_leases(where: Places, run: str, attempt: str) -> None:
    """Raise `ConfigError` if this node knows that the launch is real: a trainer of it is alive here, it saved in the
    named spool, or a part of it can be read there."""
    if leases := local_leases(run, attempt):
        processes = ", ".join(f"{pid} (spool {spool})" for pid, spool in sorted(leases.items()))
        raise ConfigError(
            f"disown {run} {attempt}: it lives: process {processes} on this node saves it; nothing was deleted. End it "
            "first, if it really is not to be found any more"
        )
    if where.spool is None:
        return
    spool_parts = [
        part for part in where.spool.parts() if (part.checkpoint.run, part.checkpoint.attempt) == (run, attempt)
    ]
    if where.spool.saved_stamp(run, attempt) or any(_can_be_read(where.spool, part) for part in spool_parts):
        raise ConfigError(
            f"disown {run} {attempt}: this node's spool holds parts of it, so it is a launch of this node's, whose "
            "daemon would send it again; retention retires it, and tierd rm removes the run"
        )


def _can_be_read(spool: Spool, part: PartId) -> bool:
    try:
        spool.manifest(part)
    except (ObjectNotFound, ManifestError):
        return False  # the daemon quarantines it
    except FormatTooNew:
        pass
    return True


def _confirm(run: str, attempt: str, claims: tuple[LaunchObjectCounts, ...]) -> None:
    readable, complete = max(claim.readable for claim in claims), max(claim.complete for claim in claims)
    if readable:
        raise ConfigError(
            f"disown {run} {attempt}: {readable} of its checkpoints can be read (if not here, by a newer tierd or with "
            f"another key), and {complete} of them are complete; it may be a real launch, and no restore would find "
            "them again. Whether it lives on another node cannot be told here. If that is meant, give --yes; nothing "
            "was deleted"
        )
    if not sys.stdin.isatty():
        raise ConfigError(f"disown {run} {attempt}: nobody is there to be asked; give --yes, or --dry-run")
    places = ", ".join(claim.place for claim in claims)
    question = f"Nothing of attempt {attempt} of {run} can be read. Delete its names from {places}, for good?"
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


async def _find_claims(where: Places, run: str, attempt: str) -> dict[str, LaunchObjects]:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        return {name: await list_launch_objects(store, run, attempt) for name, store in stores.items()}


async def _delete_claims(where: Places, claimed_by_tier: dict[str, LaunchObjects]) -> None:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        for name, store in stores.items():
            await take_away(store, claimed_by_tier[name].keys)
