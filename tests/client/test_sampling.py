"""What a sample of tensors shows of a write to them, and what it costs nobody."""

from __future__ import annotations

import random

import pytest
import torch

from tierd.client.sampling import _GRAIN, _WHOLE, Sample

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.float8_e5m2, torch.int64]


def changed(live: dict[str, torch.Tensor], copies: dict[str, torch.Tensor]) -> list[str]:
    return Sample(live, copies, torch.cuda.current_stream).changed()


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    drawn = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return drawn.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (64, 64), (512, 600)], ids=str)
def test_equal_bits_are_equal_nan_and_all(dtype, shape):
    live = noise(dtype, *shape)
    assert changed({"a": live}, {"a": live.clone()}) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_of_a_small_tensor_shows(dtype):
    live = noise(dtype, _WHOLE // torch.empty(0, dtype=dtype).element_size())
    for at in (0, live.numel() // 3, live.numel() - 1):
        copy = live.clone()
        copy.view(torch.uint8)[at * live.element_size()] ^= 1
        assert changed({"a": live, "b": live}, {"a": live.clone(), "b": copy}) == ["b"]


@pytest.mark.parametrize("shape", ["flat", "channels last", "transposed", "a view with gaps"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_mixture_of_a_large_tensor_shows_where_its_parts_are_of_a_grain_or_at_an_end(shape, threads):
    live = {
        "flat": lambda: torch.randn(300_000),
        "channels last": lambda: torch.randn(8, 64, 32, 32).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(500, 600).t(),
        "a view with gaps": lambda: torch.randn(400, 1000)[:, 100:900],
    }[shape]()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    noise = random.Random(1)
    try:
        for _ in range(20):
            copy = live.contiguous().clone()
            flat, grain = copy.view(-1), _GRAIN // 4
            begin = noise.choice([0, noise.randrange(flat.numel() - grain), flat.numel() - 1])
            flat[begin : begin + (1 if begin in (0, flat.numel() - 1) else grain)] += 1
            assert changed({"a": live}, {"a": copy}) == ["a"], begin
    finally:
        torch.set_num_threads(before)


def test_where_it_looks_is_drawn_anew_and_from_no_generator_of_training():
    """What one look misses, another finds; the state of training's own dice is not touched."""
    live = torch.randn(200_000)
    copy = live.clone()
    copy[77_000:77_256] += 1  # a 256th of the distance between two elements that are compared
    states = random.getstate(), torch.get_rng_state()
    found = {bool(changed({"a": live}, {"a": copy})) for _ in range(4_000)}
    assert found == {False, True}
    assert (random.getstate(), torch.get_rng_state().tolist()) == (states[0], states[1].tolist())


def test_complex_and_shared_tensors_are_what_the_file_holds():
    live = torch.view_as_real(torch.randn(3000, dtype=torch.complex64))
    copy = live.clone()
    assert changed({"a": live}, {"a": copy}) == []
    copy[0, 0] += 1
    assert changed({"a": live}, {"a": copy}) == ["a"]
