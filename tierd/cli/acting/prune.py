"""The command `prune`: apply retention to tiers now, without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from tierd.cli.known import check_known
from tierd.cli.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    Places,
    RunOption,
    UrlArgument,
    places,
)
from tierd.cli.tables import console, print_json, table
from tierd.core.errors import ConfigError, StoreUnavailable, TierdError
from tierd.core.ids import CheckpointId, pruning_prefix
from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory, runs
from tierd.core.planning.place import Place
from tierd.core.planning.pruning import MOST_CHECKPOINTS
from tierd.core.planning.verdicts import judge
from tierd.core.report import reasons_of
from tierd.core.retention.policies import known_policy, unknown
from tierd.daemon.opening import open_tiers
from tierd.daemon.tiers.identity import check_identities
from tierd.daemon.tiers.intents import being_flushed
from tierd.daemon.tiers.manifests import Manifests
from tierd.daemon.tiers.observe import observe_places
from tierd.daemon.tiers.prune import prune as prune_tier
from tierd.daemon.tiers.release import QuarantinedCopy
from tierd.stores.base import Store
from tierd.stores.deletions import DeletionGuard


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(prune)


@dataclass(frozen=True, slots=True)
class PruneVerdict:
    """The verdict of retention on one checkpoint on one tier.

    Attributes:
        keep: whether a rule keeps it.
        reasons: the rules that keep it, or why nothing does.
        pruned: whether it was deleted.
        held: why it is not deleted although no rule keeps it, and until when; empty: nothing holds it.
    """

    tier: str
    run: str
    step: int
    attempt: str
    keep: bool
    reasons: tuple[str, ...]
    pruned: bool
    held: str = ""

    @property
    def done(self) -> str:
        """The verdict in one or two words."""
        if self.keep:
            return "keep"
        return "pruned" if self.pruned else "held back" if self.held else "would prune"


def prune(
    url: UrlArgument = None,
    config: ConfigOption = None,
    run: RunOption = None,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="The policy, in place of each run's own.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and why the rest stays.")] = False,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Apply retention to the tiers now: each run's own policy, or the one given. A spool is pruned by its daemon alone,
    which does both by itself."""
    where = places(None, url, config, keep_last, key_file)
    judged = asyncio.run(_prune(where, run, dry_run=dry_run))
    if json:
        print_json({"verdicts": judged})
    if run and not judged:
        check_known(where, run)
    if json:
        return
    rows = [
        (
            verdict.tier,
            verdict.run,
            str(verdict.step),
            verdict.attempt,
            verdict.done,
            "; ".join([*verdict.reasons, *([verdict.held] if verdict.held else [])]),
        )
        for verdict in judged
    ]
    console().print(table(None, ("TIER", "RUN", "STEP", "ATTEMPT", "VERDICT", "BECAUSE"), rows))


async def _prune(where: Places, run: str | None, *, dry_run: bool) -> list[PruneVerdict]:
    assert where.config is not None
    judged: list[PruneVerdict] = []
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack)
        await _check_identities(where, stores, keep=not dry_run)
        inventory = await observe_places(where.spool, stores, run)
        if where.policy:  # a person's policy replaces the runs' own
            answered = {name: place and replace(place, policies={}) for name, place in inventory.tiers.items()}
            inventory = replace(inventory, tiers=answered)
        run_names = [candidate for candidate in runs(inventory) if run in (None, candidate)]
        _check_policies(inventory, where, run_names)
        for name, place in inventory.tiers.items():
            if place is None:
                raise StoreUnavailable(f"{name} did not answer; nothing more was pruned")
            manifests, guard = Manifests(stores[name]), DeletionGuard(stores[name])
            for pruned_run in run_names:
                verdicts = judge(Demand(inventory, where.config, pruned_run), name)
                going = [verdict.id for verdict in verdicts if not verdict.keep and not dry_run]
                deleted, all_going = set[CheckpointId](), frozenset(going)
                hold_reasons = await being_flushed(stores[name], pruned_run) if dry_run else {}
                if going:  # a mark that cannot be deleted would delay flushes
                    await guard.check(f"{pruning_prefix(pruned_run)}none")
                    hold_reasons = await _release(stores[name], place, going)
                    going = [verdict for verdict in going if verdict not in hold_reasons]
                while going:
                    batch, going = going[:MOST_CHECKPOINTS], going[MOST_CHECKPOINTS:]
                    # Without the other batches: a prune counts on the rest, and a daemon may have deleted them first.
                    other_batches = all_going.difference(batch)
                    counted = {
                        each_checkpoint: copies
                        for each_checkpoint, copies in place.checkpoints.items()
                        if each_checkpoint not in other_batches
                    }
                    await _check_identities(where, stores, name)
                    outcome = await prune_tier(
                        stores[name], batch, known=manifests, seen=replace(place, checkpoints=counted)
                    )
                    deleted |= outcome.gone
                    hold_reasons |= dict.fromkeys(
                        set(batch) - outcome.gone, "nothing of it is left but what others name"
                    )
                    hold_reasons |= outcome.held
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
                        )
                    )
    return judged


async def _check_identities(where: Places, stores: Mapping[str, Store], tier: str = "", *, keep: bool = True) -> None:
    """Compare the tiers' identities as `check_identities` does.

    Raises:
        ConfigError: two tiers are one place.
        StoreUnavailable: a tier did not answer, so it is not known.
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
        if place is None or where.policy:
            continue
        for run in run_names:
            if why := unknown(place, run):
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
                    f"{name}: nobody said what run {run!r} keeps there; give --keep-last N, or --config FILE"
                )
