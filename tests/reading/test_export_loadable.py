"""`torch.load` takes an export of format `torch` by default, and no value is lost without a word."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.saved import put
from support.world import part

import tierd
from tierd.cli import run
from tierd.core.errors import StateMismatch
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

RUN = "run"


def saved(home: Path, *ranks: dict[str, Any]) -> str:
    """Return the URL of a tier with one checkpoint."""

    async def work() -> None:
        store = FileStore(home / "tier")
        for rank, state in enumerate(ranks):
            await put(Spool(home / "spool"), part(3, rank=rank, world=len(ranks)), state, store)
        await store.aclose()

    (home / "tier").mkdir()
    asyncio.run(work())
    return f"file://{home}/tier"


def exported(home: Path, url: str, **more: Any) -> tuple[Any, Any]:
    """Return the state as `torch.load` gives it, and the result of the export."""
    with tierd.open(url, RUN) as reader:
        done = reader.export(home / "out", "torch", **more)
    return torch.load(home / "out" / "state.pt"), done


def test_generators_of_a_process_become_tensors(tmp_path, capsys):
    url = saved(tmp_path, {"model": {"weight": torch.ones(3)}, "rng": tierd.RngState()})
    kept = np.random.get_state(legacy=False)
    assert run(["export", url, "--run", RUN, "--format", "torch", "--to", str(tmp_path / "out")]) == 0
    assert "converted, because torch.load refuses these types by default: rng.numpy.state.key (numpy.ndarray)" in (
        capsys.readouterr().out.replace("\n", " ")
    )
    rng = torch.load(tmp_path / "out" / "state.pt")["rng"]
    assert np.array_equal(rng["numpy"]["state"]["key"].numpy(), kept["state"]["key"])
    assert rng["python"] == random.getstate() and torch.equal(rng["torch"], torch.get_rng_state())
    key = rng["numpy"]["state"]["key"].numpy()
    np.random.set_state({**rng["numpy"], "state": {**rng["numpy"]["state"], "key": key}})


LOADED = {
    "array": (np.arange(6.0).reshape(2, 3), torch.arange(6.0).double().reshape(2, 3), "numpy.ndarray"),
    "array of one number": (np.array(7, np.uint16), torch.tensor(7, dtype=torch.uint16), "numpy.ndarray"),
    "empty array": (np.zeros((0, 2), np.float32), torch.zeros(0, 2), "numpy.ndarray"),
    "array of another byte order": (np.arange(3, dtype=">i4"), torch.arange(3, dtype=torch.int32), "numpy.ndarray"),
    "complex array": (np.ones(2, np.complex128), torch.ones(2, dtype=torch.complex128), "numpy.ndarray"),
    "number of NumPy": (np.float32(0.1), float(np.float32(0.1)), "numpy.float32"),
    "text of NumPy": (np.str_("text"), "text", "numpy.str_"),
    "bytes of NumPy": (np.bytes_(b"a"), b"a", "numpy.bytes_"),
    "deque": (deque([1, 2], 5), [1, 2], "collections.deque"),
    "defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}, "collections.defaultdict"),
    "frozenset": (frozenset([1, 2]), {1, 2}, "frozenset"),
    "no bytes": (b"", b"", None),
    "long bytes": (b"a" * 100_000, b"a" * 100_000, None),
    "mappings": (OrderedDict(a=Counter("aab")), OrderedDict(a=Counter("aab")), None),
    "plain": (
        (1, 2.5, None, True, 1j, "a", {3}, torch.float16),
        (1, 2.5, None, True, 1j, "a", {3}, torch.float16),
        None,
    ),
    "long integer": (1 << 2000, 1 << 2000, None),
}


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, each) for index, name in enumerate(LOADED) for each in ("entry", ("dict", "tuple", "list")[index % 3])],
)
def test_value_is_loaded_with_its_value(tmp_path, name, where):
    value, wanted, kind = LOADED[name]
    inside = {"entry": value, "dict": {"x": value}, "tuple": (1, value), "list": [value, torch.ones(2)]}[where]
    path = {"entry": "entry", "dict": "entry.x", "tuple": "entry.1", "list": "entry.0"}[where]
    found, done = exported(tmp_path, saved(tmp_path, {"entry": inside, "weight": torch.ones(3)}))
    found = found["entry"]
    found = {"entry": lambda: found, "dict": lambda: found["x"], "tuple": lambda: found[1], "list": lambda: found[0]}[
        where
    ]()
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(found, wanted)
    else:
        assert found == wanted
    assert done.converted == (() if kind is None else (f"{path} ({kind})",)) and done.left_out == ()


REFUSED = {
    "texts": np.array(["a", "bc"]),
    "moments": np.array(["2020-01-01"], "M8[D]"),
    "moment": np.datetime64("2020-01-01"),
    "wide floats": np.zeros(2, np.longdouble),
    "range": range(3),
    "slice": slice(1, 2),
    "longer integer": 1 << 3000,
    "generator": torch.Generator(),
    "member": {"a": {(1, b""): 2}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_torch_load_refuses_is_named_and_left_out(tmp_path, capsys, name):
    url = saved(tmp_path, {"entry": REFUSED[name], "weight": torch.ones(3), "row": (REFUSED[name], 5)})
    assert run(["export", url, "--run", RUN, "--format", "torch", "--to", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "left out, because torch.load refuses them by default: " in shown and "entry" in shown and "row.0" in shown
    found = torch.load(tmp_path / "out" / "state.pt")
    assert torch.equal(found["weight"], torch.ones(3)) and found["row"][1] == 5
    if name == "member":
        assert found["entry"] == {"a": {}}
    else:
        assert "entry" not in found and found["row"][0] is None


def test_json_names_all_that_was_left_out_and_converted(tmp_path, capsys):
    url = saved(tmp_path, {"ranges": [range(n) for n in range(9)], "sets": [frozenset([n]) for n in range(9)]})
    command = ["export", url, "--run", RUN, "--format", "torch", "--to"]
    assert run([*command, str(tmp_path / "first")]) == 0
    assert "(9 in all, which --json names)" in capsys.readouterr().out
    assert run([*command, str(tmp_path / "second"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["left_out"] == [f"ranges.{n}" for n in range(9)]
    assert done["converted"] == [f"sets.{n} (frozenset)" for n in range(9)]


def test_entry_of_which_nothing_is_left_is_refused(tmp_path):
    url = saved(tmp_path, {"generator": torch.Generator(), "weight": torch.ones(3)})
    with pytest.raises(StateMismatch, match="weights_only=True"):
        exported(tmp_path, url, only="generator")
    assert not (tmp_path / "out").exists()


def test_generator_is_named_and_left_out_of_every_format(tmp_path):
    states = [{"weight": torch.ones(3), "more": {"generator": torch.Generator().manual_seed(n)}} for n in (1, 2)]
    url = saved(tmp_path, *states)
    for format in ("torch", "dcp", "safetensors"):
        with tierd.open(url, RUN) as reader:
            assert reader.export(tmp_path / format, format).left_out == ("more.generator",)
    assert torch.load(tmp_path / "torch" / "state.pt")["more"] == {}


def test_names_that_lost_a_prefix_are_reported_without_it(tmp_path):
    url = saved(
        tmp_path, {"model": {"module.scores": np.arange(3), "module.range": range(2), "module.w": torch.ones(1)}}
    )
    found, done = exported(tmp_path, url, only="model", strip="module.")
    assert torch.equal(found["scores"], torch.arange(3)) and found.keys() == {"scores", "w"}
    assert done.converted == ("scores (numpy.ndarray)",) and done.left_out == ("range",)


def test_tensors_in_tuples_of_an_imported_archive_are_exported(tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "tier").mkdir()
    state = {"pair": (torch.ones(2), 3), "deep": [{"row": ((torch.zeros(1), None),)}], "weight": torch.ones(3)}
    torch.save(state, tmp_path / "files" / "step_1.pt")
    url = f"file://{tmp_path}/tier"
    assert run(["import", str(tmp_path / "files"), "--run", RUN, "--to", url]) == 0
    found, done = exported(tmp_path, url)
    assert torch.equal(found["pair"][0], torch.ones(2)) and found["pair"][1] == 3
    assert torch.equal(found["deep"][0]["row"][0][0], torch.zeros(1)) and found["deep"][0]["row"][0][1] is None
    assert done.left_out == done.converted == () and type(found["pair"]) is tuple
    with tierd.open(url, RUN) as reader:
        assert set(reader.export(tmp_path / "tensors", "safetensors").left_out) == {"pair.1", "deep.0.row.0.1"}
