"""tierd under `torch.distributed.checkpoint`: a writer for `dcp.save` and `dcp.async_save`, a reader for `dcp.load`.

    dcp.save(state, storage_writer=tierd.dcp.StorageWriter(ckpt, step, metrics={"loss": loss}))
    found = tierd.dcp.load(state, ckpt)  # the newest verified checkpoint, for the current number of ranks

Invariant: this module only re-exports names. Importing it loads torch; importing `tierd` does not.
"""

from __future__ import annotations

from tierd.dcp.dcp_loading import load
from tierd.dcp.storage_reader import StorageReader
from tierd.dcp.storage_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "load"]
