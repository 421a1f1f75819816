"""What a sample of tensors shows of a write to them, and what it costs nobody."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tierd.client.saving.write_sampling import _WHOLE, DeferredTensors, TensorSample

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.float8_e5m2, torch.int64]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    drawn = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return drawn.view(dtype).view(shape)


def noted(live: dict[str, torch.Tensor]) -> TensorSample:
    return TensorSample(DeferredTensors(live), live)


def compare(sample: TensorSample, live: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> list[str]:
    return sample.compare(live, copies, torch.cuda.current_stream)()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (64, 64), (512, 600)], ids=str)
def test_equal_bits_are_equal_nan_and_all(dtype, shape):
    live = {"a": noise(dtype, *shape)}
    assert compare(noted(live), live, {"a": live["a"].clone()}) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_a_small_tensor_shows(dtype):
    live = noise(dtype, _WHOLE // torch.empty(0, dtype=dtype).element_size())
    both = {"a": live, "b": live}
    for at in (0, live.numel() // 3, live.numel() - 1):
        copy = live.clone()
        copy.view(torch.uint8)[at * live.element_size()] ^= 1
        assert compare(noted(both), both, {"a": live.clone(), "b": copy}) == ["b"]


@pytest.mark.parametrize(
    "shape", ["flat", "channels last", "transposed", "a view with gaps", "complex with gaps", "small with gaps"]
)
def test_write_to_all_of_a_tensor_shows_in_any_copied_layout(shape):
    live = {
        "flat": lambda: torch.randn(300_000),
        "channels last": lambda: torch.randn(8, 64, 32, 32).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(500, 600).t(),
        "a view with gaps": lambda: torch.randn(400, 1000)[:, 100:900],
        "complex with gaps": lambda: torch.randn(400, 1000, dtype=torch.complex128)[:, 100:900],
        "small with gaps": lambda: torch.randn(4, 10)[:, 1:9],
    }[shape]()
    other = torch.randn(100_000)
    both = {"a": live, "b": other}
    sample = noted(both)
    assert compare(sample, both, {name: one.contiguous().clone() for name, one in both.items()}) == []
    live.add_(1)
    # All of the copy is from after the write, or nearly all of it: nothing in the copy tells.
    assert compare(sample, both, {name: one.contiguous().clone() for name, one in both.items()}) == ["a"]


def test_where_it_looks_is_drawn_anew_and_from_no_generator_of_training():
    """What one look misses, another finds; the state of training's own dice is not touched."""
    live = {"a": torch.zeros(200_000)}
    copies = {"a": live["a"].clone()}
    states = random.getstate(), torch.get_rng_state()
    found = set()
    for _ in range(400):
        sample = noted(live)
        live["a"][77_000:87_000] += 1  # a twentieth
        found.add(bool(compare(sample, live, copies)))
    assert found == {False, True}
    assert (random.getstate(), torch.get_rng_state().tolist()) == (states[0], states[1].tolist())


class CallCount(TorchDispatchMode):
    """Counts the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_for(count: int) -> tuple[int, int]:
    """The operators of a sample of so many tensors, and of its comparison. Gaps stand for a device: both are read by
    torch, and not by address.
    """
    live = {f"{size} {number}": noise(torch.float32, size, 8)[:, :6] for number in range(count) for size in (50, 900)}
    with CallCount() as calls:
        sample = noted(live)
        sampled = calls.number
        assert compare(sample, live, {}) == []
    return sampled, calls.number - sampled


def test_sampled_tensor_costs_one_operator():
    few, many = calls_for(10), calls_for(110)
    assert [more - less for more, less in zip(many, few, strict=True)] == [200, 200]
