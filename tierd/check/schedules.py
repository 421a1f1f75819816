"""Find settings of an optimizer that a schedule sets otherwise than uninterrupted, though they were restored rightly.

Invariant: pure. The captures after the first step of a resumed launch are compared. No loss can have changed these
settings, because they were equal before that step, and so was its loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierd.check.final import of_other_forms
from tierd.check.finding import StateFinding
from tierd.check.history import RankHistory, Taken
from tierd.check.kinds import kind_of_path, same, values
from tierd.check.moments import capture_of

_SETTING = re.compile(r'\["param_groups"\]\[\d+\]\["(?!params")\w+"\](\[\d+\])?|\["_last_lr"\]\[\d+\]')


def schedule_findings(
    uninterrupted: RankHistory, resumed: RankHistory, begin: tuple[Taken, Taken], first_step: int
) -> Iterator[StateFinding]:
    """Report the first setting that was right before step `first_step`, and is not after it.

    Args:
        begin: both runs' captures before the step.
    """
    expected, now = capture_of(uninterrupted, "step", first_step), capture_of(resumed, "step", first_step)
    if expected is None or now is None or begin[1].at != "forward":
        return
    before, after, killed = (values(capture) for capture in (begin[0], expected, now))
    restored, kinds = values(begin[1]), expected.kinds | now.kinds
    incomparable = of_other_forms(expected, now)
    for path in sorted(after.keys() & killed.keys() & before.keys()):
        was, is_ = after[path], killed[path]
        if not _SETTING.search(path) or same(was, is_) or not same(before[path], restored.get(path)):
            continue
        if path.startswith(incomparable) or kind_of_path(path, kinds) not in ("optimizer", "scheduler"):
            continue
        yield StateFinding(
            "scheduler" if "scheduler" in kinds.values() else "optimizer",
            path,
            f"{path}: as uninterrupted before step {first_step}, and {is_.text} after it, {was.text} uninterrupted: it "
            "follows a schedule that is made of other numbers in a resumed launch, as of the steps that are left, or "
            "that counts from another step",
            lost=True,
        )
        return
