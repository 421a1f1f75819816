"""Arenas lie on the NUMA node of the device that copies into them, where there are several and nothing objects."""

from __future__ import annotations

import errno
import logging
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tierd
from tierd.client.checkpointer import internals
from tierd.client.saving import slots
from tierd.client.saving.slots import Slot
from tierd.spool.arena import Arena
from tierd.state import cuda

GPU = torch.device("cuda", 1)


class Kernel(slots.Kernel):
    """Remembers what was asked, as (bytes, node)."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.policy = False
        self.refuses = 0

    def has_policy(self) -> bool:
        return self.policy

    def prefer(self, address, size, node):
        assert address % 4096 == 0
        if self.refuses:
            raise OSError(self.refuses, "mbind")
        self.asked.append((size, node))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(slots, "kernel", Kernel())
    return slots.kernel


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Gives the machine NUMA nodes, and a node to each of its GPUs."""

    def make(nodes: str, *gpus: str) -> None:
        files = {f"bus/pci/devices/0000:{0x10 + at:02x}:00.0/numa_node": node for at, node in enumerate(gpus)}
        files |= {f"devices/system/node/{name}": nodes for name in ("has_memory", "has_cpu")}
        for name, text in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        monkeypatch.setattr(slots, "SYSFS", tmp_path / "sys")

    return make


def test_an_arena_is_placed_before_its_pages_are_there(fake, kernel, machine, monkeypatch):
    machine("0-1", "0", "1")
    order, real = [], Arena.prefault
    monkeypatch.setattr(Arena, "prefault", lambda arena, *args: (order.append(list(kernel.asked)), real(arena, *args)))
    slot = Slot(0)
    assert slot.reserve(1 << 20, GPU)
    assert order == [[(1 << 20, 1)]]
    assert slot.reserve(2 << 20)  # for the same device
    assert kernel.asked[1:] == [(slot.arena.size, 1)], "what grew has some room"
    assert slot.reserve(1 << 20, GPU) and len(kernel.asked) == 2, "it has all its pages"
    slot.drop()


def test_saves_and_restores_of_a_state_on_a_device_are_placed(fake, kernel, machine, spool):
    machine("0-1", "0", "1")
    state = {"x": fake.tensor(torch.ones(5000), 1)}
    for number in range(2):
        with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
            checkpointer.restore(state)
            internals(checkpointer).pipeline.drain()
            assert {node for _, node in kernel.asked} == {1}, "made ready, or read into"
            kernel.asked.clear()
            checkpointer.save(number, state).wait(timeout=60)
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        checkpointer.save(9, state).wait(timeout=60)  # nobody made anything ready
    assert {node for _, node in kernel.asked} == {1}


def test_a_state_on_the_host_lies_anywhere(kernel, machine, local):
    machine("0-1", "0", "1")
    local.restore({"x": torch.ones(10)})
    local.save(1, {"x": torch.ones(10)}).wait(timeout=60)
    assert not kernel.asked


def test_who_was_started_with_a_policy_keeps_it(fake, kernel, machine):
    machine("0-1", "0", "1")
    kernel.policy = True
    slot = Slot(0)
    assert slot.reserve(1 << 20, GPU) and not kernel.asked
    slot.drop()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_kernel_that_refuses_is_no_error(fake, kernel, machine, caplog, number):
    """As in a container: the default profile of some takes these calls away."""
    machine("0-1", "0", "1")
    kernel.refuses = number
    caplog.set_level(logging.DEBUG, "tierd")
    slot = Slot(0)
    assert slot.reserve(1 << 20, GPU)
    assert [(record.levelno, "lies on any NUMA node" in record.message) for record in caplog.records] == [(10, True)]
    slot.drop()


def test_a_machine_that_does_not_say_is_no_error(fake, kernel, machine, monkeypatch):
    machine("0-1", "0")  # no such device, as where sysfs shows none
    slots.place_near_device(Arena(4096), GPU)
    monkeypatch.setattr(fake, "pci_address", lambda device: None)
    slots.place_near_device(Arena(4096), GPU)
    monkeypatch.setattr(fake, "pci_address", lambda device: _fails())
    slots.place_near_device(Arena(4096), GPU)
    assert not kernel.asked


def _fails() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_where_a_device_is_on_the_bus(monkeypatch):
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert cuda.Cuda().pci_address(GPU) == "0000:dc:00.0"
    del found.pci_bus_id  # torch 2.6
    assert cuda.Cuda().pci_address(GPU) is None


# -- this machine's kernel --------------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() not in slots._NUMBERS, reason="no number is known for these calls here")
def test_kernel_takes_the_given_node_for_a_preference():
    arena = Arena(1 << 20)
    try:
        assert slots.Kernel().has_policy() is False
        node = int(Path("/sys/devices/system/node/has_memory").read_text().strip().replace(",", "-").split("-")[0])
        slots.Kernel().prefer(torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr(), arena.size, node)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            pytest.skip(f"this kernel, or this container, refuses: {error}")
        raise
    arena.prefault()
    reported = [
        line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines() if "memfd:tierd" in line
    ]
    assert f"prefer:{node}" in reported
    with pytest.raises(OSError, match="mbind"):
        slots.Kernel().prefer(torch.frombuffer(arena.view, dtype=torch.uint8).data_ptr(), arena.size, 4000)
    assert os.fstat(arena.fd).st_blocks * 512 == 1 << 20


def test_another_machines_calls_have_no_number_here(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(OSError, match="s390x"):
        slots.Kernel().has_policy()
