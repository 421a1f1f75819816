"""What places hold, for the answer to a command that names a run that none of them has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

from tierd.cli.options import Places
from tierd.cli.tables import complain
from tierd.core.errors import CheckpointNotFound, TierdError
from tierd.core.timeline.alternatives import runs_there
from tierd.daemon.service import open_tiers
from tierd.daemon.tiers.observe import TierObserver
from tierd.ipc import messages
from tierd.ipc.client import Link


@contextmanager
def answering(where: Places, run: str | None) -> Iterator[None]:
    """If a run is not found because no place has it, let the error name the runs that there are."""
    try:
        yield
    except CheckpointNotFound as error:
        if run is None or (more := unknown(where, run)) is None:
            raise
        raise CheckpointNotFound(f"{error}\n  {more}") from None


def unknown(where: Places, run: str) -> str | None:
    """Return the runs that places hold, as a message has them; None if `run` is one of them, or a place is silent."""
    try:
        there = asyncio.run(_runs(where))
    except (TierdError, OSError):
        return None  # the first error is the one to be told
    return None if run in there else runs_there(run, there)


def note_unknown(where: Places, run: str) -> None:
    """Tell on stderr if no place has a run that a command was given: it may be new, or its name is wrong."""
    if more := unknown(where, run):
        complain(f"run {run!r}: no place has a checkpoint of it; {more}")


async def _runs(where: Places) -> set[str]:
    found = set[str]()
    if where.spool is not None:
        found |= {one for one in where.spool.runs() if where.spool.newest(one, 1)}
        with suppress(TierdError, TimeoutError, KeyError), Link(where.spool) as link:  # its daemon knows the tiers'
            report = link.ask(messages.Report(run=None))["report"]
            found |= {str(one["run"]) for one in report["checkpoints"]}
    async with AsyncExitStack() as stack:
        for store in (await open_tiers(where.config, stack)).values() if where.config else ():
            found |= await TierObserver(store).runs()
    return found
