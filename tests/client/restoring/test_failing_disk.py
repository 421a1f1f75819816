"""A spool whose disk corrupts what is written to it: a copy elsewhere is right, so there is no reason to step back."""

from __future__ import annotations

import errno

import msgspec
import pytest
import torch
from support.world import commit

import tierd
from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring import part_source
from tierd.client.restoring.part_source import NodeSource, observe_spool
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import StoreUnavailable
from tierd.core.ids import CheckpointId, PartId
from tierd.core.planning.inventory import Inventory
from tierd.core.timeline.run_view import run_view_of
from tierd.ipc.messages import CandidatesRequest, Fetch
from tierd.spool.spool import Spool


class Healer:
    """A daemon that says it repaired the part; the disk then shows the same wrong bytes."""

    def __init__(self, restorer: Restorer) -> None:
        self._restorer = restorer
        self.fetched: list[int] = []

    def ask(self, request, timeout_s=None, on_progress=None):
        if isinstance(request, CandidatesRequest):
            seen = run_view_of(Inventory(observe_spool(self._restorer.source.spool, "r", deep=False)[0], {}), "r")
            return {"sight": msgspec.json.decode(msgspec.json.encode(seen))}
        assert isinstance(request, Fetch)
        self.fetched.append(request.part.checkpoint.step)
        return {"tiers": ["s3"]}

    def greet(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_repaired_copy_that_reads_back_wrong_is_an_error_and_not_a_step_back(tmp_path, monkeypatch):
    with tierd.Checkpointer(tmp_path, "r", to=[]) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.full((1000,), float(step))}).wait()
    path = next(tmp_path.glob("r/*2.*/*/tensors.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    restorer = Restorer(NodeSource(Spool(tmp_path), "r", tiers=True), Ranks(0, 1))
    healer = Healer(restorer)
    monkeypatch.setattr(part_source, "DaemonConnection", lambda spool: healer)
    with pytest.raises(StoreUnavailable, match="just repaired, and reads back wrong"):
        restorer.restore(None, None)
    assert healer.fetched == [2]
    data[-1] ^= 1
    path.write_bytes(data)
    found = restorer.restore(None, None)
    assert found is not None
    assert (found.part.checkpoint.step, found.tier) == (2, "local")


def test_manifest_that_cannot_be_read_is_not_a_missing_manifest(tmp_path, monkeypatch):
    """The one manifest of the newest launch, whose other rank wrote none, is all that tells what it resumed from."""
    with tierd.Checkpointer(tmp_path, "r", to=[]) as ckpt:
        ckpt.save(1, {"x": torch.zeros(3)}).wait()
    spool = Spool(tmp_path)
    (old,) = spool.parts()
    newest = PartId(CheckpointId("r", tierd.new_attempt(), 2), 0, 2)
    commit(spool, newest, {"x": b"x"}, origin=old.checkpoint)
    real = Spool.manifest

    def manifest(self, part):
        if part == newest:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, part)

    monkeypatch.setattr(Spool, "manifest", manifest)
    restorer = Restorer(NodeSource(spool, "r", tiers=False), Ranks(0, 1))
    with pytest.raises(StoreUnavailable, match="lacks parts in the places that answered, and local did not"):
        restorer.restore(None, None)
    monkeypatch.undo()
    found = restorer.restore(None, None)
    assert found is not None
    assert found.part == old
