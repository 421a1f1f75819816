"""How often a checkpoint becomes durable over a link that is slower than the saves, and what the spool holds meanwhile.

    python -m benchmarks.slow_link --to 's3://bucket/prefix?endpoint=http://127.0.0.1:8000'

A proxy of this process lets `--rate` bytes a second through to the endpoint, shared by all connections. A trainer saves
`--megabytes` of noise every `--every` seconds; spool and tier keep three. A flush should take the time that the link
needs for its bytes, and should send what was the newest complete checkpoint when it began.
Writes `results/slow_link.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch

import tierd
from tierd.bench.report_page import write_result

KEEP = 3
_PIECE = 16 << 10  # bytes
_DURABLE = re.compile(r"^(\S+ \S+) INFO tier: durable r step (\d+) .* stored as ([0-9.]+) (B|KiB|MiB|GiB)$")
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Link:
    """A proxy on a port of its own, in a thread."""

    def __init__(self, host: str, port: int, rate: float) -> None:
        self._to, self._rate, self._free = (host, port), rate, 0.0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_PIECE)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        await asyncio.gather(self._pump(reader, back, slow=True), self._pump(there, writer, slow=False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        try:
            while piece := await reader.read(_PIECE):
                if slow:
                    now = time.monotonic()
                    self._free = max(self._free, now) + len(piece) / self._rate
                    await asyncio.sleep(self._free - now)
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


def measure(asked: argparse.Namespace, room: Path) -> dict[str, Any]:
    """The run, and what became durable when."""
    url = urlsplit(asked.to)
    endpoint = urlsplit(parse_qs(url.query)["endpoint"][0])
    link = Link(str(endpoint.hostname), endpoint.port or 80, asked.rate)
    (room / "tierd.toml").write_text(
        f'spool = "{room / "spool"}"\n[retention]\nkeep_last = {KEEP}\n[[tier]]\nname = "tier"\n'
        f'url = "{url._replace(query="").geturl()}?endpoint=http://127.0.0.1:{link.port}"\n'
        f"[tier.retention]\nkeep_last = {KEEP}\n"
    )
    log = room / "log"
    command = [sys.executable, "-m", "tierd", "run", "--config", str(room / "tierd.toml")]
    saved: list[tuple[float, int]] = []
    most = 0
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as daemon:
        try:
            with tierd.Checkpointer(room / "spool", run="r") as ckpt:
                end, step = time.time() + asked.minutes * 60, 0
                while time.time() < end:
                    step += 1
                    state = {"w": torch.randint(0, 255, (round(asked.megabytes * 1e6),), dtype=torch.uint8)}
                    ckpt.save(step, state).wait(timeout=60)
                    saved.append((time.time(), step))
                    time.sleep(asked.every)
                    most = max(most, len(list((room / "spool" / "r").glob("0*"))))
        finally:
            daemon.terminate()
    return _judged(asked, log.read_text(), saved, most)


def _judged(asked: argparse.Namespace, log: str, saved: list[tuple[float, int]], most: int) -> dict[str, Any]:
    durable = []
    for line in log.splitlines():
        if (match := _DURABLE.match(line)) and len(durable) < len(saved):
            at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()  # noqa: DTZ007  # as it was logged
            durable.append((at, int(match[2]), float(match[3]) * _UNITS[match[4]]))
    last = saved[-1][0]
    durable = [one for one in durable if one[0] <= last]
    gaps = [(b[0] - a[0]) / (b[2] / asked.rate) for a, b in itertools.pairwise(durable)]
    behind = []
    for (begun, _, _), (_, step, _) in itertools.pairwise(durable):
        newest = max((one for at, one in saved if at <= begun), default=0)
        behind.append(newest - step)
    return {
        "rate_bytes_per_s": asked.rate,
        "state_bytes": round(asked.megabytes * 1e6),
        "every_s": asked.every,
        "saves": len(saved),
        "durable": [step for _, step, _ in durable],
        "gap_over_link_time": [round(gap, 3) for gap in gaps],
        "steps_behind_the_newest_at_the_beginning": behind,
        "most_copies_in_the_spool": most,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, help="an S3 URL with an http endpoint")
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--minutes", type=float, default=5.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-link-") as room:
        found = measure(asked, Path(room))
    write_result(Path(__file__).parent / "results", "slow_link", found)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
