"""Commands that only read checkpoints: ls, show, verify."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from tierd.cli.checkpoint_table import copy_table, file_table, print_checkpoints, runs_in, shown_attempts, with_notes
from tierd.cli.command_runtime import collector_paused
from tierd.cli.missing_runs import checkpoint_not_found, full_attempt, naming_known_runs
from tierd.cli.options import (
    AttemptOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    RunArgument,
    RunOption,
    SpoolOption,
    StepArgument,
    StepOption,
    UrlArgument,
    parse_time,
)
from tierd.cli.output import complain, print_answer, print_json, terminal_width
from tierd.cli.places import Places, resolve_places
from tierd.cli.progress import show_progress
from tierd.cli.tables import Table
from tierd.core.errors import (
    CheckpointNotFound,
    DaemonAbsent,
    DaemonUnavailable,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreUnavailable,
    TierdError,
    VersionMismatch,
)
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import Manifest
from tierd.core.planning.copies import division_mismatch
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import SPOOL
from tierd.core.replicas.shares import differing_divisions
from tierd.core.run_report import Checkpoint, Report, make_report
from tierd.core.storage_faults import UnstableRead
from tierd.core.timeline.restore_order import not_found_error, restore_candidates
from tierd.core.units import format_ranges, format_size
from tierd.daemon.tiers.tier_objects import ObjectDefects, manifest_bytes, read_manifest
from tierd.daemon.tiers.tier_objects import verify_part as verify_on_tier
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.ipc import message_codec, messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool
from tierd.spool.verified_reads import bad_chunks
from tierd.stores.base import Store
from tierd.stores.open import open_tiers
from tierd.threads import mark_foreground

_ENCRYPTED = re.compile(r"encrypted with key ([0-9a-f]+)")  # as `WrongKey` says it
_LISTINGS = 3  # because a checkpoint may be pruned between a listing and the reading


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (ls, show, verify):
        app.command()(command)


def ls(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    run: RunOption = None,
    newest: Annotated[
        int | None, typer.Option("--newest", metavar="N", min=1, help="Only the N newest of each run.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only those made within this time: 2h, 3d.")
    ] = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """List every checkpoint, where its copies lie, and what retention makes of them. → resumes next, * pinned."""
    where = resolve_places(spool, url, config, key_file=key_file, run_option=True)
    since_s = None if since is None else parse_time("--since", since)
    listing, unanswered = _report(where, run)
    missing = run is not None and not listing.checkpoints and not listing.unreached and not unanswered
    selected = list(_select(listing.checkpoints, newest, since_s))
    listing = Report(asyncio.run(_with_notes(where, selected)), listing.unreached)
    if json:
        print_json(listing)
    elif not missing:
        print_checkpoints(listing.checkpoints)
        for name in listing.unreached:
            complain(f"{name} did not answer")
        if not (listing.checkpoints or listing.unreached or unanswered):
            complain("no checkpoint is there" if since is None else f"no checkpoint there was made within {since}")
    if _complain_of_encryption(listing.checkpoints) or listing.unreached or unanswered:
        raise typer.Exit(6)
    with naming_known_runs(where, run):
        if missing:
            raise checkpoint_not_found(run, None, ())


def show(
    run: RunArgument,
    step: StepArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    attempt: AttemptOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Show one checkpoint: its manifest's files, metrics, origin, lineage, and every copy."""
    where = resolve_places(spool, url, config, key_file=key_file)
    with naming_known_runs(where, run):
        inventory, checkpoint, manifests = _observe_checkpoint(where, run, step, full_attempt(where, run, attempt))
    summary = next(
        c
        for c in make_report(inventory, where.config, run, defaults=where.has_policy).checkpoints
        if (c.step, c.attempt) == (checkpoint.step, checkpoint.attempt)
    )
    (summary,) = asyncio.run(_with_notes(where, [summary]))
    if json:
        print_json({"checkpoint": summary, "manifests": manifests})
        return
    _complain_of_encryption((summary,))
    pinned = f", pinned{f': {summary.note}' if summary.note else ''}" if summary.pinned else ""
    created = (summary.created or "unknown")[:19].replace("T", " ")
    print_answer(f"run {run}, step {checkpoint.step}{pinned}", wrap=False)
    print_answer(f"attempt {checkpoint.attempt}, {created} UTC, {'complete' if summary.complete else 'incomplete'}")
    print_answer(f"resumed from: {_origin(run, summary.resumed_from) or 'nothing'}")
    values = ", ".join(f"{name} {'none' if value is None else value}" for name, value in summary.metrics.items())
    print_answer(f"metrics: {values or 'none'}")
    for line in _lineage(manifests):
        print_answer(line)
    for table in (copy_table(summary), file_table(manifests)):
        print_answer("")
        print_answer(table)


def _select(checkpoints: Sequence[Checkpoint], newest: int | None, since_s: float | None) -> Iterator[Checkpoint]:
    """Yield the `newest` checkpoints of each run, of those that were made at most `since_s` seconds ago."""
    begin = None if since_s is None else datetime.now(UTC) - timedelta(seconds=since_s)
    newest_first = sorted(checkpoints, key=lambda checkpoint: (checkpoint.attempt, checkpoint.step), reverse=True)
    counts, chosen = Counter[str](), set[tuple[str, str, int]]()
    for checkpoint in newest_first:
        created = datetime.fromisoformat(checkpoint.created) if checkpoint.created else None
        if begin is not None and (created is None or created < begin):
            continue
        counts[checkpoint.run] += 1
        if newest is None or counts[checkpoint.run] <= newest:
            chosen.add((checkpoint.run, checkpoint.attempt, checkpoint.step))
    for checkpoint in checkpoints:  # in the order of the report
        if (checkpoint.run, checkpoint.attempt, checkpoint.step) in chosen:
            yield checkpoint


def _complain_of_encryption(checkpoints: Sequence[Checkpoint]) -> bool:
    """Say which places are encrypted with a key that was not given, and whether there is one."""
    keys = {
        copy.place: match[1]
        for checkpoint in checkpoints
        for copy in checkpoint.copies
        if copy.state == "unreadable" and (match := _ENCRYPTED.search(" ".join(copy.defects)))
    }
    for place, key in keys.items():
        complain(f"{place}: it is encrypted with key {key}: give its file by --key-file or TIERD_KEY_FILE")
    return bool(keys)


def _observe_checkpoint(
    where: Places, run: str, step: int, attempt: str | None
) -> tuple[Inventory, CheckpointId, list[Manifest]]:
    """Observe all places, and return with that the checkpoint of a step and its manifests.

    Raises:
        CheckpointNotFound: there is none, or it was pruned meanwhile.
        StoreUnavailable: it vanished while it was read, and is there again.
    """
    pruned = ""
    for _ in range(_LISTINGS):
        inventory = observe_inventory(where, run)
        try:
            checkpoint = choose_checkpoint(inventory, run, step, attempt)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(f"{error}{pruned}") from None
        manifests, missing_parts = asyncio.run(_read_manifests(where, inventory, checkpoint))
        if not missing_parts:
            return inventory, checkpoint, manifests
        pruned = "\n  it was pruned while it was read"
    raise StoreUnavailable(f"{checkpoint}: its manifests vanished while they were read, {_LISTINGS} times; try again")


def _origin(run: str, name: str | None) -> str | None:
    """Return the checkpoint of this name of the run as people read it; or the name."""
    origin = CheckpointId.parse(run, name) if name else None
    return f"step {origin.step} of attempt {origin.attempt}" if origin else name


def _lineage(manifests: list[Manifest]) -> Iterator[str]:
    """Yield what the first readable manifest says of other runs."""
    for manifest in manifests[:1]:
        if manifest.started_from:
            yield f"the run started from: {manifest.started_from}"
        if manifest.copied_from:
            yield f"copied from: {' → '.join(manifest.copied_from)}"


@dataclass(frozen=True, slots=True)
class CopyCheck:
    """The result of reading one copy of one part again.

    Attributes:
        wrong: the damage, or that its rank divided another state; empty: every byte is right.
        unchecked: why the copy could not be checked: a newer format, another key, a disk that reads other bytes each
            time; empty: it was checked.
        pruned: whether the copy was deleted while it was read. Then nothing is wrong.
    """

    place: str
    run: str
    step: int
    attempt: str
    rank: int
    size: int
    wrong: tuple[str, ...]
    unchecked: str = ""
    pruned: bool = False


def verify(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    run: RunOption = None,
    step: StepOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Re-read every byte of every copy and compare digests. Changes nothing. Exit code 5 when something is corrupt."""
    where = resolve_places(spool, url, config, key_file=key_file, run_option=True)
    checks, damaged, unreached, steps = asyncio.run(_verify(where, run, step))
    if json:
        print_json({"checks": checks, "unreached": unreached})
    elif checks:
        _print_checks(checks)
    if any(check.wrong for check in checks):
        complain(
            "what differs was not changed: the daemon repairs it from another place when its scrub reads it, within "
            "`scrub` (default 30d); to have that done now: docs/howto/recovery.md"
            if damaged
            else "nothing can repair what ranks divided differently: save again without that entry in `replicated`"
        )
        raise typer.Exit(5)
    if unreached or any(check.unchecked for check in checks):
        raise typer.Exit(6)
    if not checks:
        with naming_known_runs(where, run):
            raise checkpoint_not_found(run, step, steps)


def _print_checks(checks: Sequence[CopyCheck]) -> None:
    """Print a line for each part; on a terminal one for all ranks of which the same is true, run by run."""
    if terminal_width() is None:
        columns = ("WHERE", "RUN", "STEP", "ATTEMPT", "RANK", "BYTES", "BYTES ARE")
        parts = [(c.place, c.run, str(c.step), c.attempt, str(c.rank), format_size(c.size)) for c in checks]
        rows = [(*part, _describe_check(check)) for part, check in zip(parts, checks, strict=True)]
        print_answer(Table(columns, rows))
        return
    for run, of_run in runs_in(sorted(checks, key=lambda check: check.run), lambda check: check.run):
        names = shown_attempts(check.attempt for check in of_run)
        alike: dict[tuple[int, str, str, str], list[CopyCheck]] = {}
        for check in of_run:
            state = "corrupt" if check.wrong else "not checked" if check.unchecked else _describe_check(check)
            alike.setdefault((check.step, check.attempt, check.place, state), []).append(check)
        lines = []
        for (step, attempt, place, state), of_ranks in alike.items():
            ranks = format_ranges(sorted(check.rank for check in of_ranks))
            size = format_size(sum(check.size for check in of_ranks))
            lines.append((str(step), names[attempt], place, ranks, size, state))
        print_answer(Table(("STEP", "ATTEMPT", "WHERE", "RANKS", "BYTES", "BYTES ARE"), lines, title=run))
    problems = [check for check in checks if check.wrong or check.unchecked]
    for check in problems:
        print_answer(f"{check.place}, run {check.run}, step {check.step}, rank {check.rank}: {_describe_check(check)}")
    if not problems:
        print_answer(f"every byte is right: {len(checks)} parts, {format_size(sum(check.size for check in checks))}")


def _describe_check(check: CopyCheck) -> str:
    if check.pruned:
        return "pruned meanwhile"
    return f"not checked: {check.unchecked}" if check.unchecked else "; ".join(check.wrong) or "right"


def choose_checkpoint(inventory: Inventory, run: str, step: int, attempt: str | None) -> CheckpointId:
    """Return the checkpoint of a step that a person named; raises `CheckpointNotFound`."""
    resume = restore_candidates(inventory, run, step, attempt)
    if resume.candidates:
        return resume.candidates[0].checkpoint
    all_checkpoints = {
        checkpoint
        for place in inventory.places.values()
        for checkpoint in (*place.checkpoints, *(part.checkpoint for part in place.quarantined))
    }
    matching = [c for c in all_checkpoints if (c.run, c.step) == (run, step) and attempt in (None, c.attempt)]
    if not matching and resume.unreached:
        raise StoreUnavailable(f"run {run!r} step {step}: not seen, and {', '.join(resume.unreached)} did not answer")
    if not matching:
        raise not_found_error(resume, run, step, [])
    return max(matching)


def _report(where: Places, run: str | None) -> tuple[Report, bool]:
    """Return the report of `ls`, and whether a daemon runs that did not report its places."""
    unanswered = False
    if where.spool is not None and not where.config:
        try:
            with DaemonConnection(where.spool) as link:  # the daemon knows the tiers and their retention
                return message_codec.read_member(link.ask(messages.ReportRequest(run=run)), "report", Report), False
        except VersionMismatch as error:
            complain(f"{error}. Without it, only the spool is shown")
        except DaemonAbsent:
            pass
        except DaemonUnavailable as error:
            complain(f"{error}. Without it, only the spool is shown")
            unanswered = True
    with collector_paused():
        return make_report(observe_inventory(where, run), where.config, run, defaults=where.has_policy), unanswered


def observe_inventory(where: Places, run: str | None) -> Inventory:
    """Observe all places for one run, or for all."""
    inventories: list[Inventory] = []

    async def observe() -> None:
        mark_foreground()  # a person waits
        async with AsyncExitStack() as stack:
            inventories.append(await observe_places(where.spool, await _stores(where, stack), run, chunks=False))

    asyncio.run(observe())  # the task has no result, because `asyncio.run` makes the text of all of it as it ends
    return inventories[0]


async def _with_notes(where: Places, checkpoints: list[Checkpoint]) -> tuple[Checkpoint, ...]:
    if not any(checkpoint.pinned for checkpoint in checkpoints):
        return tuple(checkpoints)
    async with AsyncExitStack() as stack:
        return tuple(await with_notes(where.spool, (await _stores(where, stack)).values(), checkpoints))


async def _stores(where: Places, stack: AsyncExitStack) -> dict[str, Store]:
    return await open_tiers(where.config, stack) if where.config else {}


async def _read_manifests(
    where: Places, inventory: Inventory, checkpoint: CheckpointId
) -> tuple[list[Manifest], set[PartId]]:
    """Return each rank's manifest, from the first place with a readable one. A tier's says how chunks are stored.

    Also return the parts that were observed, and that no place has any more.
    """
    manifests: dict[PartId, Manifest] = {}
    absent: dict[PartId, bool] = {}
    async with AsyncExitStack() as stack:
        stores = await _stores(where, stack)
        for name in (*stores, SPOOL):
            place = inventory.places.get(name)
            copies = place.checkpoints.get(checkpoint) if place else None
            for part in copies.parts() if copies else ():
                is_absent = False
                try:
                    manifests[part] = manifests.get(part) or await _read_manifest(where.spool, stores, name, part)
                except ObjectNotFound:
                    is_absent = True
                except TierdError:
                    pass
                absent[part] = is_absent and absent.get(part, True)
    return [manifests[part] for part in sorted(manifests)], {part for part, vanished in absent.items() if vanished}


async def _read_manifest(spool: Spool | None, stores: dict[str, Store], name: str, part: PartId) -> Manifest:
    if name == SPOOL:
        assert spool is not None
        return spool.manifest(part)
    return await read_manifest(stores[name], part)


async def _verify(
    where: Places, run: str | None, step: int | None
) -> tuple[list[CopyCheck], bool, list[str], set[int]]:
    """Verify all copies; also return whether bytes are wrong, the tiers that did not answer, and the steps there."""
    checks: list[CopyCheck] = []
    divisions: dict[tuple[str, CheckpointId], dict[PartId, str]] = defaultdict(dict)
    async with AsyncExitStack() as stack:
        stores = await _stores(where, stack)
        inventory = await observe_places(where.spool, stores, run)
        work = [
            (name, part, facts.stored_size or facts.size if facts else 0)
            for name, place in inventory.places.items()
            for checkpoint, copies in sorted(place.checkpoints.items(), reverse=True)
            if run in (None, checkpoint.run) and step in (None, checkpoint.step)
            for part in sorted(copies.parts(), reverse=True)
            for facts in [copies.facts.get(part)]
        ]
        with show_progress("verifying") as meter:
            meter.update(0, sum(todo for *_, todo in work))
            for (name, checkpoint), copy in itertools.groupby(work, key=lambda item: (item[0], item[1].checkpoint)):
                defects: ObjectDefects = {}
                division = divisions[name, checkpoint]
                for _, part, _ in copy:
                    checks.append(await _check(where.spool, stores, name, part, meter.advance, defects, division))
    damaged = any(check.wrong for check in checks)
    mismatched = {
        (name, part): str(division_mismatch(part, other))
        for (name, _), division in divisions.items()
        for part, other in differing_divisions(division).items()
    }
    checks = [
        replace(check, wrong=(*check.wrong, why)) if (why := mismatched.get((name, part))) else check
        for check, (name, part, _) in zip(checks, work, strict=True)
    ]
    all_checkpoints = {checkpoint for place in inventory.places.values() for checkpoint in place.checkpoints}
    steps = {checkpoint.step for checkpoint in all_checkpoints if run in (None, checkpoint.run)}
    return checks, damaged, [name for name, place in inventory.tiers.items() if place is None], steps


async def _check(
    spool: Spool | None,
    stores: dict[str, Store],
    name: str,
    part: PartId,
    read: Any,
    defects: ObjectDefects,
    divisions: dict[PartId, str],
) -> CopyCheck:
    manifest: Manifest | None = None
    unchecked, pruned = "", False
    try:
        if name == SPOOL:
            assert spool is not None
            manifest = spool.manifest(part)
            failures = [
                failure for file in manifest.files for *_, failure in bad_chunks(spool.path(part) / file.path, file)
            ]
            wrong = [str(error) for error in failures if not isinstance(error, UnstableRead)]
            unchecked = next((str(error) for error in failures if isinstance(error, UnstableRead)), "")
            read(manifest.size)
        else:
            manifest, wrong = await verify_on_tier(stores[name], part, read, defects)
    except (ManifestError, ObjectNotFound) as error:
        wrong = [str(error)]
    except (FormatTooNew, UnstableRead) as error:  # a newer tierd, or one with the key or another disk, can check it
        wrong, unchecked = [], str(error)
    if wrong and await _is_pruned(spool, stores, name, part):
        wrong, unchecked, pruned = [], "", True
    checkpoint = part.checkpoint
    total = 0
    if manifest is not None:
        total, divisions[part] = manifest.size, manifest.division
    return CopyCheck(
        name, checkpoint.run, checkpoint.step, checkpoint.attempt, part.rank, total, tuple(wrong), unchecked, pruned
    )


async def _is_pruned(spool: Spool | None, stores: dict[str, Store], name: str, part: PartId) -> bool:
    """Whether a copy has been deleted, which explains bytes that are missing. A prune deletes the manifest first.

    A copy that was quarantined meanwhile is not pruned, because it is proven corrupt.
    """
    if name == SPOOL:
        assert spool is not None
        try:
            spool.check_mounted()
            return part not in {*spool.parts(), *spool.quarantined()}
        except OSError:
            return False
    try:
        await manifest_bytes(stores[name], part)
        return False
    except ObjectNotFound:
        return not [info async for info in stores[name].scan(part.quarantine_key)]
