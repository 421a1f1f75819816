"""Strikes at a restore on a node that lost its spool, whose chunks come past the new one: for `faults.kills`."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from faults.kills.victims import CALLS
from faults.rounds import Lost

if TYPE_CHECKING:
    from faults.kills.lives import KilledLife

STOPPED = "daemons stopped in a restore past the spool"
_LONGEST_S = 60.0  # that ranks may wait for a daemon that is stopped


def strike_restore(life: KilledLife) -> None:
    """Kill the daemon or a rank at a chunk of the restore, or stop the daemon there until the ranks have an answer."""
    noise = life.noise
    stops = noise.random() < 0.4
    assert life.daemon is not None
    victim = life.daemon if stops else noise.choice([life.daemon, *life.ranks])
    victim.page.arm(noise.randint(1, 4), {CALLS.index("fill")}, None, after=noise.random() < 0.5, stops=stops)

    def have_answer() -> bool:
        alive = all(rank.alive() for rank in life.ranks)
        return bool(life.seen["died"] or life.seen["restored"] >= life.world or not alive)

    life.wait_for(lambda: victim.page.hit or have_answer() or not victim.alive(), "the ranks restore")
    if not stops:
        life.kill(victim.name)
        if victim is not life.daemon:
            life.end_launch()
        return
    begun = life.excuse = time.monotonic()
    while victim.page.hit and not have_answer():
        if time.monotonic() - begun > _LONGEST_S:
            raise Lost(f"the ranks have waited for a stopped daemon for {_LONGEST_S:.0f} s")
        life.observe()
        time.sleep(0.004)
    life.record(f"the daemon was stopped for {time.monotonic() - begun:.1f} s")
    life.notes[STOPPED] += bool(victim.page.hit)
    life.excuse = time.monotonic()
    if not victim.page.hit or noise.random() < 0.5:  # what did not stop at a chunk may still do so
        life.kill("daemon")
    else:
        os.kill(victim.pid, signal.SIGCONT)
        victim.page.forget_hit()
