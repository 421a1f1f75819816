"""One value that may explain why a resumed launch differs."""

from __future__ import annotations

import msgspec


class StateFinding(msgspec.Struct, frozen=True):
    """One value that was not restored (`lost`), or that differs since.

    `says` has its path and its values at both moments. `moved` tells that the uninterrupted run changes it as well, and
    `late` that it was captured after the step, so that the difference may follow from another value. `weak` tells that
    it is an attribute of the user's own object, of which many change nothing.
    """

    kind: str
    path: str
    says: str
    lost: bool = False
    weak: bool = False
    moved: bool = False
    late: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether it cannot follow from another value."""
        return self.lost or not (self.moved or self.late)
