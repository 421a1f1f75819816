"""Read the training step from the name of a checkpoint that another program wrote."""

from __future__ import annotations

import re

_ENDING = re.compile(r"(\.weights)?\.(h5|hdf5|keras|ckpt|pt|pth|bin|pkl|npz|safetensors)$|-rank\*\.\w+$")
_STEP = (r"step[=_-]?(\d+)", r"ba(\d+)", r"iter_(\d+)")
_LAST = re.compile(r"(?:[-_=]|(?<!\d)\.|^)(\d+)$")
_DATE = re.compile(r"(?<!\d)(?:19|20)\d\d(?:-\d\d-\d\d|_\d\d_\d\d|(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01]))(?!\d)")


def step_in(name: str) -> int | None:
    """Return the step in a name: the number after the word, or at the name's end. A date or a fraction is none."""
    name = _ENDING.sub("", name)
    for pattern in _STEP:
        if match := re.search(pattern, name):
            return int(match[1]) if len(match[1]) < 19 else None
    match = _LAST.search(_DATE.sub("", name).rstrip("-_."))
    return int(match[1]) if match and len(match[1]) < 19 else None
