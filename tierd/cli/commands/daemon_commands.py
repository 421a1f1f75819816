"""The daemon's own command, `run`; pin and unpin; and `config check`, which writes a probe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import structs

from tierd.cli.command_runtime import EXIT_NOTHING_TAKEN, EXIT_UNFINISHED
from tierd.cli.commands.checkpoint_commands import choose_checkpoint
from tierd.cli.missing_runs import checkpoint_not_found, naming_known_runs
from tierd.cli.options import (
    AttemptOption,
    ConfigOption,
    JsonOption,
    KeyFileOption,
    Places,
    RunArgument,
    SpoolOption,
    StepArgument,
    ToOption,
    UrlArgument,
    load_config,
    resolve_places,
)
from tierd.cli.output import complain, console, print_json
from tierd.core.config import Config, from_urls, without_addresses
from tierd.core.errors import ConfigError, DaemonUnavailable, printable_json
from tierd.core.event_kinds import Event
from tierd.core.ids import CheckpointId
from tierd.core.retention.policy import RetentionPolicy
from tierd.core.timeline.restore_order import restore_order
from tierd.core.timeline.run_view import RunView
from tierd.core.urls import parse_url
from tierd.daemon.daemon_service import open_all, serve
from tierd.daemon.intake.active_watch import NothingTaken
from tierd.daemon.tiers import intents
from tierd.daemon.tiers.tier_identity import check_identities
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.tiers.tier_probes import TierAccess
from tierd.daemon.tiers.tier_probes import probe_access as try_out
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.message_codec import read_member
from tierd.logs import LogFormat
from tierd.logs import use_format as use_format
from tierd.spool.spool import Spool
from tierd.stores.encryption_keys import read_key
from tierd.stores.open import open_tiers


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (run, pin, unpin):
        app.command()(command)
    config = typer.Typer(help="The configuration file.", no_args_is_help=True)
    config.callback()(lambda: None)
    config.command("check")(config_check)
    app.add_typer(config, name="config")


def run(
    spool: SpoolOption = None,
    to: ToOption = None,
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
    on_event = print_event if json else None
    reread = (lambda: _load_config(config, keep_last)) if config is not None else None
    run_daemon(serve(where, until_idle=until_idle, await_trainer=await_trainer, reread=reread, on_event=on_event))


def run_daemon(serving: Coroutine[Any, Any, Sequence[object]]) -> None:
    """Run `serve` to its end, and exit with a code of its own if it left something or never took anything."""
    try:
        unfinished = asyncio.run(serving)
    except NothingTaken as error:
        complain(error)
        raise typer.Exit(EXIT_NOTHING_TAKEN) from None
    if unfinished:
        raise typer.Exit(EXIT_UNFINISHED)  # the log says what is left


def print_event(event: Event) -> None:
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
        return _load_config(config, keep_last)
    if spool is None:
        raise ConfigError("no spool: give --spool DIR, or --config FILE")
    if not to:
        raise ConfigError("no tier: name at least one with --to URL, or give --config FILE")
    key = str(key_file.absolute()) if key_file else None
    retention = RetentionPolicy(keep_last=keep_last) if keep_last else None
    return from_urls(str(spool.absolute()), to, retention, key)


def _load_config(path: Path, keep_last: int | None) -> Config:
    """Load a configuration. `--keep-last` is the policy of each place, so no place may have another."""
    config = load_config(path)
    if keep_last is None:
        return config
    own_policies = [f"tier {tier.name}" for tier in config.tier if tier.retention is not None]
    if config.retention is not None or own_policies:
        raise ConfigError(
            f"{path}: it says itself what is kept ({', '.join(own_policies) or '[retention]'}); leave --keep-last out, "
            "or remove that"
        )
    policy = RetentionPolicy(keep_last=keep_last)
    tiers = tuple(structs.replace(tier, retention=policy) for tier in config.tier)
    return structs.replace(config, retention=policy, tier=tiers)


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
    _set_pin(resolve_places(spool, url, config), run, step, attempt, pinned=True, json=json)


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
    _set_pin(resolve_places(spool, url, config), run, step, attempt, pinned=False, json=json)


def _set_pin(where: Places, run: str, step: int, attempt: str | None, *, pinned: bool, json: bool) -> None:
    with naming_known_runs(where, run):
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
        link = DaemonConnection(where.spool)
    except DaemonUnavailable:
        raise DaemonUnavailable(
            f"no daemon holds spool {where.spool.root}, and it alone is not every place: name the tiers' URLs too"
        ) from None
    with link:
        view = read_member(link.ask(messages.CandidatesRequest(run=run)), "sight", RunView)
        order = restore_order([view], run, step, attempt)
        candidates = order.candidates
        if not candidates:
            raise checkpoint_not_found(run, step, [candidate.step for candidate in order.complete], attempt)
        checkpoint = candidates[0].checkpoint
        link.ask(messages.Pin(checkpoint=checkpoint, pinned=pinned))
        return checkpoint


async def _pin_directly(where: Places, run: str, step: int, attempt: str | None, *, pinned: bool) -> CheckpointId:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        inventory = await observe_places(where.spool, stores, run)
        checkpoint = choose_checkpoint(inventory, run, step, attempt)
        await (intents.pin if pinned else intents.unpin)(where.spool, stores.values(), checkpoint)
        return checkpoint


def config_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tierd.toml.")],
    reach: Annotated[
        bool, typer.Option("--reach", help="Also try whether every tier answers, and what it allows.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a configuration file as `run` does; exit code 3 when it cannot be used, 6 when a tier does not answer
    or takes nothing, or a watched directory does not exist."""
    config = load_config(file)
    Spool(Path(config.spool), write=False)
    reached = asyncio.run(_reach_tiers(config, reach=reach))
    answers = {name: "answers" if tier_reach.mode else tier_reach.why for name, tier_reach in reached.items()}
    keys = {tier.name: read_key(Path(tier.key_file)) for tier in config.tier if tier.key_file}
    if json:
        print_json({"config": without_addresses(config), "reach": answers, "modes": reached})
    else:
        out = console()
        out.print(f"{file}: spool {config.spool}, rescan {config.rescan}, drain {config.drain}")
        for tier in config.tier:
            key = f"encrypted with key {keys[tier.name].id}  " if tier.name in keys else ""
            out.print(f"  {tier.name}  {parse_url(tier.url)}  {key}{_describe_reach(reached.get(tier.name))}")
        for index, watch in enumerate(config.watch):
            where = Path(watch.directory)
            note = "" if where.is_dir() else "  not a directory" if where.exists() else "  does not exist yet"
            out.print(f"  watch[{index}]  {watch.directory} as run {watch.run}{note}")
        for index, receiver in enumerate(without_addresses(config).notify):
            out.print(f"  notify[{index}]  {receiver.url or (receiver.command or ('',))[0]}")
    absent = [watch.directory for watch in config.watch if not Path(watch.directory).is_dir()]
    if absent or any(tier_reach.mode in (None, "read-only") for tier_reach in reached.values()):
        raise typer.Exit(6)


def _describe_reach(reached: TierAccess | None) -> str:
    if reached is None or reached.mode is None:
        return reached.why if reached else ""
    return f"answers; {reached.mode}{f': {reached.why}' if reached.why else ''}"


async def _reach_tiers(config: Config, *, reach: bool) -> dict[str, TierAccess]:
    """Open all places of a configuration, as a starting daemon does; with `reach`, return what each tier permits."""
    async with AsyncExitStack() as stack:
        stores, _ = await open_all(config, stack, trial=True)
        if reach:
            await check_identities(config.urls(), stores, keep=False)
        return {name: await try_out(store) for name, store in stores.items()} if reach else {}
