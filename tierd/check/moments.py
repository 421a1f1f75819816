"""Choose the captures of two runs that are compared.

Invariant: pure.
"""

from __future__ import annotations

from tierd.check.history import RankHistory, Taken


def loads_later(saved: Taken, loaded: Taken) -> bool:
    """Return whether the loop only read values, and gives them to its objects itself: a framework does so."""
    forms = [(saved.forms.get(key, ""), form) for key, form in loaded.forms.items()]
    return any(then.endswith(("object", "both")) and now.endswith("values") for then, now in forms)


def capture_of(seen: RankHistory, at: str, step: int | None = None) -> Taken | None:
    return next((one for one in seen.taken if one.at == at and step in (None, one.step)), None)


def capture_before(whole: RankHistory, then: Taken) -> Taken | None:
    """Return the last capture before `then`, after a step or at a save."""
    earlier = [one for one in whole.taken[: whole.taken.index(then)] if one.at in ("step", "save")]
    return earlier[-1] if earlier else None


def beginnings(whole: RankHistory, here: RankHistory, begun: int) -> tuple[Taken, Taken] | None:
    """Return both runs' states at the first step: right before its forward pass, or else when it was observed."""
    # After a restore the first one is the first step's, whatever the number of the checkpoint.
    restored = here.begun is None or capture_of(here, "loaded") is not None
    first = capture_of(here, "forward") if restored else here.begun
    pairs = [(capture_of(whole, "forward", begun - 1), first)]
    pairs += [(capture_of(whole, at, begun), capture_of(here, at, begun)) for at in ("step", "end")]
    return next(((then, before) for then, before in pairs if then is not None and before is not None), None)
