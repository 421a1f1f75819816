"""The configuration file: `config check`, which writes a probe, and `config show`, the places that commands mean."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.options import JsonOption
from tierd.cli.output import print_answer, print_json
from tierd.cli.places import DEFAULTS, default_config_file, default_places, default_sources, load_config
from tierd.cli.tables import Table
from tierd.core.config import Config, without_addresses
from tierd.core.errors import ConfigError
from tierd.core.urls import parse_url
from tierd.daemon.daemon_service import open_all
from tierd.daemon.tiers.tier_identity import check_identities
from tierd.daemon.tiers.tier_probes import TierAccess
from tierd.daemon.tiers.tier_probes import probe_access as try_out
from tierd.spool.spool import Spool
from tierd.stores.encryption_keys import read_key


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    config = typer.Typer(help="Check a configuration file, or show which one commands use.", no_args_is_help=True)
    config.callback()(lambda: None)
    config.command("check")(config_check)
    config.command("show")(config_show)
    app.add_typer(config, name="config")


def config_show(json: JsonOption = False) -> None:
    """Show the places that commands use by default, and their sources."""
    sources = tuple(default_sources())
    _, file = default_places()
    config = None if file is None else without_addresses(load_config(file))
    if json:
        print_json({"sources": sources, "config": config})
        return
    rows = [(source.name, "yes" * source.used, source.value or "-") for source in sources]
    print_answer(Table(("SOURCE", "USED", "VALUE"), rows))
    if config is not None:
        tiers = [(tier.name, tier.url, tier.key_file or "-") for tier in config.tier]
        print_answer("")
        print_answer(Table(("TIER", "URL", "KEY FILE"), tiers))


def config_check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A tierd.toml; not given: the one that `tierd config show` names."),
    ] = None,
    reach: Annotated[
        bool, typer.Option("--reach", help="Also try whether every tier answers, and what it allows.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a configuration file as `run` does. Exit code 3: it cannot be used; 6: a tier does not answer or takes
    nothing, or a watched directory does not exist."""
    file = file or default_config_file()
    if file is None:
        raise ConfigError(f"no configuration to check: give FILE, or {DEFAULTS}")
    config = load_config(file)
    Spool(Path(config.spool), write=False)
    reached = asyncio.run(_reach_tiers(config, reach=reach))
    answers = {name: "answers" if tier_reach.mode else tier_reach.why for name, tier_reach in reached.items()}
    keys = {tier.name: read_key(Path(tier.key_file)) for tier in config.tier if tier.key_file}
    if json:
        print_json({"config": without_addresses(config), "reach": answers, "modes": reached})
    else:
        print_answer(f"{file}: in order; spool {config.spool}, rescan {config.rescan}, drain {config.drain}")
        for tier in config.tier:
            key = f"encrypted with key {keys[tier.name].id}  " if tier.name in keys else ""
            text = f"  {tier.name}  {parse_url(tier.url)}  {key}{_describe_reach(reached.get(tier.name))}"
            print_answer(text.rstrip())
        for index, watch in enumerate(config.watch):
            where = Path(watch.directory)
            note = "" if where.is_dir() else "  not a directory" if where.exists() else "  does not exist yet"
            print_answer(f"  watch[{index}]  {watch.directory} as run {watch.run}{note}")
        for index, receiver in enumerate(without_addresses(config).notify):
            print_answer(f"  notify[{index}]  {receiver.url or (receiver.command or ('',))[0]}")
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
