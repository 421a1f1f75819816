"""Transformers' own `from_pretrained` loads what `tierd export --format hf` wrote, shards and their index included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.saved import put
from support.world import part

import tierd
from tierd.exporting import format_writers
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(300)]


async def test_from_pretrained_loads_the_shards_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=500, n_positions=32)
    saved = transformers.GPT2LMHeadModel(config)
    (tmp_path / "tier").mkdir()
    store = FileStore(tmp_path / "tier")
    await put(Spool(tmp_path / "spool"), part(3), {"model": saved.state_dict(), "step": 3}, store)
    await store.aclose()
    monkeypatch.setattr(format_writers, "SHARD_BYTES", 40_000)
    with tierd.open(f"file://{tmp_path / 'tier'}", "run") as reader:
        reader.export(tmp_path / "hf", "hf", only="model")
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    config.save_pretrained(tmp_path / "hf")

    torch.manual_seed(4)  # a weight that is not loaded would be another
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    wanted, found = saved.state_dict(), loaded.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
