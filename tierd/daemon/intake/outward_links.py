"""Links that lead out of a watched directory: none is followed, and a program may save through one."""

from __future__ import annotations

import logging
from pathlib import Path

from tierd.watching.files import Tree
from tierd.watching.listing import Listing

log = logging.getLogger("tierd.daemon")


class OutwardLinks:
    """The links of one directory over successive listings."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[str] = set()

    def see(self, tree: Tree, listing: Listing) -> None:
        """Log the new ones of a listing in one line."""
        fresh = {path for path, entry in listing.entries.items() if entry.kind == "link"} - self._seen
        self._seen |= fresh
        if found := tree.leading_out(sorted(fresh)):
            path, target = next(iter(found.items()))
            log.warning(
                "%s/%s leads to %s, and is not followed: if a program saves there, watch that directory as a run of "
                "its own%s",
                self._directory,
                path,
                target,
                f"; and {len(found) - 1} more links" if found.keys() - {path} else "",
            )
