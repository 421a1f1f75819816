"""States of DTensors, for the tests of saving and restoring them on several ranks; what ranks do with them.

The functions run in processes of `support.dcp_ranks.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import dcp_ranks

from tierd.core.errors import SaveFailed


def checkpointer(spool: str) -> Any:
    """A rank's own, on a spool with a daemon or without one."""
    has_daemon = (Path(spool) / ".tierd" / "control.sock").exists()
    return dcp_ranks.checkpointer(spool, to=None if has_daemon else [])


def square(*shape: int) -> Any:
    """The ranks as a mesh of two dimensions: four as two by two, if no other shape is given."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (2, 2), mesh_dim_names=("dp", "tp"))


def tensors(mesh: Any, seed: int) -> dict[str, Any]:
    """DTensors in many placements on a mesh of two dimensions."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    generator = torch.Generator().manual_seed(seed)

    def placed(shape: tuple[int, ...], *placements: Any, dtype: torch.dtype = torch.float32) -> Any:
        return distribute_tensor(torch.randn(shape, generator=generator).mul(99).to(dtype), mesh, placements)

    return {
        "rows": placed((64, 48), Shard(0), Replicate()),
        "both": placed((33, 40), Shard(0), Shard(1), dtype=torch.bfloat16),
        "same dimension": placed((16, 3), Shard(0), Shard(0)),
        "empty": placed((2, 3), Shard(0), Shard(0)),  # ranks 1 and 3 have nothing
        "copied": placed((17,), Replicate(), Replicate()),
        "scalar": placed((), Replicate(), Replicate(), dtype=torch.float64),
        "complex": placed((10, 2), Shard(0), Replicate(), dtype=torch.complex64),
    }


def trained(mesh: Any, seed: int, kind: str = "tp") -> tuple[Any, Any]:
    """A model under FSDP2 and its AdamW after a step: over tensor parallelism (strided shards), or as HSDP. Without a
    mesh, the same model by itself."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10), nn.LayerNorm(10))
    if mesh is not None and kind == "tp":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh is not None:
        fully_shard(model, mesh=mesh["dp"] if kind == "tp" else mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(mesh: Any, seed: int) -> dict[str, Any]:
    two_d, hybrid = trained(mesh, seed), trained(mesh, seed, "hsdp")
    return {
        "tensors": tensors(mesh, seed),
        "model": two_d[0],
        "optimizer": two_d[1],
        "hybrid": hybrid[0],
        "its optimizer": hybrid[1],
    }


def locals_of(state: dict[str, Any]) -> dict[str, Any]:
    """Every local shard as its placement and its bytes."""
    import torch
    from torch.distributed.tensor import DTensor

    found: dict[str, Any] = {}
    for name, value in named("", state):
        if isinstance(value, torch.Tensor):
            where = None
            if isinstance(value, DTensor):
                where = str(value.placements), str(value.device_mesh), tuple(value.shape), value.stride()
                value = value.to_local()
            found[name] = where, *bits(value)
    return found


def named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a state comes to, below mappings and objects that give a state, by name."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from named(f"{name}/{key}", inner)
    else:
        yield name, value


def bits(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor."""
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), data


def save_and_restore(rank: int, spools: list[str]) -> Any:
    """Save step 1 (blocking) and step 2 (behind training), restore the second into a state of other values. Every bit
    is the same, and every live local shard still lies where it lay."""
    import torch

    mesh = square()
    with checkpointer(spools[rank]) as ckpt:
        ckpt.save(1, whole(mesh, 1)).wait()
        state = whole(mesh, 2)
        ckpt.attach(state["optimizer"], state["its optimizer"])
        ckpt.save(2, state).wait()
        assert not ckpt.stats.failed
        expected = locals_of(state)
    other = whole(mesh, 3)
    live = [*other["tensors"].values(), *other["model"].parameters(), *other["hybrid"].parameters()]
    before = [one.to_local().data_ptr() for one in live]
    assert locals_of(other).keys() == expected.keys() and locals_of(other) != expected
    with checkpointer(spools[rank]) as ckpt:
        assert ckpt.restore(other).step == 2
    assert locals_of(other) == expected
    assert [one.to_local().data_ptr() for one in live] == before
    with checkpointer(spools[rank]) as ckpt:  # no optimizer state and no live tensor to be copied into
        fresh = whole(mesh, 4)
        fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
        fresh["tensors"] = None
        ckpt.restore(fresh)
    assert locals_of(fresh) == expected
    return {name: one[:3] for name, one in expected.items()}


def restore_otherwise(rank: int, spools: list[str]) -> list[str]:
    """What ranks are told that restore onto other meshes and placements than `save_and_restore` saved from."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from tierd import StateMismatch

    reported = []
    meshes = (
        init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    )
    states = [tensors(mesh, 1) for mesh in meshes]
    states.append({"rows": tensors(square(), 1)["rows"].redistribute(placements=[Replicate(), Shard(0)])})
    states.append({"rows": tensors(square(), 1)["rows"].full_tensor()})
    for state in states:
        with checkpointer(spools[rank]) as ckpt:
            before = locals_of(state)
            try:
                ckpt.restore({"tensors": state}, only="tensors")
                reported.append("nothing")
            except StateMismatch as error:
                reported.append(str(error))
            assert locals_of(state) == before
    with checkpointer(spools[rank]) as ckpt:
        try:
            ckpt.restore({"tensors": None, "extra": tensors(meshes[1], 1)["rows"]})  # a mesh, and another one
        except StateMismatch as error:
            reported.append(str(error))
    return reported


def refused(rank: int, spools: list[str]) -> list[str]:
    """Why DTensors cannot be saved."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from tierd import StateRefused

    mesh = square()
    states = [
        DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()]),
        DTensor.from_local(torch.ones(3 + rank), mesh, [Shard(0), Shard(0)], shape=torch.Size((16,)), stride=(1,)),
        DTensor.from_local(torch.ones(4, device="meta"), mesh, [Shard(0), Replicate()]),
    ]
    reported = []
    with checkpointer(spools[rank]) as ckpt:
        for step, tensor in enumerate(states):
            try:
                ckpt.save(step, {"x": {"y": tensor}})
                reported.append("nothing")
            except StateRefused as error:
                reported.append(str(error))
    return reported


def counting(state: dict[str, Any]) -> tuple[Callable[[], int], Any]:
    """A function that captures the state, sees that this is what a fresh capture gives, and counts how often it was
    walked; and the capturer that it asks."""
    from tierd.state import capturer as module

    walked: list[int] = []
    real = module.Encoder

    def counted(*args: Any) -> Any:
        walked.append(1)
        return real(*args)

    module.Encoder = counted  # type: ignore[misc]
    capturer = module.Capturer()

    def again() -> int:
        before = len(walked)
        found = capturer.capture(state)
        walks = len(walked) - before
        fresh = module.Capturer().capture(state)
        tree = found.tree()
        assert tree == fresh.tree() and list(found.tensors) == list(fresh.tensors)
        found.check(tree)
        assert found.layout == fresh.layout
        for name, one in found.tensors.items():
            other = fresh.tensors[name]
            assert bits(one) == bits(other) and (name in found.copies or one.data_ptr() == other.data_ptr())
        here, there = (sorted(name for name, _ in some.dtensors) for some in (found, fresh))
        assert here == there and here
        return walks

    return again, capturer


def captures(rank: int) -> list[Any]:
    """Which changes between two captures of a state have it walked anew, and how often the quick way is right."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = square()
    state = whole(mesh, 1)
    again, capturer = counting(state)
    first = capturer.capture(state)
    reported = []
    reported.append(again())
    assert first.tree() == capturer.capture(state).tree()
    rows = state["tensors"]["rows"]
    state["tensors"]["rows"] = rows.redistribute(placements=[Replicate(), Shard(0)])  # of the same local shape
    reported.append(again())
    reported.append(again())
    state["tensors"]["rows"] = rows.to_local()
    reported.append(again())
    with torch.no_grad():
        state["tensors"]["both"] = state["tensors"]["both"].clone()  # placed alike, elsewhere
    reported.append(again())
    return reported


def with_values(mesh: Any, seed: int) -> dict[str, Any]:
    """DTensors, and values that are packed."""
    return {
        "tensors": tensors(mesh, seed),
        "losses": [seed / 7, *(n / 3 for n in range(1500))],
        "order": tuple(n * seed for n in range(1500)),
        "table": {f"key {n}": n + seed for n in range(1100)},
        "raw": bytes([seed]) * 70_000,
        "some raw": [bytearray([seed]) * 70_000, seed],
    }


def grows(rank: int) -> list[Any]:
    """How often a state of DTensors and packed values is walked anew as it grows; each capture is as a fresh one."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = square()
    state = with_values(mesh, 1)
    again, capturer = counting(state)
    capturer.capture(state)

    def placed(size: int) -> Any:
        return distribute_tensor(torch.full((size,), float(size)), mesh, [Shard(0), Shard(0)])

    reported = []
    for step in range(3):
        state["losses"].append(float(step))  # there is room for some in the tensor file
        state["tensors"][f"plain {step}"] = torch.full((64,), float(step))
        reported.append(again())
    state["tensors"]["new"] = placed(40)
    reported.append(again())
    state["losses"].append(1.0)
    state["tensors"]["behind a DTensor"] = torch.ones(64)
    state["at the root"] = torch.ones(8)
    reported.append(again())
    state["both"] = {"sharded": placed(24), "more": [0.5] * 2000}
    reported.append(again())
    state["both"]["plain"] = torch.ones(16)
    state["both"]["more"].append(2.0)
    reported.append(again())
    state["losses"] += [0.25] * 5000  # more than there is room for
    reported.append(again())
    state["tensors"]["the same memory"] = state["both"]["sharded"].to_local()
    reported.append(again())
    return reported


def save_values(rank: int, spools: list[str]) -> None:
    """Save a state of DTensors and packed values twice, and restore the second in place."""
    mesh = square(2, 1)
    with checkpointer(spools[rank]) as ckpt:
        state = with_values(mesh, 2)
        ckpt.save(1, state).wait()
        state["losses"].append(5.0)
        ckpt.save(2, state).wait()
    other = with_values(mesh, 3)
    losses, rows = other["losses"], other["tensors"]["rows"].to_local()
    with checkpointer(spools[rank]) as ckpt:
        assert ckpt.restore(other).step == 2
    assert other["losses"] is losses and rows.data_ptr() == other["tensors"]["rows"].to_local().data_ptr()
    assert gathered(other) == gathered(state)


def load_values(rank: int, spools: list[str]) -> Any:
    """Load it through DCP; what was right to expect, and what came."""
    import torch.distributed

    import tierd.dcp

    mesh = square(torch.distributed.get_world_size(), 1)
    expected, state = with_values(mesh, 2), with_values(mesh, 3)
    expected["losses"].append(5.0)
    with checkpointer(spools[rank]) as ckpt:
        assert tierd.dcp.load(state, ckpt)
    return gathered(expected), gathered(state)


def torn(rank: int, spools: list[str]) -> list[str]:
    """Write to an attached parameter between `save` and `step`, in several ways; what the saves came to."""
    import torch
    from torch.distributed.fsdp import fully_shard

    reported = []
    mesh = square()
    for step, write in enumerate(
        (_in_place, _behind, _together)
    ):  # to a large tensor: a small one may be copied after the write
        model = fully_shard(torch.nn.Linear(256, 256), mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        ckpt = checkpointer(spools[rank])
        ckpt.save(10 * step, state).wait()
        ckpt.attach(optimizer)
        save = ckpt.save(10 * step + 1, state)
        with torch.no_grad():
            write(model)
        try:
            save.wait(timeout=60)
            reported.append("kept")
        except Exception as error:
            reported.append(str(error))
        with suppress(SaveFailed):  # the step that was refused is in no place
            ckpt.close()
    return reported


def _in_place(model: Any) -> None:
    next(model.parameters()).mul_(1.0)  # no element changes: only the DTensor's version counter shows it


def _behind(model: Any) -> None:
    next(model.parameters()).to_local().data.add_(1.0)


def _together(model: Any) -> None:
    import torch

    torch._foreach_add_(list(model.parameters()), 1.0)  # torch counts this neither on a DTensor nor on its local shard


def gathered_at_the_save(rank: int, spools: list[str]) -> list[str]:
    """Save and restore while FSDP2's outermost group is gathered, as a forward pass leaves it: its parameters are whole
    tensors then, until the next backward pass."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 96), fully_shard(nn.Linear(96, 64), mesh=mesh))
        fully_shard(model, mesh=mesh)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    def learn(state: dict[str, Any]) -> None:
        state["model"](torch.ones(4, 64)).square().sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    def evaluate(state: dict[str, Any]) -> str:
        with torch.no_grad():
            state["model"](torch.ones(4, 64))
        return " ".join(sorted({type(one).__name__ for one in state["model"].parameters()}))

    reported = []
    state, expected = made(1), {}
    with checkpointer(spools[rank]) as ckpt:
        for step in range(
            4
        ):  # the first is walked, and later ones are taken the quick way; two of them behind training
            if step == 2:
                ckpt.attach(state["optimizer"])
            learn(state)
            reported.append(evaluate(state))
            save = ckpt.save(step, state)
            expected[step] = locals_of(state)
            save.wait(timeout=60)
    for step in range(4):
        other = made(2)
        reported.append(evaluate(other))
        with checkpointer(spools[rank]) as ckpt:
            ckpt.restore(other, step=step)
        assert locals_of(other) == expected[step], step
    return reported


def example(rank: int, spool: str, steps: int) -> float:
    from examples.sharded import train

    return train(spool, steps)


# -- resharded ------------------------------------------------------------------------------------------------------


def resharded_state(mesh: Any, seed: int, rank: int) -> dict[str, Any]:
    """What `whole` has, and what is no DTensor: the same on all ranks, but for the entry `own`."""
    import numpy
    import torch

    return whole(mesh, seed) | {
        "plain": torch.arange(1000) * seed,
        "note": {"epoch": seed, "names": ["a", "b"] * seed, "array": numpy.arange(7) * seed},
        "own": torch.full((5,), rank * seed),
        "mine": f"rank {rank}",
    }


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Every tensor whole, as torch puts it together, and every other value, by name."""
    import torch
    from torch.distributed.tensor import DTensor

    whole = ((name, one.full_tensor() if isinstance(one, DTensor) else one) for name, one in named("", state))
    return {name: bits(one) if isinstance(one, torch.Tensor) else repr(one) for name, one in whole}


def save_whole(rank: int, spools: list[str], seed: int) -> Any:
    """Save one step of `resharded_state`; what it was."""
    state = resharded_state(square(), seed, rank)
    with checkpointer(spools[rank]) as ckpt:
        ckpt.save(seed, state).wait()
    return gathered(state)


def load_whole(rank: int, spools: list[str], shape: tuple[int, int], names: list[str] | None = None) -> Any:
    """Load it onto another mesh, into optimizers that have not taken a step; what came."""
    import torch

    import tierd.dcp

    state = resharded_state(square(*shape), 77, rank)
    for name, model in (("optimizer", "model"), ("its optimizer", "hybrid")):
        state[name] = torch.optim.AdamW(state[model].parameters())
    state = {name: state[name] for name in names or state}
    with checkpointer(spools[rank]) as ckpt:
        try:
            found = tierd.dcp.load(state, ckpt)
        except tierd.StateMismatch as error:
            return str(error)
        assert found is not None and ckpt.attempt > found.attempt
        return found.step, found.tier, gathered(state)


def load_alone(rank: int, spools: list[str]) -> Any:
    """Load into a model that nothing shards, as an evaluation does; what came."""
    import torch

    import tierd.dcp

    model, _ = trained(None, 77)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkpointer(spools[rank]) as ckpt:
        assert tierd.dcp.load({"model": model, "optimizer": optimizer}, ckpt)
    return gathered({"model": model, "optimizer": optimizer})


def save_stages(rank: int, spools: list[str]) -> None:
    """Two pipeline stages of two ranks each, whose optimizers number their parameters from 0."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = square()["tp"]  # ranks 0 and 1, ranks 2 and 3
    stage = rank // 2
    moments = distribute_tensor(torch.full((8,), float(stage)), mesh, [Shard(0)])
    named = distribute_tensor(torch.full((8,), float(stage)), mesh, [Shard(0)])
    with checkpointer(spools[rank]) as ckpt:
        ckpt.save(1, {"optimizer": {"state": {0: moments}}, "by name": {f"stage {stage}": named}}).wait()


def load_stages(rank: int, spools: list[str]) -> Any:
    """What a load of both stages' names gives, on two ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import tierd
    import tierd.dcp

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    by_name = {f"stage {stage}": distribute_tensor(torch.full((8,), -1.0), mesh, [Shard(0)]) for stage in range(2)}
    numbered = {"optimizer": {"state": {0: distribute_tensor(torch.full((8,), -1.0), mesh, [Shard(0)])}}}
    with checkpointer(spools[rank]) as ckpt:
        tierd.dcp.load({"by name": by_name}, ckpt)
    with checkpointer(spools[rank]) as ckpt:
        try:
            tierd.dcp.load(numbered, ckpt)
            reported = "nothing"
        except tierd.StateMismatch as error:
            reported = str(error)
    return [one.full_tensor().tolist() for one in by_name.values()], reported


# -- what an older version left ---------------------------------------------------------------------------------------


def restore_fixture(rank: int, spool: str) -> Any:
    """Restore `tests/format/v1-dtensor`; the tree that is written today, what was saved, and what came."""
    import make_v1_dtensor as maker
    import torch

    import tierd

    state = maker.state(rank)
    expected = locals_of(state)
    with torch.no_grad():
        for tensor in (*state["model"].values(), state["optimizer"]["state"][0]["step"]):
            tensor.zero_()
    state["step"] = state["rank"] = -1
    with tierd.Checkpointer(spool, "demo", to=[]) as ckpt:
        assert ckpt.restore(state).step == 100
    assert (state["step"], state["rank"], state["optimizer"]["lr"]) == (100, rank, 1e-3)
    return maker.files(rank)["state.json"], expected, locals_of(state)


def load_fixture(rank: int, spool: str) -> Any:
    """Load it in one process, into tensors that nothing shards; what came."""
    import make_v1_dtensor as maker
    import torch

    import tierd
    import tierd.dcp

    model = {name: torch.zeros_like(maker.whole(name)) for name in maker.TENSORS}
    with tierd.Checkpointer(spool, "demo", to=[]) as ckpt:
        assert tierd.dcp.load({"model": model}, ckpt)
    return {name: bits(tensor) for name, tensor in model.items()}
