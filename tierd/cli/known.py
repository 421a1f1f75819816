"""What places hold, for the answer to a command that names a run or a step that none of them has."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

from tierd.cli.options import Places
from tierd.cli.tables import complain
from tierd.core.errors import CheckpointNotFound, TierdError
from tierd.core.timeline.alternatives import runs_there, steps_there
from tierd.daemon.opening import open_tiers
from tierd.daemon.tiers.observe import TierObserver
from tierd.ipc import messages
from tierd.ipc.client import Link


@contextmanager
def answering(where: Places, run: str | None) -> Iterator[None]:
    """If a run is not found because no place has it, let the error name the runs that there are."""
    try:
        yield
    except CheckpointNotFound as error:
        if run is None or (more := unknown(where, run)) is None or more in str(error):
            raise
        raise CheckpointNotFound(f"{error}\n  {more}") from None


def no_such(
    run: str | None, step: int | None, steps: Collection[int], attempt: str | None = None
) -> CheckpointNotFound:
    """Make the error for a checkpoint that no place has. It names the steps that there are, if a step was asked for."""
    asked = "" if run is None else f"run {run!r}"
    asked += "" if step is None else f" step {step}"
    asked += "" if attempt is None else f" of attempt {attempt}"
    there = steps_there(step, steps) if step is not None else ""
    why = f"{asked.strip() or 'the places named'}: there is no such checkpoint; it was never saved, or is retired"
    return CheckpointNotFound(why + (f"\n  {there}" if there else ""))


def note_unknown(where: Places, run: str) -> None:
    """Say on the standard error which runs there are if no place has this one: it may be new, or misspelt."""
    if there := unknown(where, run):
        complain(f"run {run!r}: no place has a checkpoint of it; {there}")


def check_known(where: Places, run: str) -> None:
    """Raise `CheckpointNotFound` with the runs that there are if no place has this one."""
    if there := unknown(where, run):
        raise CheckpointNotFound(f"run {run!r}: no place has a checkpoint of it\n  {there}")


def unknown(where: Places, run: str) -> str | None:
    """Return the runs that places hold, as a message has them; None if `run` is one of them, or a place is silent."""
    try:
        there = asyncio.run(_runs(where))
    except (TierdError, OSError):
        return None  # the first error is the one to be told
    return None if run in there else runs_there(run, there)


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
