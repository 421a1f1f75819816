"""Fingerprints of replicated tensors: equal for equal bytes, and changed by each flipped bit."""

from __future__ import annotations

import random

import pytest
import torch

from tierd.client.saving.fingerprints import ReplicaFingerprints, sums_of
from tierd.state.tensor_file import DTYPES


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    changed = tensor.clone()
    data = changed.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 4099])
def test_each_flipped_bit_changes_both_kinds_of_fingerprint(dtype, count):
    size = count * dtype.itemsize
    is_bool = dtype == torch.bool  # of which only the lowest bit of a byte is used
    content = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    tensor = (content % 2 if is_bool else content).view(dtype)
    dice = random.Random(count)
    bits = {0, 8 * size - 1, *(dice.randrange(8 * size) for _ in range(20))}
    for bit in {bit // 8 * 8 for bit in bits} if is_bool else bits:
        changed = flipped(tensor, bit)
        assert not torch.equal(sums_of(tensor), sums_of(changed))
        assert fingerprint(tensor) != fingerprint(changed)
    assert torch.equal(sums_of(tensor), sums_of(tensor.clone())) and fingerprint(tensor) == fingerprint(tensor.clone())


def fingerprint(tensor: torch.Tensor) -> str:
    fingerprints = ReplicaFingerprints({"a": tensor})
    fingerprints.take()
    return fingerprints.result()["a"]


def test_small_tensors_of_a_device_have_the_fingerprint_of_their_bytes(monkeypatch):
    monkeypatch.setattr("tierd.state.cuda.api.device_of", lambda tensor: tensor.device)
    tensors = {
        "bias": torch.arange(48.0),
        "step": torch.tensor(3.0),
        "view": torch.arange(60.0).view(6, 10).t(),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "large": torch.zeros(4096),
    }
    fingerprints = ReplicaFingerprints(tensors).result()
    monkeypatch.undo()
    assert fingerprints.pop("large").startswith("sum:") and len(fingerprints) == 4
    assert fingerprints == {name: fingerprint(tensors[name]) for name in fingerprints}


def test_layout_in_memory_does_not_matter():
    tensor = torch.arange(6000.0).view(60, 100)
    assert fingerprint(tensor) == fingerprint(tensor.t().contiguous().t())
    assert torch.equal(sums_of(tensor), sums_of(tensor.t().contiguous().t()))


def test_tensors_to_leave_are_taken_later():
    early, late = torch.zeros(3000), torch.zeros(3000)
    fingerprints = ReplicaFingerprints({"early": early, "late": late})
    fingerprints.take(leave={"late"})
    early += 1
    late += 1
    fingerprints.take()
    assert fingerprints.result() == {"early": fingerprint(torch.zeros(3000)), "late": fingerprint(torch.ones(3000))}
