"""Ranks for the tests of `tierd.dcp`: processes with a gloo group, forked from one that has torch loaded, and the
states that they save and load."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.nursery import context as nursery


def run(
    world: int,
    meeting: Path,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = 90.0,
    silent: Collection[int] = (),
) -> list[Any]:
    """`work(rank, *args)` on each rank of a group; what each returned or raised. Ranks that are `silent` do not end."""
    pipes = [nursery.Pipe(duplex=False) for _ in range(world)]
    processes = [
        nursery.Process(target=_rank, args=(rank, world, str(meeting), pipes[rank][1], work, args), daemon=False)
        for rank in range(world)
    ]
    for process, (_, sending) in zip(processes, pipes, strict=True):
        process.start()
        sending.close()
    try:
        found = []
        for rank, (receiving, _) in enumerate(pipes):
            if rank in silent:
                found.append(None)
                continue
            assert receiving.poll(timeout), f"rank {rank} does not end; before it: {found}"
            try:
                found.append(receiving.recv())
            except EOFError:
                found.append(RuntimeError(f"rank {rank} ended without an answer"))
        return found
    finally:
        for process in processes:
            process.join(1 if silent else 60)
            if process.is_alive():
                process.kill()


def _rank(rank: int, world: int, meeting: str, answer: Connection, work: Callable[..., Any], args: Any) -> None:
    import torch

    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        found = work(rank, *args)
    except BaseException as error:
        found = RuntimeError(f"{type(error).__name__}: {error}")
    answer.send(found)
    try:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception:  # another rank has gone already
        os._exit(1)


def checkpointer(spool: str, **more: Any) -> Any:
    import tierd

    return tierd.Checkpointer(spool, "run", **more)


# -- states ---------------------------------------------------------------------------------------------------------


def spread(seed: int, *, filled: bool = True) -> dict[str, Any]:
    """Tensors over all ranks in several ways, and what is no tensor; the same whole for any number of ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    world = torch.distributed.get_world_size()
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (world // 2, 2) if world > 1 else (1, 1))

    def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.randn(*shape, generator=generator).mul(100).to(dtype)
        return tensor if filled else torch.zeros_like(tensor)

    return {
        "rows": distribute_tensor(whole(256, 1024), line, [Shard(0)]),
        "columns": distribute_tensor(whole(33, 40, dtype=torch.bfloat16), line, [Shard(1)]),
        "uneven": distribute_tensor(whole(10, 3, dtype=torch.int32), line, [Shard(0)]),
        "square": distribute_tensor(whole(64, 48), square, [Shard(0), Shard(1)]),
        "copied": distribute_tensor(whole(17), line, [Replicate()]),
        "plain": whole(5, 5),
        "note": {"epoch": seed if filled else -1, "names": ["a", "b"] if filled else [], "none": None},
    }


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """The same with whole tensors, as bytes, to be compared bit for bit in any process."""
    import torch
    from torch.distributed.tensor import DTensor

    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found[name] = gathered(value)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = (str(whole.dtype), tuple(whole.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found[name] = value
    return found


def trained(seed: int) -> tuple[Any, Any]:
    """A model sharded by FSDP2, and its Adam after one step."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 130), nn.LayerNorm(130), nn.Linear(130, 30))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    return model, optimizer


# -- what ranks do --------------------------------------------------------------------------------------------------


def save_spread(rank: int, spools: list[str], steps: list[int], how: str = "sync", **more: Any) -> Any:
    """Save these steps; the last state, gathered."""
    from torch.distributed import checkpoint as dcp

    import tierd.dcp

    with checkpointer(spools[rank], **more) as ckpt:
        for step in steps:
            state = spread(step)
            if how == "save":  # by the Checkpointer itself, each rank its shards
                ckpt.save(step, state, metrics={"loss": step / 2}).wait()
                continue
            writer = tierd.dcp.StorageWriter(ckpt, step, {"loss": step / 2})
            if how == "sync":
                dcp.save(state, storage_writer=writer)
                continue
            kind = {}
            if how == "process":
                kind = {"async_checkpointer_type": dcp.state_dict_saver.AsyncCheckpointerType.PROCESS}
            dcp.async_save(state, storage_writer=writer, **kind).result(60)
        return gathered(state)


def load_spread(rank: int, spools: list[str], **more: Any) -> Any:
    """Load the newest: what was found, the state gathered, and the attempt that goes on."""
    import tierd.dcp
    from tierd.client.checkpointer import internals

    with checkpointer(spools[rank], **more) as ckpt:
        before = ckpt.attempt
        state = spread(0, filled=False)
        found = tierd.dcp.load(state, ckpt)
        if found is None:
            return None
        return found, gathered(state), ckpt.attempt > max(before, found.attempt), str(internals(ckpt).launch.origin)


def save_each_alone(rank: int, spools: list[str], steps: list[int]) -> Any:
    """Without collectives, each rank with metadata of its own; then load it so."""
    import torch
    from torch.distributed import checkpoint as dcp

    import tierd.dcp

    with checkpointer(spools[rank]) as ckpt:
        for step in steps:
            writer = tierd.dcp.StorageWriter(ckpt, step)
            dcp.save({"own": torch.full((50,), rank)}, storage_writer=writer, use_collectives=False)
        torch.distributed.barrier()
    return load_each_alone(rank, spools)


def load_each_alone(rank: int, spools: list[str]) -> Any:
    import torch

    import tierd.dcp

    with checkpointer(spools[rank]) as ckpt:
        state = {"own": torch.zeros(50, dtype=torch.int64)}
        found = tierd.dcp.load(state, ckpt)
        return found.step, state["own"].tolist(), [one.reason for one in found.skipped]


def save_trained(rank: int, spools: list[str], step: int) -> Any:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import tierd.dcp

    model, optimizer = trained(step)
    weights, moments = get_state_dict(model, optimizer)
    with checkpointer(spools[rank]) as ckpt:
        dcp.save({"model": weights, "optimizer": moments}, storage_writer=tierd.dcp.StorageWriter(ckpt, step))
    return gathered({"model": weights, "optimizer": moments})


def load_trained(rank: int, spools: list[str]) -> Any:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    import tierd.dcp

    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    with checkpointer(spools[rank]) as ckpt:
        found = tierd.dcp.load(state, ckpt)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    weights, moments = get_state_dict(model, optimizer)
    return found.step, gathered({"model": weights, "optimizer": moments})


def save_failing(rank: int, spools: list[str], victim: int) -> Any:
    """Save step 1; then step 2, where the disk of one rank is full. What the ranks were told, by DCP and by `close`."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    import tierd.dcp
    from tierd.dcp import save_steps

    ckpt = checkpointer(spools[rank])
    writer, reported = tierd.dcp.StorageWriter(ckpt), None
    dcp.save(spread(1), checkpoint_id="step-1", storage_writer=writer)
    if rank == victim:
        save_steps.write_all = _full
    try:
        dcp.save(spread(2), checkpoint_id="step-2", storage_writer=writer)
    except CheckpointException as error:
        reported = {number: type(one[0]).__name__ for number, one in error.failures.items()}
    return reported, _raised_by_close(ckpt)


def _raised_by_close(ckpt: Any) -> str:
    """The message of the error that `close` raises for states in no place; empty if it raises none."""
    import tierd

    try:
        ckpt.close()
    except tierd.SaveFailed as error:
        return str(error)
    return ""


def _full(*_: object) -> bool:
    raise OSError(28, "No space left on device")


def save_apart(rank: int, spools: list[str]) -> Any:
    """Save step 5 on rank 0 and step 6 on rank 1, then step 6 on both. What each was told, by DCP and by `close`."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    import tierd.dcp

    ckpt, reported = checkpointer(spools[rank]), []
    for step in (5 + rank, 6):
        try:
            dcp.save({f"{rank}": torch.ones(3)}, storage_writer=tierd.dcp.StorageWriter(ckpt, step))
        except CheckpointException as error:
            reported.append([str(one[0]) for one in error.failures.values()])
    return reported, _raised_by_close(ckpt)


def save_two(rank: int, spools: list[str]) -> None:
    """Steps 1 and 2, where each rank reads its own alone."""
    import torch
    from torch.distributed import checkpoint as dcp

    import tierd.dcp

    with checkpointer(spools[rank]) as ckpt:
        for step in (1, 2):
            state = {f"own {rank}": torch.full((500,), step)}
            dcp.save(state, storage_writer=tierd.dcp.StorageWriter(ckpt, step))


def load_own(rank: int, spools: list[str], port: int) -> Any:
    """Load as under torchrun without a process group: tierd talks through the agent's store, DCP does not talk."""
    import torch

    import tierd.dcp

    torch.distributed.barrier()  # a rank that leaves while another still connects ends that one's `init_process_group`
    torch.distributed.destroy_process_group()
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    state = {f"own {rank}": torch.zeros(500, dtype=torch.int64)}
    with checkpointer(spools[rank]) as ckpt:
        found = tierd.dcp.load(state, ckpt)
        return found.step, int(state[f"own {rank}"][0]), len(found.skipped), ckpt.attempt
