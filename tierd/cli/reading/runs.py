"""The command `runs`: one line for each run of whole tiers, for a person who watches over many."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import typer

from tierd.cli.options import ConfigOption, JsonOption, KeyFileOption, Places, SpoolOption, UrlArgument, places
from tierd.cli.tables import complain, print_json, print_table, size, table
from tierd.cli.units import span
from tierd.core.errors import ConfigError, StoreRefused, StoreUnavailable
from tierd.core.ids import CheckpointId
from tierd.daemon.opening import open_tiers
from tierd.daemon.tiers.overview import RunOverview, Seen, observe, overview
from tierd.priority import hasten
from tierd.spool.conditions import translated
from tierd.spool.spool import Spool

_COLUMNS = ("RUN", "TIER", "STEP", "AGE", "LAG", "MISSING RANKS", "SIZE")
_MOST_RANGES = 4


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(runs)


@dataclass(frozen=True, slots=True)
class Overviews:
    """What `runs` found, by run and tier.

    Attributes:
        runs: one for each run and tier.
        unreached: tiers that did not answer.
    """

    runs: tuple[RunOverview, ...]
    unreached: tuple[str, ...]


def runs(
    url: UrlArgument = None,
    spool: SpoolOption = None,
    config: ConfigOption = None,
    key_file: KeyFileOption = None,
    json: JsonOption = False,
) -> None:
    """Every run of whole tiers: its newest verified step, how old it is, how far newer ones are ahead, and its size."""
    where = places(spool, url, config, key_file=key_file)
    if where.config is None:
        raise ConfigError("runs lists tiers: name their URLs, or give --config FILE; --spool DIR only adds its steps")
    found = asyncio.run(_observe(where))
    if json:
        print_json(found)
    else:
        print_table(table(None, _COLUMNS, [_row(one) for one in found.runs]))
    for name in found.unreached:
        complain(f"{name} did not answer")
    if found.unreached:
        raise typer.Exit(6)


async def _observe(where: Places) -> Overviews:
    assert where.config is not None
    hasten()  # a person waits
    tiers: dict[str, dict[str, Seen]] = {}
    unreached: list[str] = []
    async with AsyncExitStack() as stack:
        for name, store in (await open_tiers(where.config, stack)).items():
            try:
                tiers[name] = await observe(store)
            except (StoreUnavailable, StoreRefused) as error:
                complain(f"{name}: {error}")
                unreached.append(name)
    local = [one for run in _local(where.spool) for one in run]
    return Overviews(overview(tiers, local, datetime.now(UTC)), tuple(unreached))


def _local(spool: Spool | None) -> Iterator[list[CheckpointId]]:
    if spool is not None:
        with translated(f"spool {spool.root}", spool.root):
            yield from (spool.newest(run, 1) for run in spool.runs())


def _row(one: RunOverview) -> list[str]:
    more = ">= " if one.read < one.world_size else ""  # not every rank's manifest was read
    return [
        one.run,
        one.tier,
        "none" if one.step is None else str(one.step),
        "" if one.age_s is None else span(max(0.0, one.age_s)),
        f"newest {one.newest_step}" if one.lag_steps is None else str(one.lag_steps),
        f"{len(one.missing_ranks)} of {one.world_size}: {_ranges(one.missing_ranks)}" if one.missing_ranks else "",
        f"{more}{size(one.size)}" if one.read else "",
    ]


def _ranges(ranks: Iterable[int]) -> str:
    """Write sorted ranks as ranges, `0-3, 7`; only the first few."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in found[:_MOST_RANGES]]
    return ", ".join(shown) + (", ..." if len(found) > _MOST_RANGES else "")
