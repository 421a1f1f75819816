"""The small files by which programs find their newest checkpoint: `latest`, a tracker, `checkpoint`, links of ranks.

Pure: a pointer's text is a function of the unit's path. Sources: as in `programs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierd.watching.listing import joined
from tierd.watching.programs import COMPOSER, DEEPSPEED, MEGATRON, TENSORFLOW


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file, or a link if `link`, with its text or target."""

    path: str
    text: str
    link: bool = False


def pointers(program: str, path: str, files: Sequence[str]) -> Iterator[Pointer]:
    """Yield the pointers to a unit.

    Args:
        program: the program's name.
        path: the unit's path from the directory.
        files: the paths of its files.
    """
    home, _, name = path.rpartition("/")
    if program == DEEPSPEED.program:
        yield Pointer(joined(home, "latest"), name)
    elif program == MEGATRON.program:
        iteration = re.fullmatch(r"iter_0*(\d+)", name)
        yield Pointer(joined(home, "latest_checkpointed_iteration.txt"), iteration[1] if iteration else name)
    elif program == TENSORFLOW.program:
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        text = f'model_checkpoint_path: "{quoted}"\nall_model_checkpoint_paths: "{quoted}"\n'
        yield Pointer(joined(home, "checkpoint"), text)
    elif program == COMPOSER.program:
        for file in files:
            own = file.rpartition("/")[2]
            if match := re.fullmatch(r".+-rank(\d+)(\.pt|\.tar)?", own):
                yield Pointer(joined(home, f"latest-rank{match[1]}{match[2] or ''}"), own, link=True)
