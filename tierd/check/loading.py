"""Find what the process's data loaders show of the cause: how far they are, and how their samplers are set.

Invariant: pure. A loader that begins anew is no cause where a sampler or a dataset knows its own position, and has the
same one as uninterrupted: the loop makes another loader then, and goes on from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierd.check.finding import StateFinding
from tierd.check.history import Taken
from tierd.check.kinds import data_kind, kind_of_path, position_of, same, values
from tierd.check.texts import both_texts

_OF_DATASET = re.compile(r"(\w+) of the DataLoader of \1\b")


def loader_findings(then: Taken, before: Taken, first_step: int, symptom: str) -> Iterator[StateFinding]:
    """Report what differs in the loaders before the first step after a resume.

    Args:
        then: the uninterrupted run at the same moment.
        symptom: as for `evidence`.
    """
    moment = f"{'before' if before.at == 'forward' else 'after'} step {first_step}"
    for path, was in then.loaders.items():
        now = before.loaders.get(path)
        if now is None or same(was, now):
            continue
        loader = position_of(path)
        if loader is not None:
            if symptom == "samples" and not _knows_its_position(then, before):
                yield StateFinding(
                    "position",
                    path,
                    f"{path}: {now.text} {moment}, {was.text} uninterrupted: the position of its sampler or dataset is "
                    "not in the checkpoint, and the loop does not go on from there",
                    lost=True,
                )
            continue
        kind = "generator" if was.text.startswith("generator") else data_kind(path, was, now)
        # Right samples were drawn in the right order, so that only a dataset's attributes and generators may explain a
        # loss. A sampler may begin elsewhere, because the loop gives it the position.
        if symptom == "samples" or (kind in ("data", "generator") and _OF_DATASET.match(path)):
            actual_text, expected_text = both_texts(now, was)
            yield StateFinding(
                kind, path, f"{path}: {actual_text} {moment}, {expected_text} uninterrupted", moved=kind == "generator"
            )


def _knows_its_position(then: Taken, before: Taken) -> bool:
    uninterrupted = {path: leaf for path, leaf in values(then).items() if kind_of_path(path, then.kinds) == "position"}
    uninterrupted |= {path: leaf for path, leaf in then.loaders.items() if data_kind(path, leaf, leaf) == "position"}
    killed = values(before) | before.loaders
    equal = {path for path, leaf in uninterrupted.items() if any(leaf.sample) and same(leaf, killed.get(path))}
    # If another loader is as far as uninterrupted, then that position is of its data.
    return not any(map(position_of, equal)) and bool(equal)
