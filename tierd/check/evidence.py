"""Find the state that a resume did not bring back, by comparing a killed run with an uninterrupted one.

Invariant: pure. Four moments are compared: the save, the end of the load, and, in both runs, the moment before the
first step after the resume. A value that differs then is a cause only if it was already wrong after the load, or was
set since. A value that training itself changes until then was not set: it may only follow from another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tierd.check.buffers import filled_again
from tierd.check.differing import Comparison, is_within
from tierd.check.final import of_other_forms, unsteady
from tierd.check.finding import StateFinding
from tierd.check.history import History, RankHistory, Taken
from tierd.check.kinds import DATA, kind_of_path, position_of, same, values
from tierd.check.loading import loader_findings
from tierd.check.moments import beginnings, capture_before, capture_of, loads_later
from tierd.check.schedules import schedule_findings
from tierd.check.steps import wrong_next_step

_OBJECTS = frozenset({"weights", "optimizer", "scheduler", "scaler"})
# A loop does not set these because of a loss, so that a change of them is no consequence of other losses.
_UNCONDITIONAL = frozenset({"weights", "buffers", "mode", "optimizer", "generator"})
_SET_BY_STEPS = frozenset({"optimizer", "scheduler", "scaler"})

# The order of the kinds by how well they explain. A generator counts only if training draws from it: it then explains
# each value that was drawn, and so comes before values of no known purpose.
_ORDERS = {
    "samples": "shuffle, epoch, buffer, prefetch, position, data, state, generator, order, not in the checkpoint",
    "first loss": "weights, buffers, mode, generator, not in the checkpoint, state, data, position, buffer, optimizer, "
    "scheduler, scaler, gradients",
    "later loss": "scheduler, optimizer, scaler, mode, gradients, generator, not in the checkpoint, state, data, "
    "position, buffer, buffers, weights",
    "state": "scheduler, optimizer, scaler, weights, buffers, mode, generator, not in the checkpoint, state, position, "
    "epoch, shuffle, buffer, prefetch, data, order, gradients",
}


def evidence(again: History, killed: History, rank: int, launch: int, what: str) -> list[StateFinding]:
    """Return the findings that explain why `launch` diverged, the strongest first.

    Args:
        again: an uninterrupted run whose states were captured at the step where this launch begins.
        what: `samples`, `first loss`, `later loss`, or `state` if all of these are right.
    """
    here, whole = killed.launches[launch - 1][rank], again.launches[0][rank]
    loaded = capture_of(here, "loaded")
    begun = here.first
    if begun is None:
        return []
    saved = None if loaded is None else capture_of(whole, "save", loaded.step)
    if loaded is not None and (wrong := wrong_next_step(whole, saved, loaded, launch, begun)) is not None:
        return [wrong]
    read, is_later = loaded, saved is not None and loaded is not None and loads_later(saved, loaded)
    if is_later:
        loaded = None
    if (both := beginnings(whole, here, begun)) is None:
        return []
    then, before = both
    shaky = unsteady([again.launches[0][rank], killed.launches[0][rank]])
    comparison = Comparison(saved, read, is_later, capture_before(whole, then), then, before, begun, whole.begun)
    found = [one for one in comparison.findings() if one.path not in shaky]
    found += loader_findings(then, before, begun, what)
    if what == "samples" and saved is not None and loaded is not None:
        found += filled_again(saved, loaded, then, before, begun)
    if what != "samples" and saved is None:  # right samples, so that the loop gave the position to another object
        found = [one for one in found if one.kind not in DATA - {"data", "buffer"}]
    if what != "samples" and saved is not None and (early := _saved_early(whole, saved, begun)):
        return [early]
    if what in ("later loss", "state") and saved is not None and loaded is not None:
        found += [] if any(one.lost for one in found) else _left_alone(saved, loaded, whole, here, launch)
    known = _ranked(found, whole, here, begun, what)
    if what != "samples":  # right samples were drawn by the right generator
        drawing = _of_orders(*(taken for taken in (saved, then, before) if taken is not None))
        known = [finding for finding in known if finding.path not in drawing]
    if known and (known[0].kind in DATA or any(finding.lost for finding in known)):
        known = _without_followers(known)
    if what in ("later loss", "state") and not any(finding.is_sure for finding in known):
        known = [*schedule_findings(whole, here, both, begun), *known]
    if what == "first loss" and not known:
        batches = [one for one in (whole.begun, *whole.taken) if one is not None and one.at == "forward"]
        known = [finding for finding in comparison.overwritten(batches) if finding.path not in shaky]
    if saved is None and what == "samples" and known and known[0].kind in DATA:
        known = [finding for finding in known if not finding.weak]
    # Gradients follow from any stronger cause.
    known = [finding for finding in known if finding.kind != "gradients" or known[0].kind == "gradients"]
    names = before.names | then.names
    return [msgspec.structs.replace(finding, says=_with_users_name(finding, names)) for finding in known]


def _ranked(
    found: Sequence[StateFinding], whole: RankHistory, here: RankHistory, begun: int, what: str
) -> list[StateFinding]:
    """Return the findings that can be causes, the strongest first."""
    order = _ORDERS[what].split(", ")
    idle, added_to = _idle(whole, begun, what), _added_to(whole, here, begun)

    def can_be_cause(finding: StateFinding) -> bool:
        if finding.kind not in order or finding.path in idle:
            return False
        return _is_cause(finding, what) and (finding.kind != "gradients" or finding.path in added_to)

    def rank(finding: StateFinding) -> tuple[bool, bool, bool, int]:
        # Other samples draw another number of times. A batch is drawn before the forward pass, so that what was not
        # lost may be only a consequence of other samples.
        follows = what == "samples" and finding.kind == "generator" and not finding.is_sure
        unsure = not finding.lost if what == "samples" else not finding.is_sure
        return finding.weak or follows, unsure, position_of(finding.path) is None, order.index(finding.kind)

    return sorted(filter(can_be_cause, found), key=rank)


def _without_followers(known: Sequence[StateFinding]) -> list[StateFinding]:
    """Leave out restored generators, which were drawn from another number of times because of what is known."""
    of_data = known[0].kind in DATA
    return [
        finding for finding in known if finding.lost or finding.kind != "generator" or (finding.is_sure and not of_data)
    ]


def first_evidence(again: History, killed: History, rank: int) -> list[StateFinding]:
    """Return the findings of the first resume after which anything differs, where samples and losses do not.

    A later resume loads what differs already, so that nothing that it loads tells of a cause.
    """
    for launch, begun in killed.resumes(rank, again.launches[0][rank].first or 0).items():
        if found := evidence(again, killed, rank, launch, "state"):
            return found
        both = beginnings(again.launches[0][rank], killed.launches[launch - 1][rank], begun)
        if both is None or any(not same(leaf, both[1].entries.get(path)) for path, leaf in both[0].entries.items()):
            return []
    return []


def overlap(one: str, other: str) -> bool:
    """Return whether one of two paths is the other, or below it."""
    return is_within(one, {other}) or is_within(other, {one})


def _is_cause(one: StateFinding, what: str) -> bool:
    """Return whether a value can be a cause, and does not only follow from one."""
    if one.is_sure or one.kind == "generator":  # a generator moves by the number of draws, and not by other values
        return True
    if what == "samples":  # the data's own values are as close to the samples as anything
        return one.kind in DATA
    if not one.late and (one.weak or (what == "later loss" and one.kind in _SET_BY_STEPS)):
        return True  # no step was made since the load that could have moved it
    return not one.moved and (what != "first loss" or one.kind in _UNCONDITIONAL)


def _idle(whole: RankHistory, begun: int, what: str) -> set[str]:
    """Return the generators from which an uninterrupted run did not draw before the losses differed.

    A loader may draw a step's batch one step early, so that each capture until then counts.
    """
    start = capture_of(whole, "step", begun - 1)
    end = capture_of(whole, "step", begun) if what == "first loss" else capture_of(whole, "end")
    if what == "samples" or start is None or end is None:
        return set()
    after = values(end)
    before = [values(one) for one in whole.taken[: whole.taken.index(end)] if one.at != "backward"]
    return {
        path
        for path, leaf in values(start).items()
        if kind_of_path(path, start.kinds, leaf.text) == "generator"
        and path in after
        and all(same(one.get(path, leaf), after[path]) for one in before)
    }


def _with_users_name(one: StateFinding, names: Mapping[str, str]) -> str:
    """Return the text of a finding with the user's name for the object, if that is not in its state."""
    owner = max((prefix for prefix in names if one.path.startswith(prefix)), key=len, default="")
    if not owner or owner not in one.says:
        return one.says
    return one.says.replace(one.path, f"{one.path} ({names[owner]})", 1)


def _of_orders(*some: Taken) -> set[str]:
    """Return the paths of the generators from which loaders and samplers draw."""
    return {path for one in some for path, leaf in values(one).items() if leaf.digest in one.orders}


def _added_to(whole: RankHistory, here: RankHistory, begun: int) -> set[str]:
    """Return the gradients that differ when the first backward pass adds to them; most loops clear them before."""
    then, before = capture_of(whole, "backward", begun - 1), capture_of(here, "backward")
    if then is None or before is None or capture_of(here, "loaded") is None:
        return set()
    paths = then.evidence.keys() | before.evidence.keys()
    return {path for path in paths if not same(then.evidence.get(path), before.evidence.get(path))}


def _saved_early(whole: RankHistory, save: Taken, begun: int) -> StateFinding | None:
    """Report weights that changed between the save before `begun` and that step's `tierd.observe`."""
    done = capture_of(whole, "step", begun - 1)
    if done is None or whole.taken.index(done) < whole.taken.index(save):
        return None
    moved = [
        path
        for path, leaf in save.entries.items()
        if (other := done.entries.get(path))
        and other.digest != leaf.digest
        and kind_of_path(path, save.kinds) == "weights"
    ]
    if not moved:
        return None
    return StateFinding(
        "save before the step",
        moved[0],
        f"the save of step {save.step} was made before the update of that step: {moved[0]} moved between it and "
        "tierd.observe, so a resume leaves that update out; save after optimizer.step()",
    )


def _left_alone(
    saved: Taken, loaded: Taken, whole: RankHistory, here: RankHistory, launch: int
) -> Iterator[StateFinding]:
    """Report objects of the state that training changes, and that stay after the load as they were loaded."""
    then, now = capture_of(whole, "end"), capture_of(here, "end")
    if then is None or now is None or then.step != now.step:
        return
    apart = of_other_forms(then, now)
    for key, kind in then.kinds.items():
        if kind not in _OBJECTS or key not in then.forms or key in apart:
            continue
        paths = [path for path in then.entries if path.startswith(f"{key}[")]
        moved = [path for path in paths if not same(saved.entries.get(path), then.entries[path])]
        if moved and all(same(loaded.entries.get(path), now.entries.get(path)) for path in paths):
            yield StateFinding(
                kind,
                moved[0],
                f"{moved[0]}: {then.entries[moved[0]].text} uninterrupted after step {then.step}, and all of {key} is "
                f"in launch {launch} still as it was loaded: the loop goes on with another object than it restored",
                lost=True,
            )
