"""NUMA: the node of a machine whose memory is next to a PCI device, decided from the contents of sysfs."""

from __future__ import annotations


def pci_address(domain: int, bus: int, device: int) -> str:
    """The name of a device's first function in `/sys/bus/pci/devices`."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_near_device(node: str, with_memory: str, with_cpu: str) -> int | None:
    """The NUMA node to prefer for memory that a device copies to; None if none is known or there is only one.

    `node` is the content of the device's `numa_node`, -1 if the firmware does not say; `with_memory` and `with_cpu` are
    those of the machine's `has_memory` and `has_cpu`, such as "0-1,8". A node without a CPU is not chosen, because it
    is a device's own memory, or slower than the others.
    """
    try:
        number, nodes = int(node), _numbers(with_memory) & _numbers(with_cpu)
    except ValueError:
        return None
    return number if number in nodes and len(nodes) > 1 else None


def _numbers(text: str) -> set[int]:
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), min(int(last or first), 1 << 12) + 1))
    return numbers
