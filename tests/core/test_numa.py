"""Which NUMA node is next to a device, from what sysfs says."""

from __future__ import annotations

import pytest

from tierd.core.numa import node_near_device, pci_address


@pytest.mark.parametrize(
    ("node", "with_memory", "with_cpu", "expected"),
    [
        ("1\n", "0-1\n", "0-1\n", 1),
        ("0\n", "0-1\n", "0-1\n", 0),
        ("3\n", "0,2-3\n", "0-7\n", 3),
        ("-1\n", "0-1\n", "0-1\n", None),  # the firmware does not say
        ("0\n", "0\n", "0\n", None),  # there is no other
        ("0\n", "0-8\n", "0\n", None),  # the others are devices' memory
        ("2\n", "0-3\n", "0-1\n", None),  # the device's own memory
        ("1\n", "0,2\n", "0-2\n", None),  # no memory there
        ("", "0-1\n", "0-1\n", None),
        ("1\n", "\n", "\n", None),
        ("1\n", "0-x\n", "0-1\n", None),
        ("1\n", "0-99999999999\n", "0-1\n", 1),
    ],
)
def test_the_node_beside_a_device(node, with_memory, with_cpu, expected):
    assert node_near_device(node, with_memory, with_cpu) == expected


def test_a_pci_address_is_written_as_sysfs_writes_it():
    assert pci_address(0, 0xDC, 0) == "0000:dc:00.0"
    assert pci_address(0x10000, 1, 0x1F) == "10000:01:1f.0"
