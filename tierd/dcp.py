"""tierd under `torch.distributed.checkpoint`: a writer for `dcp.save` and `dcp.async_save`, a reader for `dcp.load`.

    dcp.save(state, storage_writer=tierd.dcp.StorageWriter(ckpt, step, metrics={"loss": loss}))
    found = tierd.dcp.load(state, ckpt)  # the newest verified checkpoint, for as many ranks as there are now

Law: names only; importing this loads torch, importing `tierd` does not.
"""

from __future__ import annotations

from tierd.client.dcp.load import load
from tierd.client.dcp.reader import StorageReader
from tierd.client.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "load"]
