"""Training that is killed by SIGKILL at given moments and resumed, compared with training that is not killed.

`python -m support.killed MODULE:FUNCTION HOME MOMENT... -- HOME MOMENT...` imports the module once and forks a process
for each launch of two trainings, because importing a framework takes longer than the training. It calls
`FUNCTION(home, moment)` with a `Moment` for each launch, the last of which is not killed. It never trains itself.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.waiting import wait_until

from tierd.spool.spool import Spool


class Moment:
    """When a launch is killed: ``"step 7"``, ``"epoch 12"`` or ``"evaluation 9"``, after that many steps.

    Args:
        home: has the spool, in which each save up to this moment is durable when the process is killed.
        text: the moment; ``"never"`` if the launch is not killed.
    """

    def __init__(self, home: Path, text: str) -> None:
        self._home = home
        self._text = text

    def reached(self, event: str, step: int, saved: int = 0) -> None:
        """Kill the process if this is the moment, once the checkpoint of step `saved` is durable (0: no matter)."""
        if f"{event} {step}" != self._text:
            return
        spool = Spool(self._home / "spool")
        wait_until(lambda: not saved or saved in {part.checkpoint.step for part in spool.parts("run")})
        os.kill(os.getpid(), signal.SIGKILL)

    def record(self, name: str, value: Any) -> None:
        """Append a value to what this training has recorded. The last one of a name counts."""
        with (self._home / "records").open("a") as file:
            file.write(json.dumps([name, value]) + "\n")


def trained(function: str, home: Path, *moments: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Train without a kill, and train with a launch killed at each moment and once more to the end.

    Returns:
        What each training recorded last under each name; and each value of ``"resumed"`` of the second.
    """
    whole, killed = home / "whole", home / "killed"
    for each in (whole, killed):
        each.mkdir(parents=True)
    command = [sys.executable, "-m", "support.killed", function, str(whole), "never", "--"]
    command += [str(killed), *moments, "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return records(whole)[0], *records(killed)


def records(home: Path) -> tuple[dict[str, Any], list[Any]]:
    """What a training recorded last under each name; and each value of ``"resumed"``."""
    lines = [json.loads(line) for line in (home / "records").read_text().splitlines()]
    resumed = [value for name, value in lines if name == "resumed"]
    return {name: value for name, value in lines if name != "resumed"}, resumed


def _main(function: str, *trainings: list[str]) -> None:
    module, _, name = function.partition(":")
    train = getattr(importlib.import_module(module), name)
    for home, *moments in trainings:
        for moment in moments:
            child = os.fork()
            if child == 0:
                train(Path(home), Moment(Path(home), moment))
                sys.stdout.flush()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            expected = 0 if moment == "never" else -signal.SIGKILL
            assert os.waitstatus_to_exitcode(status) == expected, f"{moment}: {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    end = sys.argv.index("--")
    _main(sys.argv[1], sys.argv[2:end], sys.argv[end + 1 :])
