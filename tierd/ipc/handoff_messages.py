"""The messages of the hand-off socket, on which a trainer gives its snapshots to the daemon.

A message is one packet with its descriptors, and so is an answer; `ipc/messages.py` has the rules of both sockets.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tierd.core.ids import PartId
from tierd.core.seal import MAX_MANIFEST_SIZE
from tierd.ipc.messages import Hello, Measured, Request

MAX_PACKET = 16 << 10  # bytes


class Lend(Request, frozen=True, kw_only=True, tag="lend"):
    """Hand-off: the attached descriptor is the arena in which snapshots of `slot` will be. No answer."""

    slot: Annotated[int, Meta(ge=0, lt=64)]


class Persist(Request, frozen=True, kw_only=True, tag="persist"):
    """Hand-off: the arena of `slot` holds a snapshot; commit it as a part of the spool.

    The arena begins with the tensor file. The attached descriptor holds the manifest, still without files, and then the
    state tree. Answer: `direct`, `recycled`, as in `commit.CommittedPart`.

    Attributes:
        part: the part to commit.
        slot: the slot whose arena holds the snapshot.
        tensors: the size of the tensor file, in bytes.
        manifest: the size of the manifest, in bytes.
        tree: the size of the state tree, in bytes.
        blocked_s: the time for which `save` blocked training, in seconds; until now if it has not returned. None: not
            measured.
        asked_s: the time since `save` was called, in seconds; None: not measured.
    """

    part: PartId
    slot: Annotated[int, Meta(ge=0, lt=64)]
    tensors: Annotated[int, Meta(ge=1)]
    manifest: Annotated[int, Meta(ge=1, le=MAX_MANIFEST_SIZE)]
    tree: Annotated[int, Meta(ge=0)]
    blocked_s: Measured | None = None
    asked_s: Measured | None = None


class Recall(Request, frozen=True, kw_only=True, tag="recall"):
    """Hand-off: return the snapshot that a dead trainer left in its arena, and the arena with it.

    Answer: `tensors`, `manifest`, `tree` as in `Persist`, with both descriptors; the arena is then handed over as slot
    0. Error: `ObjectNotFound`.
    """

    part: PartId


class Leave(Request, frozen=True, kw_only=True, tag="leave"):
    """Hand-off: this trainer ends in order, so no process will recall its snapshots. No answer."""


AnyHanded = Hello | Lend | Persist | Recall | Leave
