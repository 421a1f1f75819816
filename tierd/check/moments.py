"""Choose the captures of two runs that are compared.

Invariant: pure.
"""

from __future__ import annotations

from tierd.check.history import RankHistory, Taken


def loads_later(saved: Taken, loaded: Taken) -> bool:
    """Return whether the loop only read values, and gives them to its objects itself: a framework does so."""
    forms = [(saved.forms.get(key, ""), form) for key, form in loaded.forms.items()]
    return any(then.endswith(("object", "both")) and now.endswith("values") for then, now in forms)


def capture_of(record: RankHistory, at: str, step: int | None = None) -> Taken | None:
    return next((capture for capture in record.taken if capture.at == at and step in (None, capture.step)), None)


def capture_before(uninterrupted: RankHistory, then: Taken) -> Taken | None:
    """Return the last capture before `then`, after a step or at a save."""
    earlier = [
        capture for capture in uninterrupted.taken[: uninterrupted.taken.index(then)] if capture.at in ("step", "save")
    ]
    return earlier[-1] if earlier else None


def beginnings(uninterrupted: RankHistory, resumed: RankHistory, first_step: int) -> tuple[Taken, Taken] | None:
    """Return both runs' states at the first step: right before its forward pass, or else when it was observed."""
    # After a restore the first one is the first step's, whatever the number of the checkpoint.
    restored = resumed.begun is None or capture_of(resumed, "loaded") is not None
    first = capture_of(resumed, "forward") if restored else resumed.begun
    pairs = [(capture_of(uninterrupted, "forward", first_step - 1), first)]
    pairs += [
        (capture_of(uninterrupted, at, first_step), capture_of(resumed, at, first_step)) for at in ("step", "end")
    ]
    return next(((then, before) for then, before in pairs if then is not None and before is not None), None)
