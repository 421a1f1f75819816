"""The command `top`: the daemon's page on a terminal, with the same facts, drawn anew while the daemon works.

Invariant: the terminal is left as it was found. A daemon that ends or does not answer leaves the last answer on the
screen, with its age, until one answers again.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tierd.cli.commands.top_lines import headline, top_lines
from tierd.cli.options import ConfigOption, SpoolOption
from tierd.cli.output import print_answer
from tierd.cli.places import resolve_places
from tierd.core.errors import DaemonUnavailable, RequestUnknown, TierdError, VersionMismatch
from tierd.core.units import format_age
from tierd.daemon import status_file
from tierd.ipc import messages
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.spool.spool import Spool

_PERIOD_S = 2.0
_TICK_S = 0.25  # within which a key and a new size of the terminal are noticed
_KEYS = "q quits, arrows and space scroll"
_DOWN = {b"j": 1, b"\x1b[B": 1, b" ": 20, b"\x1b[6~": 20}  # lines, by what the terminal sends
_UP = {b"k": 1, b"\x1b[A": 1, b"b": 20, b"\x1b[5~": 20}


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(top)


def top(spool: SpoolOption = None, config: ConfigOption = None) -> None:
    """The node's runs, tiers, problems and events, live: the daemon's page on a terminal. Elsewhere, print it once."""
    view = DaemonView(resolve_places(spool, None, config).node_spool)
    if not sys.stdout.isatty():
        view.refresh()
        if view.error:
            raise view.error
        print_answer(headline(view.status))
        for line in top_lines(view.status, view.runs, None):
            print_answer(line.plain, wrap=False)
        return
    _live(view)


class DaemonView:
    """What the daemon said last.

    Attributes:
        status: as `tierd status --json` prints it; the last one that was recorded if no daemon has answered yet.
        runs: as `/runs` has it over HTTP; None: not known.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self.status: dict[str, Any] = status_file.read_status(spool.control) or {}
        self.runs: dict[str, Any] | None = None
        self.error: TierdError | None = None
        self._answered: float | None = None

    def refresh(self) -> None:
        """Ask the daemon, of any version."""
        try:
            try:
                with DaemonConnection(self._spool) as link:
                    self.status = link.ask(messages.StatusRequest())["status"]
                    self.runs = link.ask(messages.RunsRequest())["runs"]
            except (VersionMismatch, RequestUnknown):
                with DaemonConnection(self._spool, greet=False) as link:
                    self.status, self.runs = link.ask(messages.StatusRequest())["status"], None
        except DaemonUnavailable as error:
            self.error = error
        except (KeyError, OSError) as error:
            self.error = DaemonUnavailable(f"the daemon's answer was not understood: {error!r}")
        else:
            self.error, self._answered = None, time.monotonic()

    @property
    def outage_text(self) -> str:
        """Why the daemon does not answer, and since when; empty if it does."""
        if self.error is None:
            return ""
        since = "" if self._answered is None else f" for {format_age(time.monotonic() - self._answered)}"
        below = "; below is the last known state" if self.status else ""
        return f"The daemon does not answer{since}{below}: {self.error}"


def _live(view: DaemonView) -> None:
    out = Console()
    at, polled_at = 0, -_PERIOD_S
    with Live(console=out, screen=True, auto_refresh=False, transient=True) as screen, _keys() as keys:
        while True:
            if time.monotonic() - polled_at >= _PERIOD_S:
                view.refresh()
                polled_at = time.monotonic()
            at, content = _screen(view, out, at)
            screen.update(content, refresh=True)
            end = time.monotonic() + _PERIOD_S
            size = out.size
            while not (pressed := keys(_TICK_S)) and time.monotonic() < end and out.size == size:
                pass
            if pressed == b"q":
                return
            at = max(0, at + _DOWN.get(pressed, 0) - _UP.get(pressed, 0))


def _screen(view: DaemonView, out: Console, at: int) -> tuple[int, Group]:
    """Draw a screen whose body begins with line `at`, or as far down as there is text; also return that line."""
    width, height = out.size
    head = [Text(headline(view.status) if view.status else "tierd", style="bold")]
    if view.outage_text:
        head += Text(view.outage_text, style="bold red").wrap(out, width)  # whole, because it has the way out
    head[0].truncate(width, overflow="ellipsis")
    body = top_lines(view.status, view.runs, width) if view.status else []
    room = max(1, height - len(head) - 1)
    at = min(at, max(0, len(body) - room))
    visible_lines = body[at : at + room]
    lines_below = len(body) - at - len(visible_lines)
    foot = Text(f"{_KEYS}; {f'{lines_below} more lines' if lines_below else 'the end'}", style="dim")
    foot.truncate(width, overflow="ellipsis")
    return at, Group(*head, *visible_lines, *[Text()] * (room - len(visible_lines)), foot)


def _no_key(wait_s: float) -> bytes:
    time.sleep(wait_s)
    return b""


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Return a function that waits for a key, at most some seconds, and returns what the terminal sent."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)  # keys come at once and are not shown; Ctrl-C stays a signal
        yield lambda wait_s: os.read(fd, 16) if select.select([fd], [], [], wait_s)[0] else b""
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
