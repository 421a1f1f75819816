"""`tierd export`, measured as a process: its peak of resident memory does not grow with the state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
SMALL, LARGE = 64, 320  # MiB of state
GROWTH = 128  # MiB; a process that held the state whole would grow by 256
MOST = 1024  # MiB, as docs/howto/export.md says

# In a process of its own, because it holds the state three times.
SAVE = """
import asyncio, sys
from pathlib import Path
import support.world, torch
from support.saved import put
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
home, mib = Path(sys.argv[1]), int(sys.argv[2])
support.world.CHUNK = 32 << 20  # as a trainer's
(home / "tier").mkdir(parents=True)
sizes = [mib // 2, *[32] * (mib // 64)]
state = {f"w{n}": torch.empty(size << 20, dtype=torch.uint8).random_() for n, size in enumerate(sizes)}
async def work():
    store = FileStore(home / "tier")
    await put(Spool(home / "spool"), support.world.part(1), {"model": state}, store)
    await store.aclose()
asyncio.run(work())
"""
# The peak is the kernel's for this program alone: `getrusage` of a child counts what its parent held before the exec.
EXPORT = """
import sys
from tierd.cli import run
code = run(sys.argv[1:])
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(code, int(peak) >> 10)
"""


def peak(tier: Path, out: Path, format: str) -> int:
    """The peak of an export's resident memory, in MiB."""
    options = ["export", f"file://{tier}", "--run", "run", "--to", str(out), "--format", format]
    done = subprocess.run([sys.executable, "-c", EXPORT, *options], capture_output=True, text=True, timeout=250)
    code, mib = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr[-3000:]
    return int(mib)


def test_the_peak_does_not_grow_with_the_state(tmp_path: Path) -> None:
    for mib in (SMALL, LARGE):
        home = [tmp_path / str(mib), str(mib)]
        subprocess.run([sys.executable, "-c", SAVE, *home], cwd=Path(__file__).parents[1], check=True)
    for format in ("safetensors", "torch"):
        out = tmp_path / format
        peaks = {mib: peak(tmp_path / str(mib) / "tier", out / str(mib), format) for mib in (SMALL, LARGE)}
        assert sum(path.stat().st_size for path in (out / str(LARGE)).iterdir()) > LARGE * MIB
        assert peaks[LARGE] < MOST and peaks[LARGE] - peaks[SMALL] < GROWTH, (format, peaks)
