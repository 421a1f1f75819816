"""Find buffers of a data pipeline that are filled again after a load that restored them.

Invariant: pure. A buffer is judged by its items alone: after one step it still holds most of those that were restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tierd.check.finding import StateFinding
from tierd.check.history import Taken
from tierd.check.kinds import DATA, kind_of_path, same, values
from tierd.check.leaves import ValueLeaf

_MIN_ITEMS = 4  # items; of fewer, chance decides how many are left


def filled_again(saved: Taken, loaded: Taken, then: Taken, before: Taken, first_step: int) -> Iterator[StateFinding]:
    """Report the first buffer that the load restored, and of which less than half as much is left as uninterrupted."""
    at_save, at_load, uninterrupted, killed = (values(capture) for capture in (saved, loaded, then, before))
    for path, leaf in at_load.items():
        kind = kind_of_path(path, then.kinds | before.kinds, a=leaf, b=leaf)
        if kind not in DATA or not same(at_save.get(path), leaf) or path not in uninterrupted or path not in killed:
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
