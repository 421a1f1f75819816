"""`check_resume`: run a user's own loop once uninterrupted and once with kills, in separate processes, and compare.

Invariant: the loop runs unchanged. Only real processes, real SIGKILLs and the loop's own restores decide. A divergence
is attributed to the resume only after a second uninterrupted run was equal to the first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tierd.check.causes import find_causes, state_difference_causes
from tierd.check.check_report import Cause, LaunchResult, Report
from tierd.check.launch_records import CheckedRun, KillPoint, RankRecord
from tierd.check.loop_launcher import CheckedLoop, stop_daemons
from tierd.check.observation_causes import find_missing_restore, find_restarted_rank, find_split_start
from tierd.check.sample_comparison import ComparisonTerms, RankResult, compare_rank, find_leaks
from tierd.check.state_comparison import (
    StateDifference,
    count_compared_values,
    count_missing_values,
    has_common_capture,
    state_differences,
)
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
    every_save: bool = False,
    ignore: Sequence[str] = (),
    on_line: Callable[[str], None] = lambda line: None,
) -> Report:
    """Check that a training loop that is killed and started again does the same as an uninterrupted one.

    Args:
        target: `module:function`. The function takes one argument, the path of a spool. It restores from the spool,
            trains, and calls `tierd.observe` once per step on every rank. It may end or train forever. All of its state
            must be inside the spool's directory.
        steps: the last step that is compared.
        kill_at: where the launches are killed, one after the other. `7` kills right after step 7 was observed, and
            `"7+10ms"` 10 ms later. `"7+save"` kills in the middle of the first save of step 7 or later. With several
            ranks, one of them dies so, in turn, and the others are killed with it, as torchrun does.
        ranks: processes of a launch, each with torchrun's environment.
        allowance: samples that each rank may read again or skip for each resume; losses may then differ after it.
        loss_tolerance: relative; 0 compares every bit.
        patience: seconds without a new step after which a launch counts as hung.
        keep: keep spools, records and output, and name them in the report.
        every_save: also compare the state at each save, to find the step at which it first differed.
        ignore: paths of the state that may differ, as `state["timing"]`, with everything below them; or `fnmatch`
            patterns.
        on_line: called with a line of progress at the start of each launch.

    Returns:
        The report, also if the loop does not resume exactly.

    Raises:
        ConfigError: an argument is invalid.
        LoopFailed: a launch ended, failed, hung or could not be killed; the message has the end of its output.
    """
    points = _parse_kill_points(steps, kill_at, ranks, allowance)
    # A long TMPDIR is avoided, because a daemon that the loop starts has its sockets in the spool.
    home = Path(tempfile.mkdtemp(prefix="tierd-check-", dir="/tmp" if len(tempfile.gettempdir()) > 40 else None))  # noqa: S108
    try:
        # And the step after, because a launch that is killed right after its save resumes with that one.
        captured = tuple(sorted({step for point in points for step in (point.step, point.step + 1) if step < steps}))
        loop = CheckedLoop(target, ranks, steps, home, patience, on_line, captured, every_save)
        terms = ComparisonTerms(steps, allowance, loss_tolerance, tuple(ignore))
        report = _run_check(loop, points, terms, str(home) if keep else None)
    finally:
        stop_daemons(home)
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    return report


def assert_resumes(target: str, **options: object) -> Report:
    """Run `check_resume` in a test, and raise `AssertionError` with the report unless `report.ok`."""
    report = check_resume(target, **options)  # type: ignore[arg-type]
    if not report.ok:
        raise AssertionError(str(report))
    return report


def _parse_kill_points(steps: int, kill_at: Sequence[int | str], ranks: int, allowance: int) -> list[KillPoint]:
    if isinstance(kill_at, str):
        raise ConfigError(f"kill_at={kill_at!r}: a list of kill points, as ['3', '7+save']")
    points = [KillPoint.parse(text) for text in kill_at]
    if not points:
        raise ConfigError("no kill point: where is the loop to be killed?")
    for point in points:
        if point.step >= steps:
            raise ConfigError(f"kill point {point}: before the last step, {steps}")
    if ranks < 1 or allowance < 0:
        raise ConfigError(f"ranks={ranks}, allowance={allowance}: at least 1, and at least 0")
    return points


def _run_check(loop: CheckedLoop, points: Sequence[KillPoint], terms: ComparisonTerms, directory: str | None) -> Report:
    margin = terms.allowance * len(points)
    reference = _run_uninterrupted(loop, "uninterrupted", margin)
    killed = _run_killed(loop, points, margin)
    start = min((record.first_step or 0 for record in reference.launches[0]), default=0)
    start_mismatch = find_split_start(reference, killed)
    if start_mismatch is None:
        _check_isolated(reference, killed)
    fresh = start_mismatch or find_missing_restore(killed, start) or find_restarted_rank(killed, start)
    results = [compare_rank(reference, killed, rank, terms) for rank in range(loop.ranks)]
    closer = loop.with_captures({*loop.captured, *_steps_around(killed)})
    rerun = None
    states = _state_differences(reference, killed, results, terms)
    if not all(has_common_capture(reference, killed, state.rank, state.path) for state in states):
        rerun = _run_uninterrupted(closer, "uninterrupted again", margin)
        states = _state_differences(reference, killed, results, terms, rerun)
    leaked = find_leaks(reference, killed, loop.ranks, terms.steps)
    if terms.allowance:
        leaked = [leak for leak in leaked if leak.kind not in ("twice", "skipped")]
    likely_causes: tuple[Cause, ...] = (fresh,) if fresh else ()
    if not all(result.ok for result in results):
        if rerun is None and _begins_alike(reference, killed, terms):
            rerun = _run_uninterrupted(closer, "uninterrupted again", margin)
        likely_causes += find_causes(reference, killed, rerun, results, terms)
    elif states and not fresh:
        if rerun is None:
            rerun = _run_uninterrupted(closer, "uninterrupted again", margin)
        likely_causes += state_difference_causes(reference, killed, rerun, states)
    return Report(
        target=loop.target,
        steps=terms.steps,
        ok=fresh is None and all(result.ok for result in results) and not states and not leaked,
        exact=all(result.exact for result in results) and not states,
        allowance=terms.allowance,
        loss_tolerance=terms.loss_tolerance,
        launches=tuple(
            _launch_result(number, launch, points, start, terms.steps)
            for number, launch in enumerate(killed.launches, start=1)
        ),
        ranks=tuple(results),
        entries=sum(count_compared_values(reference, killed, rank) for rank in range(loop.ranks)),
        states=tuple(states),
        leaks=tuple(leaked),
        causes=likely_causes,
        kept=directory,
        missing=sum(count_missing_values(reference, killed, rank) for rank in range(loop.ranks)),
    )


def _steps_around(killed: CheckedRun) -> set[int]:
    """Return the steps at which an uninterrupted run is captured: each resumed checkpoint, and the step after it."""
    first = {record.first_step for launch in killed.launches[1:] for record in launch if record.first_step is not None}
    return first | {step - 1 for step in first}


def _state_differences(
    reference: CheckedRun,
    killed: CheckedRun,
    results: Sequence[RankResult],
    terms: ComparisonTerms,
    rerun: CheckedRun | None = None,
) -> list[StateDifference]:
    """Return the differences in the state of each rank.

    A rank that used an allowance is left out, because it trained differently.
    """
    return [
        difference
        for result in results
        if result.exact or not result.ok
        for difference in state_differences(reference, killed, result.rank, terms.loss_tolerance, terms.ignore, rerun)
    ]


def _begins_alike(reference: CheckedRun, killed: CheckedRun, terms: ComparisonTerms) -> bool:
    """Return whether the killed run's first launch did what the uninterrupted run did."""
    first = CheckedRun(killed.launches[:1])
    ranks = range(len(killed.launches[0]))
    return all(compare_rank(reference, first, rank, _terms_of_launch(first, rank, terms)).exact for rank in ranks)


def _terms_of_launch(history: CheckedRun, rank: int, terms: ComparisonTerms) -> ComparisonTerms:
    return ComparisonTerms(min(terms.steps, history.launches[0][rank].last_step or 0), 0, terms.loss_tolerance)


def _run_uninterrupted(loop: CheckedLoop, name: str, margin: int) -> CheckedRun:
    spool = _create_spool(loop.home, name)
    records = loop.launch(name, spool, None, 0, margin)
    stop_daemons(spool.parent)
    return CheckedRun([records])


def _run_killed(loop: CheckedLoop, points: Sequence[KillPoint], margin: int) -> CheckedRun:
    spool = _create_spool(loop.home, "killed")
    launches: list[list[RankRecord]] = []
    for number, point in enumerate([*points, None], start=1):
        launched = replace(loop, is_later=number > 1)
        launches.append(launched.launch(f"launch {number}", spool, point, (number - 1) % loop.ranks, margin))
    stop_daemons(spool.parent)
    return CheckedRun(launches)


def _create_spool(home: Path, name: str) -> Path:
    """Create a spool inside a directory of its own, so that the loop may put a tier next to it."""
    path = home / name.replace(" ", "-") / "spool"
    path.mkdir(parents=True)
    return path


def _check_isolated(reference: CheckedRun, killed: CheckedRun) -> None:
    for rank, (before, record) in enumerate(zip(reference.launches[0], killed.launches[0], strict=True)):
        if record.first_step is not None and record.first_step != before.first_step:
            raise ConfigError(
                f"the first launch on an empty spool began at step {record.first_step} on rank {rank}, and the one "
                f"before it at step {before.first_step}: the loop restores something from outside of the directory "
                "that it is given"
            )


def _launch_result(
    number: int, launch: Sequence[RankRecord], points: Sequence[KillPoint], start: int, steps: int
) -> LaunchResult:
    began = min((record.first_step for record in launch if record.first_step is not None), default=None)
    return LaunchResult(
        launch=number,
        killed_at=str(points[number - 1]) if number <= len(points) else None,
        began=began,
        ended=max((min(record.last_step, steps) for record in launch if record.last_step is not None), default=None),
        resumed=began is not None and began > start,
    )
