"""Tell a directory that is a checkpoint from one of a run, a seed or a job, which holds several. Pure."""

from __future__ import annotations

from itertools import pairwise

from tierd.watching.completeness import Directory, is_temporary
from tierd.watching.directory_layouts import claim
from tierd.watching.listing import below, joined
from tierd.watching.step_in_name import (
    are_ends_of_run,
    are_saves,
    directory_step,
    is_place_of_saves,
    is_weights,
    step_in,
)
from tierd.watching.unknown_names import is_usual


def is_checkpoint(directory: Directory) -> bool:
    """Whether a directory whose name has a step is a checkpoint, and not a place of checkpoints of other steps."""
    step = directory_step(directory.name)
    if step is None or is_of_run(directory):
        return False
    inside, outside = _steps_below(directory, step)
    return bool(outside) or (not inside and has_weights(directory))


def is_of_run(directory: Directory) -> bool:
    """Whether a directory whose name is nothing but a number is of a run, as its seed or job, and holds its saves."""
    if not directory.name.isdecimal():
        return False
    return are_ends_of_run(directory.names_below(), directory.name) or holds_saves(directory) or _is_of_seed(directory)


def _is_of_seed(candidate: Directory) -> bool:
    """Whether a directory and those with a number beside it have one save each, whose steps do not grow with it.

    GraphGym's are `0/ckpt/399.ckpt` and `1/ckpt/399.ckpt`.
    """
    if _step_inside(candidate) is None:
        return False
    names = candidate.tree[candidate.parent]
    numbers = sorted((name for name in names if name.isdecimal() and names[name].kind == "directory"), key=int)
    at = numbers.index(candidate.name)
    siblings = (
        candidate.at(joined(candidate.parent, name)) for name in numbers[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS]
    )
    steps = [_step_inside(directory) for directory in siblings if has_weights(directory)]
    saved_steps = [step for step in steps if step is not None]
    return len(saved_steps) == len(steps) > 1 and any(first >= second for first, second in pairwise(saved_steps))


def _step_inside(directory: Directory) -> int | None:
    """Return the only step of the files of weights below a directory, if it is larger than the directory's number."""
    steps = {step for name in directory.names_below() if is_weights(name) and (step := step_in(name)) is not None}
    return next((step for step in steps if step > int(directory.name)), None) if len(steps) == 1 else None


_NEIGHBOURS = 4  # directories beside one that are compared with it


def holds_saves(directory: Directory) -> bool:
    """Whether several checkpoints lie below a directory, by the names of what has weights."""
    inner = [child for name in directory.directories if (child := directory.child(name)) and has_weights(child)]
    stepped = {child.name: step for child in inner if (step := directory_step(child.name)) is not None}
    if len({step for name, step in stepped.items() if not name.isdecimal()}) > 1:
        return True
    if are_saves(filter(is_weights, directory.candidates)) or are_saves(child.name for child in inner):
        return True
    return any(is_place_of_saves(child.name) or (claim(child) is None and holds_saves(child)) for child in inner)


def _steps_below(directory: Directory, step: int) -> tuple[bool, bool]:
    """Return whether directories of other steps lie below, and whether weights lie below outside of them."""
    inside = outside = False
    for name, entry in directory.names.items():
        if is_temporary(name):
            continue
        child = directory.child(name) if entry.kind == "directory" else None
        if child is None:
            outside = outside or (entry.kind == "file" and is_weights(name))
        elif directory_step(name) not in (None, step) and has_weights(child):
            inside = True
        else:
            deeper = _steps_below(child, step)
            inside, outside = inside or deeper[0], outside or deeper[1]
    return inside, outside


def has_weights(directory: Directory) -> bool:
    """Whether weights lie below a directory, or its name says that it is a checkpoint and its files may hold some."""
    inside = (path[len(directory.path) + 1 :].split("/") for path, _ in below(directory.tree, directory.path))
    names = [pieces[-1] for pieces in inside if not any(map(is_temporary, pieces))]
    # A word such as "step" says that it is a checkpoint, whatever its program writes.
    return any(map(is_weights, names)) or not (directory.name.isdecimal() or all(is_usual(name) for name in names))
