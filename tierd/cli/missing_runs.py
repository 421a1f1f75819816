"""What places hold, for the answer to a command that names a run or a step that none of them has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

from tierd.cli.output import complain
from tierd.cli.places import Places
from tierd.core.errors import CheckpointNotFound, ConfigError, TierdError
from tierd.core.ids import check_attempt
from tierd.core.timeline.restore_order import describe_runs, describe_steps
from tierd.daemon.tiers.tier_observer import TierObserver, observe_places
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.stores.open import open_tiers


@contextmanager
def naming_known_runs(where: Places, run: str | None) -> Iterator[None]:
    """If a run is not found because no place has it, let the error name the runs that there are."""
    try:
        yield
    except CheckpointNotFound as error:
        if run is None or (known_runs := known_runs_text(where, run)) is None or known_runs in str(error):
            raise
        raise CheckpointNotFound(f"{error}\n  {known_runs}") from None


def checkpoint_not_found(
    run: str | None, step: int | None, steps: Collection[int], attempt: str | None = None
) -> CheckpointNotFound:
    """Make the error for a checkpoint that no place has. It names the steps that there are, if a step was asked for."""
    subject = "" if run is None else f"run {run!r}"
    subject += "" if step is None else f" step {step}"
    subject += "" if attempt is None else f" of attempt {attempt}"
    steps_text = describe_steps(step, steps) if step is not None else ""
    why = f"{subject.strip() or 'the places named'}: there is no such checkpoint: never saved, retired or quarantined"
    return CheckpointNotFound(why + (f"\n  {steps_text}" if steps_text else ""))


def warn_of_unknown_run(where: Places, run: str) -> None:
    """Say on the standard error which runs there are if no place has this one: it may be new, or misspelt."""
    if known_runs := known_runs_text(where, run):
        complain(f"run {run!r}: no place has a checkpoint of it; {known_runs}")


def check_run_exists(where: Places, run: str) -> None:
    """Raise `CheckpointNotFound` with the runs that there are if no place has this one."""
    if known_runs := known_runs_text(where, run):
        raise CheckpointNotFound(f"run {run!r}: no place has a checkpoint of it\n  {known_runs}")


def only_run(where: Places) -> str:
    """Return the run of the places.

    Raises:
        CheckpointNotFound: they hold none.
        ConfigError: they hold several; the message names them.
        StoreUnavailable: a tier does not answer.
    """
    names = sorted(asyncio.run(_list_runs(where)))
    if not names:
        raise CheckpointNotFound("the places named hold no run")
    if len(names) > 1:
        raise ConfigError(f"name the run, because there are several: {', '.join(names)}")
    return names[0]


def full_attempt(where: Places, run: str, text: str | None) -> str | None:
    """Return the attempt that a person named, by its id or by the first digits of the id's random part.

    Raises:
        CheckpointNotFound: the places hold no such attempt of the run.
        ConfigError: they hold several, or the text is no attempt's id.
    """
    if text is None or not re.fullmatch("[0-9a-f]{1,8}", text):
        return text if text is None else check_attempt(text)
    attempts = asyncio.run(_list_attempts(where, run))
    matching = sorted(attempt for attempt in attempts if attempt.rpartition("-")[2].startswith(text))
    if len(matching) > 1:
        raise ConfigError(f"attempt {text!r} of run {run!r}: several begin with it: {', '.join(matching)}")
    if not matching:
        raise CheckpointNotFound(f"attempt {text!r} of run {run!r}: there is none; there are {', '.join(attempts)}")
    return matching[0]


async def _list_attempts(where: Places, run: str) -> list[str]:
    async with AsyncExitStack() as stack:
        stores = await open_tiers(where.config, stack) if where.config else {}
        inventory = await observe_places(where.spool, stores, run, chunks=False)
    attempts = {checkpoint.attempt for place in inventory.places.values() for checkpoint in place.checkpoints}
    attempts |= {part.checkpoint.attempt for place in inventory.places.values() for part in place.quarantined}
    if where.spool is not None:
        with suppress(TierdError, TimeoutError, KeyError), DaemonConnection(where.spool) as link:
            report = link.ask(messages.ReportRequest(run=run))["report"]
            attempts |= {str(checkpoint["attempt"]) for checkpoint in report["checkpoints"]}
    return sorted(attempts)


def known_runs_text(where: Places, run: str) -> str | None:
    """Return the runs that places hold, as a message has them; None if `run` is one of them, or a place is silent."""
    try:
        run_names = asyncio.run(_list_runs(where))
    except (TierdError, OSError):
        return None  # the first error is the one to be told
    return None if run in run_names else describe_runs(run, run_names)


async def _list_runs(where: Places) -> set[str]:
    names = set[str]()
    if where.spool is not None:
        names |= {name for name in where.spool.runs() if where.spool.newest(name, 1)}
        with (
            suppress(TierdError, TimeoutError, KeyError),
            DaemonConnection(where.spool) as link,
        ):  # its daemon knows the tiers'
            report = link.ask(messages.ReportRequest(run=None))["report"]
            names |= {str(checkpoint["run"]) for checkpoint in report["checkpoints"]}
    async with AsyncExitStack() as stack:
        for store in (await open_tiers(where.config, stack)).values() if where.config else ():
            names |= await TierObserver(store).runs()
    return names
