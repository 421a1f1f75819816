"""Find the state that a resume did not bring back, by comparing a killed run with an uninterrupted one.

Invariant: pure. Four moments are compared: the save, the end of the load, and, in both runs, the moment before the
first step after the resume. A value that differs then is a cause only if it was already wrong after the load, or was
set since. Consequences of a cause cannot exist yet at that moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from tierd.check.final import StateDifference, unsteady
from tierd.check.history import GLOBAL, History, RankHistory, Taken
from tierd.check.leaves import ValueLeaf

_EPOCH, _SEED = re.compile(r"epoch"), re.compile(r"seed")
_POSITION = re.compile(r"position|pos|sample|index|idx|offset|cursor|consumed|yielded|drawn|read|at")
_AHEAD = re.compile(r"queue|prefetch")
_LOCAL = re.compile(r"\w+\(\) \w")
_LAST = re.compile(r"[A-Za-z_]\w*")

# The order of the kinds by how well they explain: other samples; a wrong first loss; a wrong later loss.
_ORDERS = {
    "samples": "shuffle, epoch, buffer, prefetch, position, data, state, generator, order",
    "first loss": "weights, buffers, mode, not in the checkpoint, state, generator, data, position, buffer, optimizer, "
    "scheduler, scaler, gradients",
    "later loss": "scheduler, optimizer, scaler, mode, gradients, generator, not in the checkpoint, state, data, "
    "position, buffer, buffers, weights",
}


class StateFinding(msgspec.Struct, frozen=True):
    """One value that was not restored (`lost`), or that was set since.

    `says` has its path and its values at both moments.
    """

    kind: str
    path: str
    says: str
    lost: bool = False


def evidence(again: History, killed: History, rank: int, launch: int, what: str) -> list[StateFinding]:
    """Return the findings that explain why `launch` diverged, the strongest first.

    Args:
        again: an uninterrupted run whose states were captured at the step where this launch begins.
        what: `samples`, `first loss` or `later loss`.
    """
    here, whole = killed.launches[launch - 1][rank], again.launches[0][rank]
    loaded = _one(here, "loaded")
    begun = here.first
    if begun is None:
        return []
    if loaded is not None and begun != loaded.step + 1:
        return [
            StateFinding(
                "steps",
                "step",
                f"the checkpoint is of step {loaded.step}, and launch {launch} goes on with step {begun}: the step "
                "after the checkpoint's is the next",
            )
        ]
    before, then = _beginning(here, begun), _beginning(whole, begun)
    saved = None if loaded is None else _one(whole, "save", loaded.step)
    if before is None or then is None:
        return []
    shaky = unsteady([again.launches[0][rank], killed.launches[0][rank]])
    found = [one for one in _findings(saved, loaded, then, before, begun) if one.path not in shaky]
    if what != "samples" and loaded is not None and (early := _saved_early(whole, loaded.step)):
        return [early]
    order = _ORDERS[what].split(", ")
    known = [one for one in found if one.kind in order]
    # If the batch was drawn, or the step made, before the capture, a difference may be only a consequence.
    followed = what == "samples" or before.at != "forward"
    known.sort(key=lambda one: (followed and not one.lost, order.index(one.kind)))
    # Gradients follow from any stronger cause.
    return [one for one in known if one.kind != "gradients" or known[0].kind == "gradients"]


def of_states(states: list[StateDifference], kinds: Mapping[str, str]) -> Iterator[StateFinding]:
    """Name the kind of each difference that no sample and no loss shows."""
    for one in states:
        kind = "not in the checkpoint" if one.saved is False else _kind(one.path, kinds, one.expected, one.got)
        yield StateFinding(
            "state" if kind == "data" else kind,
            one.path,
            f"{one.path}: {one.expected} uninterrupted and {one.got} in launch {one.launch} after step {one.step}, "
            + (
                "and the state that is saved does not have it: put it there"
                if one.saved is False
                else "though the state that is saved has it: it is not restored, or set again after the restore"
            ),
        )


def kinds_of(killed: History, rank: int) -> dict[str, str]:
    """Return the kinds of objects by the prefix of their paths, as far as any launch recorded them."""
    return {path: kind for launch in killed.launches for one in launch[rank].taken for path, kind in one.kinds.items()}


def _one(seen: RankHistory, at: str, step: int | None = None) -> Taken | None:
    return next((one for one in seen.taken if one.at == at and step in (None, one.step)), None)


def _beginning(seen: RankHistory, begun: int) -> Taken | None:
    """Return the state right before the first step: at its forward pass, or else when the step was observed."""
    return _one(seen, "forward", begun - 1) or _one(seen, "step", begun) or _one(seen, "end", begun)


def _saved_early(whole: RankHistory, step: int) -> StateFinding | None:
    """Report weights that changed between the save of a step and its `tierd.observe`."""
    at = [(one.at, one) for one in whole.taken if one.step == step and one.at in ("save", "step")]
    if [name for name, _ in at] != ["save", "step"]:
        return None
    save, done = at[0][1], at[1][1]
    moved = [
        path
        for path, leaf in save.entries.items()
        if (other := done.entries.get(path)) and other.digest != leaf.digest and _kind(path, save.kinds) == "weights"
    ]
    if not moved:
        return None
    return StateFinding(
        "save before the step",
        moved[0],
        f"the save of step {step} was made before the update of that step: {moved[0]} moved between it and "
        "tierd.observe, so a resume leaves that update out; save after optimizer.step()",
    )


def _findings(
    saved: Taken | None, loaded: Taken | None, then: Taken, before: Taken, begun: int
) -> Iterator[StateFinding]:
    expected, got = _all(then), _all(before)
    kinds = then.kinds | before.kinds
    differ = {path for path in expected.keys() | got.keys() if not _same(expected.get(path), got.get(path))}
    at_save, at_load = (_all(saved), _all(loaded)) if saved and loaded else ({}, {})
    told: set[str] = set()
    for path, was in at_save.items():
        now = at_load.get(path)
        if now is None and _LOCAL.match(path):  # a local variable that the loop assigns only later
            continue
        if _same(was, now) or _within(path, told) or not (path in differ or _within_any(path, differ)):
            continue
        told.add(path)
        unsaved = was.saved is False
        kind = _kind(path, kinds, was.text, now.text if now else "", was, now)
        if unsaved and kind != "generator":
            kind = "not in the checkpoint"
        at = f"{was.text} at the save of step {saved.step if saved else 0}"
        says = f"{path}: {at}, {now.text if now else 'gone'} right after the load"
        says += "; the state that is saved does not have it" if unsaved else ""
        says += "; put tierd.RngState() into the state" if path in GLOBAL else ""
        yield StateFinding(kind, path, says, lost=True)
    for path in sorted(differ):
        if path in expected and path in got and not _within(path, told):
            if _LOCAL.match(path) and path not in at_load:
                continue  # a consequence of another value
            was, is_ = expected[path], got[path]
            kind = _kind(path, kinds, was.text, is_.text, was, is_)
            if was.saved is False and kind != "generator":
                kind = "not in the checkpoint"
            when = "as at the save right after the load, and" if path in at_load else ""
            yield StateFinding(
                kind,
                path,
                f"{path}: {when} {is_.text} before step {begun}, {was.text} uninterrupted".replace(":  ", ": "),
            )


def _all(one: Taken) -> dict[str, ValueLeaf]:
    return one.entries | one.beside | one.looks


def _same(a: ValueLeaf | None, b: ValueLeaf | None) -> bool:
    return a is b is None or (a is not None and b is not None and a.digest == b.digest)


def _within(path: str, told: set[str]) -> bool:
    return path in told or any(path.startswith((f"{one}[", f"{one}.")) for one in told)


def _within_any(path: str, differ: set[str]) -> bool:
    return any(one.startswith((f"{path}[", f"{path}.")) for one in differ)


def _kind(
    path: str,
    kinds: Mapping[str, str],
    was: str = "",
    now: str = "",
    a: ValueLeaf | None = None,
    b: ValueLeaf | None = None,
) -> str:
    if path.startswith("gradient of "):
        return "gradients"
    if path.endswith(".training"):
        return "mode"
    if "generator" in (was[:9], now[:9]):
        return "generator"
    if path in kinds:
        return kinds[path]
    owner = max((one for one in kinds if path.startswith(one)), key=len, default="")
    kind = kinds.get(owner, "data" if "() ." in path or "()." in path else "state")
    if kind == "weights":
        return "buffers" if not path.startswith(f'{owner}["') else kind
    return _data_kind(path, a, b) if kind == "data" else kind


def _data_kind(path: str, a: ValueLeaf | None, b: ValueLeaf | None) -> str:
    """Name the kind of a data pipeline's attribute, by its name and its content."""
    names = _LAST.findall(path)
    name = names[-1].lower() if names else ""
    if a is not None and b is not None and a.count is not None and a.count == b.count:
        return "order"  # different items, in the same number
    if (a is not None and a.count is not None) or (b is not None and b.count is not None):
        return "prefetch" if _AHEAD.search(name) else "buffer"
    if _SEED.search(name):
        return "shuffle"
    if _EPOCH.search(name):
        return "epoch"
    if re.search(r"\[\d+\]$", path):
        return "data"
    return "position" if any(_POSITION.fullmatch(part) for part in name.split("_")) else "data"
