"""A follower that is killed at any point while checkpoints arrive, and the judge of what it delivered."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from support.following import arrive, follow_forever
from support.nursery import context

STEPS = range(1, 6)
LIMIT_S = 60.0
PERIOD_S = 0.02
# $1: the step, $2: the log, $3: seconds, $4: the directory. Each line is one write: a kill may come between two.
_SCRIPT = 'echo begin $1 >> $2; sleep $3; echo "$(cat "$4"/00000-of-00001/deep/er/state.json)" >> $2; echo end $1 >> $2'


def delivered(home: Path) -> list[int]:
    path = home / "delivered.json"
    found = json.loads(path.read_text())["delivered"].values() if path.exists() else ()
    return [step for steps in found for step in steps]


def play(seed: int, group: bool, full: Path, home: Path) -> list[str]:
    """One life: kill a follower at random moments while checkpoints arrive, and start it again, until all is delivered.

    Args:
        group: kill its command with it.
        full: a tier with all of `STEPS`.
        home: an empty directory.

    Returns:
        What happened, for the page.

    Raises:
        AssertionError: a checkpoint was delivered twice, or not, or not whole.
    """
    chance = random.Random(seed)
    tier, follows, log = home / "tier", home / "home", home / "log"
    tier.mkdir()
    steps = chance.sample(STEPS, len(STEPS))
    words = ["sh", "-c", _SCRIPT, "sh", "{step}", str(log), f"{chance.choice((0, 0.02, 0.1))}", "{directory}"]
    kills, end, notes = chance.randrange(2, 7), time.monotonic() + LIMIT_S, list[str]()
    while steps or len(delivered(follows)) < len(STEPS):
        follower = context.Process(target=follow_forever, args=(str(tier), str(follows), words, PERIOD_S))
        follower.start()
        until = time.monotonic() + chance.expovariate(3) if kills > 0 else end
        while time.monotonic() < until and len(delivered(follows)) < len(STEPS):
            if steps and (kills <= 0 or chance.random() < 0.2):
                arrive(full, tier, steps.pop())
            time.sleep(0.01)
            assert follower.is_alive() and time.monotonic() < end, f"not delivered: {delivered(follows)}"
        notes.append(_moment(log))
        if group:
            with suppress(ProcessLookupError):  # it has no group yet
                os.killpg(follower.pid or 0, signal.SIGKILL)
        follower.kill()
        follower.join()
        kills -= 1
    _judge(log.read_text().splitlines(), group)
    assert sorted(delivered(follows)) == list(STEPS), f"recorded: {delivered(follows)}"
    return [*notes, "killed with its command" if group else "killed alone"]


def _moment(log: Path) -> str:
    words = [line.split(" ")[0] for line in log.read_text().splitlines()] if log.exists() else []
    last = next((word for word in reversed(words) if word in ("begin", "end")), "")
    reported = {"begin": "while a command runs", "end": "between commands", "": "before the first command"}
    return f"killed {reported[last]}"


def _judge(lines: list[str], group: bool) -> None:
    found = Counter(lines)
    if group:
        for step in STEPS:
            assert found[f"begin {step}"] >= found[f"end {step}"] >= 1, (step, lines)
        return
    once = (f"begin {step}\n{json.dumps({'step': step})}\nend {step}".splitlines() for step in STEPS)
    assert found == Counter(line for three in once for line in three), lines
