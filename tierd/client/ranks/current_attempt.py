"""The attempt under which a launch saves now: its name, and the steps that its saves have claimed.

Invariant: several threads, and a signal handler between any two lines, get one name, and each step is one save's. No
lock is held, because a thread that a fork does not copy could hold it, or the code that a handler interrupts.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.core.ids import PartId


class CurrentAttempt:
    """The saves of a launch between two restores. A restore replaces the whole object, so no save sees a mixture.

    Args:
        name: None if the first use names the attempt (`named`).

    Attributes:
        claims: the part that a save writes or has written, by step. That object itself is the save's claim.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name: dict[None, str] = {} if name is None else {None: name}
        self.claims: dict[int, PartId] = {}

    @property
    def name(self) -> str | None:
        """The attempt's name; None before its first use."""
        return self._name.get(None)

    def named(self, make: Callable[[], str]) -> str:
        """Return the name. The first of several callers that have made one at once decides."""
        return self.name or self._name.setdefault(None, make())  # `setdefault` is atomic

    def renamed(self, name: str | None) -> CurrentAttempt:
        """Return an attempt of another name that has the same claims."""
        attempt = CurrentAttempt(name)
        attempt.claims = self.claims
        return attempt

    def claim(self, part: PartId) -> bool:
        """Claim the step of `part`, unless another object has claimed it; return whether it is this one's."""
        return self.claims.setdefault(part.checkpoint.step, part) is part

    def release(self, part: PartId) -> None:
        """Give up the claim, if it is this very object's."""
        if self.claims.get(part.checkpoint.step) is part:
            del self.claims[part.checkpoint.step]
