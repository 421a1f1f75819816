"""Which steps each launch of a run saved, from which checkpoint it began, and how far that rolled the run back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tierd.core.report import Checkpoint
from tierd.core.timeline.head import LaunchRecord


@dataclass(frozen=True, slots=True)
class LaunchSteps:
    """The checkpoints of one launch, as far as they are known.

    Attributes:
        attempt: the launch.
        first_step, last_step: its oldest and its newest checkpoint.
        from_step, from_attempt: the checkpoint from which it resumed; None: from the beginning, or not known.
        lost_steps: by how many steps the launch that saved that checkpoint had come further, also if retention has
            deleted its newest checkpoints since.
    """

    run: str
    attempt: str
    first_step: int
    last_step: int
    from_step: int | None
    from_attempt: str | None
    lost_steps: int


def launch_steps(
    checkpoints: Iterable[Checkpoint], remembered: Callable[[str], Mapping[str, LaunchRecord]]
) -> tuple[LaunchSteps, ...]:
    """Return the launches of every run, by run and in their order.

    Args:
        checkpoints: those that are known.
        remembered: a run's launches according to its heads.
    """
    by_launch: dict[tuple[str, str], list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        by_launch.setdefault((checkpoint.run, checkpoint.attempt), []).append(checkpoint)
    launches = []
    heads = {run: remembered(run) for run in {run for run, _ in by_launch}}
    for (run, attempt), saved in sorted(by_launch.items()):
        steps = [checkpoint.step for checkpoint in saved]
        origin = next((checkpoint.resumed_from for checkpoint in saved if checkpoint.resumed_from), None)
        step, _, by = origin.partition(".") if origin else ("", "", "")
        before = [checkpoint.step for checkpoint in by_launch.get((run, by), ())]
        if (launch := heads[run].get(by)) and launch.newest is not None:
            before.append(launch.newest)
        lost_steps = max(0, max(before) - int(step)) if before else 0
        launches.append(
            LaunchSteps(run, attempt, min(steps), max(steps), int(step) if step else None, by or None, lost_steps)
        )
    return tuple(launches)
