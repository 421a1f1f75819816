"""What is measured while flushing, and what it decides."""

from __future__ import annotations

import pytest
from support.world import part

from tierd.codec.chunk_codec import RAW
from tierd.core.manifest import Chunk
from tierd.daemon.transfer.shared_encoding import Throughput, ThroughputMeter
from tierd.spool.file_io import digest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_is_bytes_over_the_time_in_which_something_moved():
    clock = Clock()
    meter = ThroughputMeter(clock, enough=1)
    assert meter.rate is None
    with meter.measured(100):
        clock.now += 2
        with meter.measured(300):  # at once with the first: two seconds are not counted twice
            clock.now += 2
    clock.now += 1000  # nothing moves
    with pytest.raises(OSError), meter.measured(10**9):
        clock.now += 1
        raise OSError
    assert meter.rate == 400 / 5


def test_old_measurements_fade():
    clock = Clock()
    meter = ThroughputMeter(clock, enough=1)
    for size in [1000] * 1000 + [10] * 1000:
        with meter.measured(size):
            clock.now += 1
    assert meter.rate == pytest.approx(10, rel=0.2)


def one_chunk() -> tuple[Chunk, bytes]:
    raw = bytes(range(100)) * 1000
    return Chunk(size=len(raw), xxh3_128=digest(raw)), raw


def paced(link: float, encoder: float) -> Throughput:
    """A pace that has measured these rates, in bytes per second."""
    throughput = Throughput()
    for meter, rate in ((throughput.link("s3"), link), (throughput._encoder, encoder)):
        meter._bytes, meter._seconds = rate, 1.0
    throughput._raw, throughput._stored = 1e9, 0.5e9
    return throughput


def codecs(throughput: Throughput, count: int = 200) -> list[str]:
    chunk, raw = one_chunk()
    found = []
    for _ in range(count):
        found.append(throughput.encode(part(0), chunk, raw, throughput.should_compress()).stored.codec)
        throughput._encoder._bytes, throughput._encoder._seconds = 1e9, 1.0
    return found


def test_chunks_are_packed_while_the_link_is_slower_than_the_encoder():
    assert RAW not in codecs(paced(link=0.2e9, encoder=1e9))


def test_it_does_not_where_the_link_outruns_it_but_tries_now_and_then():
    found = codecs(paced(link=5e9, encoder=1e9))
    assert 0 < len(found) - found.count(RAW) < 10
    assert "the link takes 5.0 GB/s" in paced(link=5e9, encoder=1e9).compression("s3").why


def test_slow_tier_beside_a_fast_tier_gets_packed_chunks():
    throughput = paced(link=5e9, encoder=1e9)
    slow = throughput.link("slow")
    slow._bytes, slow._seconds = 1e7, 1.0
    assert RAW not in codecs(throughput)


def test_before_anything_is_known_it_packs():
    assert RAW not in codecs(Throughput(), 3)
