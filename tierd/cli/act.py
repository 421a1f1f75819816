"""Commands that change something: run, prune, pin, unpin; and `config check`, which writes a probe."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli.ending import EXIT_UNFINISHED
from tierd.cli.known import answering
from tierd.cli.options import (
    AttemptOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    Places,
    RunArgument,
    RunOption,
    SpoolOption,
    StepArgument,
    UrlArgument,
    load_config,
    places,
)
from tierd.cli.read import choose
from tierd.cli.tables import console, print_json, table
from tierd.core.config import Config, from_urls, without_addresses
from tierd.core.errors import ConfigError, DaemonUnavailable, StoreUnavailable
from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId, pin_key, pruning_prefix
from tierd.core.planning.demand import Demand
from tierd.core.planning.inventory import Inventory, runs
from tierd.core.planning.pruning import MOST_CHECKPOINTS
from tierd.core.planning.verdicts import judge
from tierd.core.printable import printable_json
from tierd.core.retention.policies import known_policy, unknown
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.candidates import agree
from tierd.core.timeline.run_view import RunView
from tierd.core.urls import parse_url
from tierd.daemon.service import open_all, open_tiers, serve
from tierd.daemon.tiers.manifests import Manifests
from tierd.daemon.tiers.observe import look_around
from tierd.daemon.tiers.prune import prune as prune_tier
from tierd.daemon.tiers.reach import Reach
from tierd.daemon.tiers.reach import reach as try_out
from tierd.ipc import messages
from tierd.ipc.client import Link
from tierd.ipc.messages import read_member
from tierd.logs import LogFormat
from tierd.logs import use as use_format
from tierd.spool.spool import Spool
from tierd.stores.deletions import DeletionGuard
from tierd.stores.keys import read_key


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (run, prune, pin, unpin):
        app.command()(command)
    config = typer.Typer(help="The configuration file.", no_args_is_help=True)
    config.callback()(lambda: None)
    config.command("check")(config_check)
    app.add_typer(config, name="config")


def run(
    spool: SpoolOption = None,
    to: Annotated[
        list[str] | None, typer.Option("--to", metavar="URL", help="A tier; again for more, in order.")
    ] = None,
    config: ConfigOption = None,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Checkpoints to keep in each place; not given: each run's own policy."),
    ] = None,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="End when no trainer is attached and everything is flushed.")
    ] = False,
    await_trainer: Annotated[
        bool, typer.Option("--await-trainer", help="With --until-idle: give a first trainer 120 s to attach.")
    ] = False,
    key_file: KeyFileOption = None,
    log_format: Annotated[
        LogFormat,
        typer.Option("--log-format", metavar="text|json", help="The lines of the log on the standard error."),
    ] = "text",
    json: JsonOption = False,
) -> None:
    """Run the daemon: flush, verify, retain; until SIGTERM. With --json, each event is a line on stdout."""
    use_format(log_format)
    where = _daemon_config(spool, to, config, keep_last, key_file)
    told = tell if json else None
    reread = (lambda: load_config(config)) if config is not None else None
    if asyncio.run(serve(where, until_idle=until_idle, await_trainer=await_trainer, reread=reread, told=told)):
        raise typer.Exit(EXIT_UNFINISHED)  # the log says what is left


def tell(event: Event) -> None:
    """Print an event as a line of JSON."""
    sys.stdout.write(printable_json(msgspec.json.encode(event).decode()) + "\n")
    sys.stdout.flush()


def _daemon_config(
    spool: Path | None, to: list[str] | None, config: Path | None, keep_last: int | None, key_file: Path | None
) -> Config:
    if config is not None:
        if spool or to or key_file:
            raise ConfigError(
                "--config names the spool, the tiers and their keys itself; leave --spool, --to and --key-file out"
            )
        return load_config(config)
    if spool is None:
        raise ConfigError("no spool: give --spool DIR, or --config FILE")
    if not to:
        raise ConfigError("no tier: name at least one with --to URL, or give --config FILE")
    key = str(key_file.absolute()) if key_file else None
    retention = RetentionPolicy(keep_last=keep_last) if keep_last else None
    return from_urls(str(spool.absolute()), to, retention, key)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of retention on one checkpoint on one tier.

    Attributes:
        keep: whether a rule keeps it.
        reasons: the rules that keep it, or why nothing does.
        pruned: whether it was deleted.
        held: why it was not deleted although no rule keeps it, and until when; empty: nothing holds it.
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
        return
    rows = [
        (
            one.tier,
            one.run,
            str(one.step),
            one.attempt,
            one.done,
            "; ".join([*one.reasons, *([one.held] if one.held else [])]),
        )
        for one in judged
    ]
    console().print(table(None, ("TIER", "RUN", "STEP", "ATTEMPT", "VERDICT", "BECAUSE"), rows))


async def _prune(where: Places, run: str | None, *, dry_run: bool) -> list[Judged]:
    assert where.config is not None
    judged: list[Judged] = []
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack)
        inventory = await look_around(where.spool, stores, run)
        if where.policy:  # a person's policy replaces the runs' own
            answered = {name: place and replace(place, policies={}) for name, place in inventory.tiers.items()}
            inventory = replace(inventory, tiers=answered)
        asked = [one for one in runs(inventory) if run in (None, one)]
        _check_policies(inventory, where, asked)
        for name, place in inventory.tiers.items():
            if place is None:
                raise StoreUnavailable(f"{name} did not answer; nothing more was pruned")
            known, guard = Manifests(stores[name]), DeletionGuard(stores[name])
            for one in asked:
                verdicts = judge(Demand(inventory, where.config, one), name)
                going = [verdict.id for verdict in verdicts if not verdict.keep and not dry_run]
                gone, held = set[CheckpointId](), dict[CheckpointId, str]()
                if going:  # a mark that cannot be deleted would delay flushes
                    await guard.check(f"{pruning_prefix(one)}none")
                while going:
                    some, going = going[:MOST_CHECKPOINTS], going[MOST_CHECKPOINTS:]
                    done = await prune_tier(stores[name], some, known=known, seen=place)
                    gone |= done.gone
                    held |= dict.fromkeys(set(some) - done.gone, "nothing of it is left but what others name")
                    held |= done.held
                for verdict in verdicts:
                    found, went = verdict.id, verdict.id in gone
                    why = held.get(found, "")
                    judged.append(
                        Judged(name, found.run, found.step, found.attempt, verdict.keep, verdict.reasons, went, why)
                    )
    return judged


def _check_policies(inventory: Inventory, where: Places, asked: list[str]) -> None:
    """Raise `ConfigError` if a run has no policy on a tier, or one that cannot be read, before anything is deleted."""
    assert where.config is not None
    for name, place in inventory.tiers.items():
        if place is None or where.policy:
            continue
        for run in asked:
            if why := unknown(place, run):
                raise ConfigError(f"{name}: what run {run!r} keeps is not known: {why}; give --keep-last N")
            others = {other for one in place.policies.get(run, ()) for other in one.tiers}
            if len(others) > len(where.config.tier):
                raise ConfigError(
                    f"{name}: run {run!r} is kept on {', '.join(sorted(others))}, and what a tier that is not named "
                    "here still wants from this one is not known; name every tier, give --config FILE, or decide "
                    "yourself by --keep-last N"
                )
            if known_policy(inventory, where.config, run, name) is None and any(place.copies(run)):
                raise ConfigError(
                    f"{name}: nobody said what run {run!r} keeps there; give --keep-last N, or --config FILE"
                )


def pin(
    run: RunArgument,
    step: StepArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    """Make retention leave a checkpoint alone, in the spool and on every tier."""
    _set_pin(places(spool, url, config), run, step, attempt, pinned=True, json=json)


def unpin(
    run: RunArgument,
    step: StepArgument,
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    """Give a checkpoint back to retention."""
    _set_pin(places(spool, url, config), run, step, attempt, pinned=False, json=json)


def _set_pin(where: Places, run: str, step: int, attempt: str | None, *, pinned: bool, json: bool) -> None:
    with answering(where, run):
        checkpoint = _pin_by_daemon(where, run, step, attempt, pinned=pinned)
        if checkpoint is None:
            checkpoint = asyncio.run(_pin_directly(where, run, step, attempt, pinned=pinned))
    if json:
        print_json({"run": run, "step": step, "attempt": checkpoint.attempt, "pinned": pinned})
    else:
        console().print(f"{'pinned' if pinned else 'unpinned'} {checkpoint}")


def _pin_by_daemon(where: Places, run: str, step: int, attempt: str | None, *, pinned: bool) -> CheckpointId | None:
    if where.spool is None or where.config is not None:
        return None
    try:
        link = Link(where.spool)
    except DaemonUnavailable:
        raise DaemonUnavailable(
            f"no daemon holds spool {where.spool.root}, and it alone is not every place: name the tiers' URLs too"
        ) from None
    with link:
        found = agree(
            [read_member(link.ask(messages.Candidates(run=run)), "sight", RunView)], run, step, attempt
        ).candidates
        if not found:
            raise ConfigError(f"run {run!r} has no complete checkpoint of step {step}")
        checkpoint = found[0].checkpoint
        link.ask(messages.Pin(checkpoint=checkpoint, pinned=pinned))
        return checkpoint


async def _pin_directly(where: Places, run: str, step: int, attempt: str | None, *, pinned: bool) -> CheckpointId:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        inventory = await look_around(where.spool, stores, run)
        checkpoint = choose(inventory, run, step, attempt)
        if where.spool:
            where.spool.pin(checkpoint, pinned=pinned)
        for store in stores.values():
            await (store.put(pin_key(checkpoint), b"") if pinned else store.delete([pin_key(checkpoint)]))
        return checkpoint


def config_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tierd.toml.")],
    reach: Annotated[
        bool, typer.Option("--reach", help="Also try whether every tier answers, and what it allows.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a configuration file as `run` does; exit code 3 when it cannot be used, 6 when a tier does not answer,
    or takes nothing."""
    found = load_config(file)
    Spool(Path(found.spool), write=False)
    reached = asyncio.run(_opened(found, reach=reach))
    answers = {name: "answers" if one.mode else one.why for name, one in reached.items()}
    keys = {tier.name: read_key(Path(tier.key_file)) for tier in found.tier if tier.key_file}
    if json:
        print_json({"config": without_addresses(found), "reach": answers, "modes": reached})
    else:
        out = console()
        out.print(f"{file}: spool {found.spool}, rescan {found.rescan}, drain {found.drain}")
        for tier in found.tier:
            key = f"encrypted with key {keys[tier.name].id}  " if tier.name in keys else ""
            out.print(f"  {tier.name}  {parse_url(tier.url)}  {key}{_describe_reach(reached.get(tier.name))}")
        for index, watch in enumerate(found.watch):
            out.print(f"  watch[{index}]  {watch.directory} as run {watch.run}")
        for index, receiver in enumerate(without_addresses(found).notify):
            out.print(f"  notify[{index}]  {receiver.url or (receiver.command or ('',))[0]}")
    if any(one.mode in (None, "read-only") for one in reached.values()):
        raise typer.Exit(6)


def _describe_reach(reached: Reach | None) -> str:
    if reached is None or reached.mode is None:
        return reached.why if reached else ""
    return f"answers; {reached.mode}{f': {reached.why}' if reached.why else ''}"


async def _opened(config: Config, *, reach: bool) -> dict[str, Reach]:
    """Open all places of a configuration, as a starting daemon does; with `reach`, return what each tier permits."""
    async with AsyncExitStack() as stack:
        stores, _ = await open_all(config, stack)
        return {name: await try_out(store) for name, store in stores.items()} if reach else {}
