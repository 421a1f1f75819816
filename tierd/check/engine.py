"""`check_resume`: a user's own loop once through and once killed, each launch in processes of its own, and compared.

Law: the loop runs as it is; only real processes, real SIGKILLs and its own restores decide. A divergence is blamed on
the resume only after a second uninterrupted run was seen to be like the first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tierd.check.causes import Cause, causes, never_restored
from tierd.check.compare import Terms, compare
from tierd.check.history import History, KillPoint, Seen
from tierd.check.launches import Loop, stop_daemons
from tierd.check.report import LaunchResult, Report
from tierd.core.errors import ConfigError


def check_resume(
    target: str,
    *,
    steps: int,
    kill_at: Sequence[int | str] = (),
    ranks: int = 1,
    allowance: int = 0,
    loss_tolerance: float = 0.0,
    patience: float = 120.0,
    keep: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Whether a training loop that is killed and started again is the loop that nobody interrupted.

    Args:
        target: `module:function`. The function takes one argument, the path of a spool; restores from it, trains on,
            and calls `tierd.observe` once a step on every rank. It may end, or train for ever. Nothing of its state
            may live outside of the spool's directory.
        steps: the last step that is compared.
        kill_at: where the launches are killed, one after the other: `7` right after step 7 was observed, `"7+save"` in
            the middle of the first save of step 7 or later, `"7+10ms"` that long after step 7. With several ranks one
            of them dies so, in turn, and the others are killed with it, as torchrun does.
        ranks: processes of a launch, each with torchrun's environment.
        allowance: samples that each rank may read again or skip for each resume; losses may then differ after it.
        loss_tolerance: relative; 0 compares every bit.
        patience: seconds without a new step after which a launch is said to hang.
        keep: leave spools, records and output behind, and name them in the report.
        tell: given a line at the start of each launch.

    Raises:
        ConfigError: an argument cannot be used.
        LoopFailed: a launch ended, failed, hung or could not be killed; with the end of its output.
    """
    points = _checked(steps, kill_at, ranks, allowance)
    # Not below a long TMPDIR: a daemon that the loop starts has its sockets in the spool.
    home = Path(tempfile.mkdtemp(prefix="tierd-check-", dir="/tmp" if len(tempfile.gettempdir()) > 40 else None))  # noqa: S108
    try:
        loop = Loop(target, ranks, steps, home, patience, tell)
        report = _check(loop, points, Terms(steps, allowance, loss_tolerance), str(home) if keep else None)
    finally:
        stop_daemons(home)
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    return report


def assert_resumes(target: str, **options: object) -> Report:
    """`check_resume` for a test: raises `AssertionError` with the report unless `report.ok`."""
    report = check_resume(target, **options)  # type: ignore[arg-type]
    if not report.ok:
        raise AssertionError(str(report))
    return report


def _checked(steps: int, kill_at: Sequence[int | str], ranks: int, allowance: int) -> list[KillPoint]:
    if isinstance(kill_at, str):
        raise ConfigError(f"kill_at={kill_at!r}: a list of kill points, as ['3', '7+save']")
    points = [KillPoint.parse(one) for one in kill_at]
    if not points:
        raise ConfigError("no kill point: where is the loop to be killed?")
    for point in points:
        if point.step >= steps:
            raise ConfigError(f"kill point {point}: before the last step, {steps}")
    if ranks < 1 or allowance < 0:
        raise ConfigError(f"ranks={ranks}, allowance={allowance}: at least 1, and at least 0")
    return points


def _check(loop: Loop, points: Sequence[KillPoint], terms: Terms, kept: str | None) -> Report:
    margin = terms.allowance * len(points)
    reference = _once(loop, "uninterrupted", margin)
    killed = _killed(loop, points, margin)
    start = min((seen.first or 0 for seen in reference.launches[0]), default=0)
    _check_isolated(reference, killed)
    results = [compare(reference, killed, rank, terms) for rank in range(loop.ranks)]
    fresh = never_restored(killed, start)
    found: tuple[Cause, ...] = (fresh,) if fresh else ()
    if not all(one.ok for one in results):
        first = History(killed.launches[:1])
        again = None
        if all(compare(reference, first, rank, _until(first, rank, terms)).exact for rank in range(loop.ranks)):
            again = _once(loop, "uninterrupted again", margin)
        found += causes(reference, killed, again, results, terms)
    return Report(
        target=loop.target,
        steps=terms.steps,
        ok=fresh is None and all(one.ok for one in results),
        exact=all(one.exact for one in results),
        allowance=terms.allowance,
        loss_tolerance=terms.loss_tolerance,
        launches=tuple(
            _launch(number, launch, points, start, terms.steps)
            for number, launch in enumerate(killed.launches, start=1)
        ),
        ranks=tuple(results),
        causes=found,
        kept=kept,
    )


def _until(history: History, rank: int, terms: Terms) -> Terms:
    return Terms(min(terms.steps, history.launches[0][rank].last or 0), 0, terms.loss_tolerance)


def _once(loop: Loop, name: str, margin: int) -> History:
    spool = _spool(loop.home, name)
    seen = loop.launch(name, spool, None, 0, margin)
    stop_daemons(spool.parent)
    return History([seen])


def _killed(loop: Loop, points: Sequence[KillPoint], margin: int) -> History:
    spool = _spool(loop.home, "killed")
    launches: list[list[Seen]] = []
    for number, point in enumerate([*points, None], start=1):
        launches.append(loop.launch(f"launch {number}", spool, point, (number - 1) % loop.ranks, margin))
    stop_daemons(spool.parent)
    return History(launches)


def _spool(home: Path, name: str) -> Path:
    """A spool's path with a directory of its own around it, where the loop may put a tier beside it."""
    path = home / name.replace(" ", "-") / "spool"
    path.mkdir(parents=True)
    return path


def _check_isolated(reference: History, killed: History) -> None:
    for rank, (before, seen) in enumerate(zip(reference.launches[0], killed.launches[0], strict=True)):
        if seen.first is not None and seen.first != before.first:
            raise ConfigError(
                f"the first launch on an empty spool began at step {seen.first} on rank {rank}, and the one before it "
                f"at step {before.first}: the loop restores something from outside of the directory that it is given"
            )


def _launch(number: int, launch: Sequence[Seen], points: Sequence[KillPoint], start: int, steps: int) -> LaunchResult:
    began = min((seen.first for seen in launch if seen.first is not None), default=None)
    return LaunchResult(
        launch=number,
        killed_at=str(points[number - 1]) if number <= len(points) else None,
        began=began,
        ended=max((min(seen.last, steps) for seen in launch if seen.last is not None), default=None),
        resumed=began is not None and began > start,
    )
