"""Find what a loop itself does wrong after a load: a wrong next step, another schedule, a loader's position, a buffer.

Invariant: pure. A loader that begins anew is no cause where a sampler or a dataset knows its own position, and has the
same one as uninterrupted. A buffer is judged by its items alone: after one step it still holds most of those that were
restored. No loss can have changed the settings of a schedule, because they were equal before the step, and so was its
loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tierd.check.launch_records import (
    DATA_KINDS,
    RankRecord,
    StateCapture,
    captured_values,
    data_kind,
    is_same_value,
    kind_of_path,
    position_of,
)
from tierd.check.resume_comparison import StateFinding, find_capture
from tierd.check.state_comparison import incomparable_keys
from tierd.check.value_leaves import ValueLeaf, distinct_texts


def wrong_next_step(
    uninterrupted: RankRecord, saved: StateCapture | None, loaded: StateCapture, launch: int, first_step: int
) -> StateFinding | None:
    """Return a finding if a launch that begins with step `first_step` leaves out steps, or trains a step twice."""
    if first_step not in _next_steps(loaded.step, saved):
        reason = f"launch {launch} goes on with step {first_step}: the step after the checkpoint's is the next"
        return StateFinding("steps", "step", f"the checkpoint is of step {loaded.step}, and {reason}")
    if saved is not None and _holds_step(uninterrupted, saved, first_step):
        return StateFinding(
            "steps",
            "step",
            f"the checkpoint of step {loaded.step} was saved after step {first_step} was observed, and holds its "
            f"update; launch {launch} trains step {first_step} again: save the number of the next step, or add 1 after "
            "the restore",
        )
    return None


def _next_steps(step: int, saved: StateCapture | None) -> set[int]:
    """Return the steps with which a launch may go on after the checkpoint of `step`.

    A framework counts the finished steps, and a loop may count the observed ones from 0. Then the save shows which
    step was observed before it; the step after that one may have been finished as well, and not observed yet.
    """
    if saved is None or saved.after is None or saved.after == step:
        return {step + 1}
    return {step + 1, saved.after + 1, saved.after + 2}


def _holds_step(uninterrupted: RankRecord, saved: StateCapture, step: int) -> bool:
    """Return whether the weights at a save have the update of `step`, which was observed before it.

    A loop may observe a step before its update, and save in between: the weights at the save are older then.
    """
    after_step, earlier = find_capture(uninterrupted, "step", step), find_capture(uninterrupted, "step", step - 1)
    if saved.after is None or saved.after < step or after_step is None or earlier is None:
        return False
    return _has_weights_of(saved, after_step, earlier)


def _has_weights_of(capture: StateCapture, same: StateCapture, other: StateCapture) -> bool:
    leaves = capture.entries or capture.unsaved
    weights = [path for path in leaves if kind_of_path(path, capture.kinds) in ("weights", "buffers")]

    def digests(capture: StateCapture) -> list[str | None]:
        return [leaf.digest if (leaf := captured_values(capture).get(path)) else None for path in weights]

    return digests(capture) == digests(same) != digests(other)


def repeated_step(
    uninterrupted: RankRecord, then: StateCapture, before: StateCapture, launch: int, first_step: int
) -> StateFinding | None:
    """Return a finding if a launch whose load was not seen begins with a step whose update its weights already have.

    Args:
        then: the uninterrupted run before the forward pass of `first_step`.
        before: the launch at the same moment.
    """
    after_step = find_capture(uninterrupted, "step", first_step)
    if after_step is None or before.moment != "forward" or not _has_weights_of(before, after_step, then):
        return None
    return StateFinding(
        "steps",
        "step",
        f"launch {launch} begins with step {first_step}, and its weights are those that an uninterrupted run has after "
        f"that step: it counts step {first_step} twice; go on with the step after the checkpoint's",
    )


_SETTING = re.compile(r'\["param_groups"\]\[\d+\]\["(?!params")\w+"\](\[\d+\])?|\["_last_lr"\]\[\d+\]')


def schedule_findings(
    uninterrupted: RankRecord, resumed: RankRecord, begin: tuple[StateCapture, StateCapture], first_step: int
) -> Iterator[StateFinding]:
    """Report the first setting that was right before step `first_step`, and is not after it.

    Args:
        begin: both runs' captures before the step.
    """
    expected, now = find_capture(uninterrupted, "step", first_step), find_capture(resumed, "step", first_step)
    if expected is None or now is None or begin[1].moment != "forward":
        return
    before, after, killed = (captured_values(capture) for capture in (begin[0], expected, now))
    restored, kinds = captured_values(begin[1]), expected.kinds | now.kinds
    incomparable = incomparable_keys(expected, now)
    for path in sorted(after.keys() & killed.keys() & before.keys()):
        was, is_ = after[path], killed[path]
        if not _SETTING.search(path) or is_same_value(was, is_) or not is_same_value(before[path], restored.get(path)):
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


_OF_DATASET = re.compile(r"(\w+) of the DataLoader of \1\b")


def loader_findings(then: StateCapture, before: StateCapture, first_step: int, symptom: str) -> Iterator[StateFinding]:
    """Report what differs in the loaders before the first step after a resume.

    Args:
        then: the uninterrupted run at the same moment.
        symptom: as for `launch_findings`.
    """
    moment = f"{'before' if before.moment == 'forward' else 'after'} step {first_step}"
    for path, was in then.loaders.items():
        now = before.loaders.get(path)
        if now is None or is_same_value(was, now):
            continue
        loader = position_of(path)
        if loader is not None:
            if symptom == "samples" and not _knows_its_position(then, before):
                yield StateFinding(
                    "position",
                    path,
                    f"{path}: {now.text} {moment}, {was.text} uninterrupted: the position of its sampler or dataset is "
                    "not in the checkpoint, and the loop does not go on from there",
                    lost=True,
                )
            continue
        kind = "generator" if was.text.startswith("generator") else data_kind(path, was, now)
        # Right samples were drawn in the right order, so that only a dataset's attributes and generators may explain a
        # loss. A sampler may begin elsewhere, because the loop gives it the position.
        if symptom == "samples" or (kind in ("data", "generator") and _OF_DATASET.match(path)):
            actual_text, expected_text = distinct_texts(now, was)
            yield StateFinding(
                kind,
                path,
                f"{path}: {actual_text} {moment}, {expected_text} uninterrupted",
                moved_by_training=kind == "generator",
            )


def _knows_its_position(then: StateCapture, before: StateCapture) -> bool:
    uninterrupted = {
        path: leaf for path, leaf in captured_values(then).items() if kind_of_path(path, then.kinds) == "position"
    }
    uninterrupted |= {path: leaf for path, leaf in then.loaders.items() if data_kind(path, leaf, leaf) == "position"}
    killed = captured_values(before) | before.loaders
    equal = {path for path, leaf in uninterrupted.items() if any(leaf.sample) and is_same_value(leaf, killed.get(path))}
    # If another loader is as far as uninterrupted, then that position is of its data.
    return not any(map(position_of, equal)) and bool(equal)


_MIN_ITEMS = 4  # items; of fewer, chance decides how many are left


def refilled_buffer_findings(
    saved: StateCapture, loaded: StateCapture, then: StateCapture, before: StateCapture, first_step: int
) -> Iterator[StateFinding]:
    """Report the first buffer that the load restored, and of which less than half as much is left as uninterrupted."""
    at_save, at_load, uninterrupted, killed = (captured_values(capture) for capture in (saved, loaded, then, before))
    for path, leaf in at_load.items():
        kind = kind_of_path(path, then.kinds | before.kinds, a=leaf, b=leaf)
        if (
            kind not in DATA_KINDS
            or not is_same_value(at_save.get(path), leaf)
            or path not in uninterrupted
            or path not in killed
        ):
            continue
        items = _items(at_load, path)
        expected_count, actual_count = (len(items & _items(run, path)) for run in (uninterrupted, killed))
        if (
            len(items) >= _MIN_ITEMS
            and items == _items(at_save, path)
            and 2 * expected_count >= len(items)
            and 2 * actual_count < expected_count
        ):
            yield StateFinding(
                "buffer",
                path,
                f"{path}: as at the save right after the load, and of its {len(items)} items {expected_count} are left "
                f"after step {first_step} uninterrupted, {actual_count} in the killed run: it is filled again after "
                "the load",
                lost=True,
            )
            return


def _items(by_path: Mapping[str, ValueLeaf], path: str) -> set[str]:
    """Return what tells apart the items of a sequence of plain values."""
    leaf = by_path[path]
    if leaf.count is None or " items" not in leaf.text:
        return set()
    if leaf.sample:
        return {repr(number) for number in leaf.sample}
    return {item.digest for place in range(leaf.count) if (item := by_path.get(f"{path}[{place}]")) is not None}
