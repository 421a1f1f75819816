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
        self._logged_links: set[str] = set()

    def see(self, tree: Tree, listing: Listing) -> None:
        """Log the new ones of a listing in one line."""
        fresh = {path for path, entry in listing.entries.items() if entry.kind == "link"} - self._logged_links
        self._logged_links |= fresh
        if targets := tree.leading_out(sorted(fresh)):
            path, target = next(iter(targets.items()))
            log.warning(
                "%s/%s leads to %s, and is not followed: if a program saves there, watch that directory as a run of "
                "its own%s",
                self._directory,
                path,
                target,
                f"; and {len(targets) - 1} more links" if targets.keys() - {path} else "",
            )
