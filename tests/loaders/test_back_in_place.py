"""Programs that know nothing of tierd are watched, killed in the middle of a save, damaged, prepared and started again
with their own resume: their losses are those of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import layouts
from support.programs import ROWS, SCRIPTS, table
from support.script import Script
from support.warm import WarmInterpreter, heavy_imports

from tierd.watching.unit import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "programs.md"
_LIMIT_S = 600
_TRIES = 4  # launches, until one is killed within its save and not a moment later, as a quick save allows it seldom


def train(warm: WarmInterpreter, script: Script, out: Path, log: Path) -> None:
    out.mkdir(exist_ok=True)
    running = warm.start(script.whole, [str(out), str(log)], log.with_suffix(".output"))
    assert warm.wait(running, _LIMIT_S) == 0, said(log)


def killed(warm: WarmInterpreter, script: Script, out: Path, log: Path) -> None:
    """Train until the third save has begun, and kill the program there, with the processes that it started."""
    out.mkdir()
    running = warm.start(script.whole, [str(out), str(log)], log.with_suffix(".output"))
    with open(os.pidfd_open(running)) as descriptor:
        end = time.monotonic() + _LIMIT_S
        while not any(out.glob(script.third)):
            assert time.monotonic() < end and not select.select([descriptor], [], [], 0.0005)[0], said(log)
    os.killpg(running, signal.SIGKILL)
    warm.wait(running, _LIMIT_S)


def said(log: Path) -> str:
    return log.with_suffix(".output.err").read_text()[-3000:]


def losses(log: Path) -> dict[int, float]:
    found = [line.split() for line in log.read_text().splitlines()]
    return {int(step): float(loss) for step, loss in found}


def tierd(*arguments: object, code: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "tierd", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode in code, done.stderr[-3000:]
    return done.stdout


def flip(unit: Path) -> None:
    """Flip a bit in the middle of a unit's largest file, as a disk does."""
    paths = [path for path in unit.rglob("*") if path.is_file()] if unit.is_dir() else [unit]
    path = max(paths, key=lambda one: one.stat().st_size)
    before, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def prepared(out: Path, tier: Path) -> dict[str, dict[str, object]]:
    units = json.loads(tierd("prepare", out, "--run", "run", "--to", tier, "--json"))["units"]
    return {one["path"]: one for one in units}


@pytest.mark.loaders
@pytest.mark.timeout(3 * _LIMIT_S)
@pytest.mark.parametrize("name", [name for name, one in SCRIPTS.items() if sys.version_info < one.below])
def test_it_resumes_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    if not script.is_installed:
        pytest.skip(f"{script.package} is not installed")
    with WarmInterpreter(heavy_imports(script.whole), script.environment) as warm:
        resumes_as_if_nothing_had_happened(warm, script, tmp_path)


def resumes_as_if_nothing_had_happened(warm: WarmInterpreter, script: Script, tmp_path: Path) -> None:
    train(warm, script, tmp_path / "whole", tmp_path / "whole.log")
    wanted = losses(tmp_path / "whole.log")
    assert sorted(wanted) == list(range(1, 9)) and len(set(wanted.values())) == 8
    found = dict[str, dict[str, object]]()
    for number in range(_TRIES):
        out, log, tier = (tmp_path / f"{kind}{number}" for kind in ("out", "log", "tier"))
        killed(warm, script, out, log)
        if len(losses(log)) == len(wanted) or not any(out.glob(script.pointer or "*")):
            continue  # it came to its end, or was killed while nothing named a checkpoint, as can be without tierd
        tier.mkdir()
        # 9: one was not taken, because it is torn
        tierd("watch", out, "--run", "run", "--to", tier, "--until-idle", code=(0, 9))
        [newest] = out.glob(script.newest)
        flip(newest)
        found = prepared(out, tier)
        # "unknown": left, because the program's pointer names another one
        torn = any((one["moved"] and not one["replaced"]) or one["verdict"] == "unknown" for one in found.values())
        if script.renamed or torn:
            break
    assert found, "no launch was killed in time"
    path = str(newest.relative_to(out))
    assert (found[path]["verdict"], found[path]["replaced"]) == ("damaged", True), found
    resumed = tmp_path / "resumed.log"
    train(warm, script, out, resumed)
    first, then = losses(log), losses(resumed)
    done = min(then) - 1
    assert done == (4 if torn else 6) or (script.renamed and done in (4, 6)), (first, then)
    assert {step: first[step] for step in range(1, done + 1)} | then == wanted


def test_each_program_has_its_row_and_the_page_has_the_rows() -> None:
    sharded = ", sharded"
    assert {one.name.removesuffix(sharded) for one in ROWS} == {one.program for one in LAYOUTS} - {
        "HF model",
        "Hugging Face Hub",
        "TensorFlow SavedModel",
        "directory",
    }  # no program resumes from these
    assert set(SCRIPTS) <= {one.name for one in ROWS}
    known = {write.__name__: program for write, (program, _) in layouts.WRITERS.items()}
    for row in ROWS:
        assert {known[name] for name in row.writers} <= {row.name.removesuffix(sharded)}
        assert (row.name in SCRIPTS) or (row.writers and row.by), row
    marks = "<!-- programs: made of tests/support/programs.py -->\n", "<!-- programs: end -->"
    assert PAGE.read_text().split(marks[0])[1].split(marks[1])[0] == table()
