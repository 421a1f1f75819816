"""DCP's `.metadata` as data: what torch writes is read as it is, and whatever else is refused, in time and memory."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import time
import tracemalloc
import types

import pytest
import torch
from faults.hostile.mutation import spoiled
from support.dcp_pickles import changing, colliding, doubled, keyed, made, named, of_process
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as FormerProperties
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from tierd.core.errors import ManifestError, StateRefused
from tierd.dcp import metadata as dcp_metadata
from tierd.dcp.metadata import check_readable, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

INDEX = MetadataIndex("w" * 300, torch.Size([0, 4]), 0)
INFO = _StorageInfo("00000-of-00001/__0_0.distcp", 70_000, 1 << 40)
TENSOR = TensorStorageMetadata(
    TensorProperties(torch.bfloat16, requires_grad=True, memory_format=torch.channels_last, pin_memory=True),
    torch.Size([4, 8]),
    [ChunkStorageMetadata(torch.Size([0, 4]), torch.Size([4, 4]))],
)


def whole(**members: object) -> Metadata:
    return dataclasses.replace(Metadata({"w" * 300: TENSOR}, None, {INDEX: INFO}), **members)


def written(directory: pathlib.Path) -> bytes:
    """What torch's own writer leaves of a model, an optimizer, and values of every kind."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3, "none": None}
    state |= {
        "many": [1, torch.ones(2), {"a": (1, 2)}],
        "scalar": torch.tensor(1.0),
        "ints": {3: torch.ones(1), 4: "x"},
    }
    state |= {"last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last), "e\u0308\ud83d": torch.ones(0, 4)}
    state |= {f"{dtype}": torch.zeros(2, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    return (directory / ".metadata").read_bytes()


# -- what torch writes ------------------------------------------------------------------------------------------------


def test_metadata_that_torch_writes_is_read_as_pickle_reads_it(tmp_path):
    data = written(tmp_path)
    found = read_metadata(data, "here")
    assert found == pickle.loads(data) and len(found.storage_data) > 20
    again = read_metadata(memoryview(bytearray(data)), "here")
    assert again == found and type(again.storage_meta.checkpoint_id) in (str, pathlib.PurePosixPath)
    assert [one.index for one in again.storage_data] == [one.index for one in found.storage_data]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_that_torch_may_write_is_read(protocol):
    states = {f"key {n}": BytesStorageMetadata() for n in range(3000)} | {"w": TENSOR, 7: TENSOR}
    planner = {"w": ("w", 70_000, -(2**40), 2**70), "own": [1.5, True, None, {("a", 3): torch.int8}, torch.Size([2])]}
    found = whole(state_dict_metadata=states, planner_data=planner, version="1.0.0")
    found.storage_data |= {MetadataIndex("x" * 70_000): INFO, MetadataIndex(7): INFO}
    assert read_metadata(pickle.dumps(found, protocol), "here") == found


def test_metadata_of_each_torch_is_read_and_unknown_members_are_refused(monkeypatch):
    """torch 2.6 has neither `version`, nor `modules`, nor `transform_descriptors`; some left those out, some wrote
    None. What only a newer torch knows is refused where it matters."""
    meta = StorageMeta("/there/step-1", "save", None)
    del meta.modules
    old = whole(storage_meta=meta)
    del old.version
    found = read_metadata(pickle.dumps(old), "here")
    assert found.storage_meta == StorageMeta("/there/step-1", "save", None) and found.version is None
    extended = {"relative_path": "a", "offset": 0, "length": 1, "transform_descriptors": ["stream.zstd/1"]}
    info = _StorageInfo("a", 0, 1, ["stream.zstd/1"])
    data = pickle.dumps(whole(storage_data={INDEX: info}))
    assert list(read_metadata(data, "here").storage_data.values()) == [_StorageInfo(**extended)]

    former = dataclasses.make_dataclass("Former", [("relative_path", str), ("offset", int), ("length", int)])
    monkeypatch.setattr(dcp_metadata, "_StorageInfo", former)
    assert list(read_metadata(pickle.dumps(old), "here").storage_data.values()) == [
        former(INFO.relative_path, 70_000, 1 << 40)
    ]
    with pytest.raises(StateRefused, match="through an extension"):
        read_metadata(data, "here")
    monkeypatch.undo()
    old.checksum = "new"
    with pytest.raises(StateRefused, match="Metadata has a member 'checksum'"):
        read_metadata(pickle.dumps(old), "here")


def test_the_plans_of_ranks_that_megatron_keeps_in_its_metadata_are_not_read(monkeypatch):
    """megatron-core 0.16 adds `all_local_plans` to torch's class, and 0.15 wrote classes of its own."""
    state = {"model": {"w": torch.ones(3, 4)}, "steps": [1, 2]}
    found = whole()
    found.all_local_plans = [create_default_local_save_plan(state, is_coordinator=True)]
    assert found.all_local_plans[0].items and read_metadata(pickle.dumps(found), "here") == whole()

    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan)):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    former = module.MCoreMetadata(**vars(whole()))
    former.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 4)}}
    former.all_local_plans = [module.MCoreSavePlan(found.all_local_plans[0].items)]
    for name in ("megatron", "megatron.core", "megatron.core.dist_checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert read_metadata(pickle.dumps(former), "here") == whole()


def test_metadata_of_before_dcp_had_its_own_classes_is_read():
    properties = FormerProperties(torch.float16, pin_memory=True)
    found = read_metadata(
        pickle.dumps(whole(state_dict_metadata={"w": dataclasses.replace(TENSOR, properties=properties)})), ""
    )
    assert found.state_dict_metadata["w"].properties == TensorProperties(torch.float16, pin_memory=True)


class ByName(pickle.Pickler):
    """Pickles members of enumerations as the first releases of Python 3.11 did."""

    def reducer_override(self, one):
        return (getattr, (type(one), one.name)) if isinstance(one, enum.Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_enumeration_that_was_pickled_by_name_is_read(protocol):
    data = io.BytesIO()
    ByName(data, protocol).dump(whole())
    assert b"getattr" in data.getvalue() and read_metadata(data.getvalue(), "here") == whole()
    other = data.getvalue().replace(b"TORCH_CHANNELS_LAST", b"__init_subclass____")
    with pytest.raises(ManifestError, match="where a memory format belongs"):
        read_metadata(other, "here")


# -- what is none -----------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/tierd-evil",)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_that_would_run_something_is_refused_by_name(protocol):
    bad = Metadata({"a": Evil()}, storage_data={})
    with pytest.raises(StateRefused, match=r"there: it names posix\.system.*FileSystemReader"):
        read_metadata(pickle.dumps(bad, protocol), "there")
    with pytest.raises(StateRefused, match=r"builtins\.eval"):
        read_metadata(b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "there")


@pytest.mark.parametrize("slots", [False, True], ids=["members", "slots"])
@pytest.mark.parametrize("member", ["__qualname__", "__defaults__", "__init__", "planted"])
@pytest.mark.parametrize(
    "what",
    [
        named("Metadata"),
        named("_StorageInfo", "torch.distributed.checkpoint.filesystem"),
        named("_get_layout", "torch.serialization"),
        named("PurePosixPath", "pathlib"),
    ],
    ids=["a class", "another", "a function", "a foreign class"],
)
def test_metadata_that_would_change_its_named_objects_is_refused(what, member, slots):
    before = of_process()
    with pytest.raises(StateRefused, match=r"^there: it would change \w+\.\w+"):
        read_metadata(changing(what, member, slots), "there")
    encoding = named("_MEM_FORMAT_ENCODING") + b"K\x00\x85R"  # a member of an enumeration, had it been looked up
    with pytest.raises(StateRefused, match="where plain data belongs"):
        read_metadata(changing(encoding, member, slots), "there")
    assert of_process() == before and not hasattr(pathlib.PurePosixPath, "planted")


def test_an_instance_is_given_its_members_once():
    again = made(b"N").removesuffix(b".") + b"}b."
    with pytest.raises(StateRefused, match="it would change a PickledInstance"):
        read_metadata(again, "there")


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little")


def pairs(count: int) -> bytes:
    return b"".join(number(one) + number(other) + b"\x86N" for one, other in colliding(count))


HOSTILE = {
    "a doubled key": (keyed(b")" + b"2\x86" * 60), "opcode 0x32"),
    "a key that is doubled by its memo": (keyed(doubled()), "a dict's key is neither"),
    "a deep key": (keyed(b")" + b"\x85" * 400_000), "tuples are nested deeper"),
    "a deep key in two steps": (keyed(b")" + b"N\x86" * 400_000), "tuples are nested deeper"),
    "a long key": (keyed(b"(" + b"N" * 400_000 + b"t"), "a dict's key is neither"),
    "colliding keys": (made(b"}(" + pairs(20_000) + b"u"), "keys of a dict have one hash"),
    "doubled data": (made(doubled()), "refers to the same ones many times"),
    "deep data": (made(b"(" * 50_000), "nested deeper"),
    "deep lists": (made(b"]" * 40 + b"a" * 39), "nested deeper"),
    "a list in itself": (made(b"]q\x00h\x00a"), "nested deeper"),
    "very many empty lists": (made(b"(" + b"]" * 400_000 + b"t"), "a container for every"),
    "a long number": (made(b"\x8b\xff\xff\xff\x7f"), "opcode 0x8b"),
    "a place far off": (b"\x80\x04]r" + b"\xff" * 4 + b".", "out of turn"),
    "a place far off in text": (b"\x80\x04]p4294967295\n.", "opcode 0x70"),
    "bytes": (b"\x80\x04]B" + b"\xff" * 4 + b".", "it names 4294967295 bytes"),
    "text": (b"\x80\x04]X" + b"\xff" * 4 + b".", "it names 4294967295 bytes"),
    "long bytes": (b"\x80\x04]\x8e" + b"\xff" * 6 + b"\0\0.", "opcode 0x8e"),
    "a bytearray": (b"\x80\x05]\x96" + b"\xff" * 7 + b"\0.", "opcode 0x96"),
    "a frame": (b"\x80\x04\x95" + b"\xff" * 8 + b"].", "longer than what is left"),
}


def refused() -> dict[str, tuple[str, float, int]]:
    """How each is refused, in how many seconds of computing and bytes of memory."""
    found = {}
    for name, (data, _) in HOSTILE.items():
        begun = time.thread_time()
        with pytest.raises((StateRefused, ManifestError)) as error:
            read_metadata(data, "here")
        took = time.thread_time() - begun
        tracemalloc.start()
        with pytest.raises((StateRefused, ManifestError)):
            read_metadata(data, "here")
        found[name] = str(error.value), took, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


def test_metadata_that_would_hang_or_kill_the_trainer_is_refused_at_once():
    """In a process of its own: Python's own unpickler hangs at some of these, and dies of others."""
    script = "import json; from dcp.test_metadata import refused; print(json.dumps(refused()))"
    path = os.pathsep.join(
        [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(dcp_metadata.__file__).parents[2])]
    )
    command = [sys.executable, "-c", script]
    child = subprocess.run(command, capture_output=True, text=True, timeout=250, env=os.environ | {"PYTHONPATH": path})
    assert child.returncode == 0, (child.returncode, child.stderr[-2000:])
    found = json.loads(child.stdout)
    for name, (_, why) in HOSTILE.items():
        message, seconds, size = found[name]
        assert why in message, (name, message)
        assert seconds < 5 and size < 64 << 20, (name, seconds, size)


@pytest.mark.parametrize(
    "found",
    [
        whole(storage_data=[]),
        whole(storage_data={INDEX: "somewhere"}),
        whole(storage_data={INDEX: dataclasses.replace(INFO, offset=-1)}),
        whole(storage_data={INDEX: dataclasses.replace(INFO, length="9")}),
        whole(storage_data={INDEX: dataclasses.replace(INFO, relative_path=b"a")}),
        whole(state_dict_metadata={"w": 5}),
        whole(state_dict_metadata={"w": TensorProperties()}),
        whole(state_dict_metadata={"w": dataclasses.replace(TENSOR, size=torch.Size([1] * 300))}),
        whole(state_dict_metadata={"w": dataclasses.replace(TENSOR, size=(1, 2.5))}),
        whole(state_dict_metadata={"w": dataclasses.replace(TENSOR, chunks={})}),
        whole(state_dict_metadata={"w": dataclasses.replace(TENSOR, chunks=[None])}),
        whole(version=5),
        whole(storage_meta=StorageMeta(checkpoint_id=5)),
        [[]] * 100_000,
        {"a": 1},
    ],
    ids=lambda one: repr(one)[:60] + repr(one)[-90:],
)
def test_metadata_with_values_that_dcp_never_writes_is_refused(found):
    with pytest.raises(ManifestError, match=r"there: no metadata of DCP: .* belongs"):
        read_metadata(pickle.dumps(found), "there")


def test_bytes_that_are_cut_changed_or_garbage_are_read_as_pickle_reads_them_or_refused(tmp_path):
    data, noise, before = written(tmp_path), random.Random(17), of_process()
    taken, begun = 0, time.thread_time()
    for _ in range(2000):
        broken = spoiled(data, noise)
        try:
            found = read_metadata(broken, "there")
        except (ManifestError, StateRefused) as error:
            assert "there: " in str(error)
            continue
        taken += 1
        assert found == pickle.loads(broken)  # safe: that was just found of it
    assert taken > 20 and of_process() == before
    assert time.thread_time() - begun < 300
    for garbage in (b"", b"\x80", b"\x80\x04", b"\0" * 1000, os.urandom(5000), data[:-1], data + b"."):
        with pytest.raises(ManifestError, match="there"):
            read_metadata(garbage, "there")


class Own:
    """What no pickle of DCP's holds."""


@pytest.mark.parametrize(
    "planned", [{"own": Own()}, {(("a",),): 1}, {"own": {1, 2}}, os.system], ids=["own", "key", "set", "call"]
)
def test_metadata_that_could_not_be_read_again_is_refused_when_it_is_saved(planned):
    with pytest.raises(StateRefused, match=r"^there: .*never be loaded: planner_data holds"):
        check_readable(whole(planner_data=planned), "there")
    check_readable(whole(planner_data={"w": ("w", 1), (1, "a"): [b"x", None]}), "there")
