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
from tierd.daemon.tiers.overview import RunOnTier, RunOverview, observe, overview
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
    overviews = asyncio.run(_observe(where))
    if json:
        print_json(overviews)
    else:
        print_table(table(None, _COLUMNS, [_row(run) for run in overviews.runs]))
    for name in overviews.unreached:
        complain(f"{name} did not answer")
    if overviews.unreached:
        raise typer.Exit(6)


async def _observe(where: Places) -> Overviews:
    assert where.config is not None
    hasten()  # a person waits
    tiers: dict[str, dict[str, RunOnTier]] = {}
    unreached: list[str] = []
    async with AsyncExitStack() as stack:
        for name, store in (await open_tiers(where.config, stack)).items():
            try:
                tiers[name] = await observe(store)
            except (StoreUnavailable, StoreRefused) as error:
                complain(f"{name}: {error}")
                unreached.append(name)
    local = [checkpoint for run in _newest_local(where.spool) for checkpoint in run]
    return Overviews(overview(tiers, local, datetime.now(UTC)), tuple(unreached))


def _newest_local(spool: Spool | None) -> Iterator[list[CheckpointId]]:
    if spool is not None:
        with translated(f"spool {spool.root}", spool.root):
            yield from (spool.newest(run, 1) for run in spool.runs())


def _row(run: RunOverview) -> list[str]:
    bound_mark = ">= " if run.read < run.world_size else ""  # not every rank's manifest was read
    return [
        run.run,
        run.tier,
        "none" if run.step is None else str(run.step),
        "" if run.age_s is None else span(max(0.0, run.age_s)),
        f"newest {run.newest_step}" if run.lag_steps is None else str(run.lag_steps),
        f"{len(run.missing_ranks)} of {run.world_size}: {_format_ranges(run.missing_ranks)}"
        if run.missing_ranks
        else "",
        f"{bound_mark}{size(run.size)}" if run.read else "",
    ]


def _format_ranges(ranks: Iterable[int]) -> str:
    """Write sorted ranks as ranges, `0-3, 7`; only the first few."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MOST_RANGES]]
    return ", ".join(texts) + (", ..." if len(ranges) > _MOST_RANGES else "")
