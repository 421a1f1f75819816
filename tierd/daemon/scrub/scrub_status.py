"""What the scrub tells of itself, apart from it, because the commands that show it need none of its work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The progress of the scrub.

    Attributes:
        oldest: when the copy was verified whose verification is longest ago, RFC 3339; None: there is no copy, or
            scrubbing is off.
        due: copies that were not read within the period.
        doing: the copy that is being read; None: no copy.
    """

    oldest: str | None
    due: int
    doing: str | None
