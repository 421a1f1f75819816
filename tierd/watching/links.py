"""Decide where a link of a listed directory may lead. Pure: a link's text decides, and nothing is opened here.

A cache of the Hugging Face Hub (huggingface_hub 1.2, `file_download.py` `_get_pointer_path`, `_create_symlink`) has
each file of a snapshot as a link: `models--org--name/snapshots/COMMIT/model.safetensors -> ../../blobs/DIGEST`.

Invariant: a link leads nowhere out of the repository in whose cache it lies; any other link, nowhere out of the
directory that the user named.
"""

from __future__ import annotations

import re
from posixpath import dirname, join, normpath

_REPOSITORY = re.compile(r"(?P<repository>.*/(?:models|datasets|spaces)--[^/]+)/(?P<inside>[^/]+)(?:/|$)")


def repository(path: str) -> str | None:
    """Return the directory of a Hub repository's cache if this absolute path lies in its `snapshots` or `refs`."""
    match = _REPOSITORY.match(path)
    return match["repository"] if match and match["inside"] in ("snapshots", "refs") else None


def is_bookkeeping(path: str) -> bool:
    """Whether an absolute path is one of a Hub repository's cache by which only its snapshots are kept.

    `blobs` has their files without names, and `.no_exist` an empty file for each that the repository lacks.
    """
    match = _REPOSITORY.match(path)
    return match is not None and match["inside"] != "snapshots"


def limit(path: str, root: str) -> str:
    """Return the directory that a link must not lead out of. Both paths are absolute."""
    return repository(path) or root


def target(path: str, text: str) -> str:
    """Return the absolute path to which a link leads, if no directory on it is a link."""
    return normpath(join(dirname(path), text))


def is_within(path: str, directory: str) -> bool:
    """Whether an absolute path lies below a directory."""
    return path.startswith(f"{directory.rstrip('/')}/")
