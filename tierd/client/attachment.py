"""The trainer's tie to the node's daemon.

Law: the daemon is a convenience of saving and a necessity only of restoring what the spool lacks. Losing it is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from tierd.core.config import from_urls
from tierd.core.errors import ConfigError, DaemonUnavailable, TierdError
from tierd.core.sight import told
from tierd.core.wire import Attach, Candidates, Request
from tierd.link import Link, start_daemon
from tierd.spool import Spool

log = logging.getLogger("tierd")

_TOLD = 5.0  # seconds that what it is told may take
_ANSWER = 5.0  # seconds that naming an attempt waits for the daemon's look at the tiers


class Attachment:
    """Known to the daemon as a trainer for as long as this is open, when `to` asked for one.

    Args:
        to: URLs of the tiers that a daemon is started for; None where one is expected to be there; empty for none.

    Raises:
        ConfigError: a URL cannot be used.
        DaemonUnavailable: the daemon for `to` did not start.
    """

    def __init__(self, spool: Spool, to: Sequence[str] | None) -> None:
        self._spool = spool
        if isinstance(to, str) or not all(isinstance(url, str) for url in to or ()):
            raise ConfigError(f"to={to!r}: a list of URLs, such as to=['s3://bucket/prefix']")
        self._to = tuple(to) if to is not None else None
        self._link: Link | None = None
        self._lock = threading.Lock()
        self._keeping: threading.Thread | None = None
        self._telling: threading.Thread | None = None  # the last one that does
        if self._to:
            self._attach(self._to)

    @property
    def tiers(self) -> bool:
        """Whether there may be copies beyond the spool."""
        return self._to != ()

    def attempts(self, run: str) -> set[str]:
        """Every attempt that the spool or, where it answers within seconds, the daemon shows."""
        try:
            seen = self._spool.attempts(run)
        except OSError as error:  # the clock's word then; naming an attempt must not end a training
            log.warning("spool %s: %s", self._spool.root, error)
            seen = set()
        if self.tiers:
            try:
                with Link(self._spool) as link:
                    seen |= told(link.ask(Candidates(run=run), _ANSWER)).attempts
            except (TierdError, TimeoutError):
                pass  # the spool's word, and the clock's
        return seen

    def keep(self) -> None:
        """After a save: the daemon that `to` asked for may have ended, and this checkpoint needs one.

        Returns at once: a daemon that takes its time to start, or to answer, must not hold up the next save.
        """
        if not self._to or (self._keeping and self._keeping.is_alive()):
            return
        self._keeping = threading.Thread(target=self.renew, name="tierd-keep")
        try:
            self._keeping.start()
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            self.renew()

    def renew(self) -> None:
        """Attach again, to a new daemon if need be, unless the old tie still holds."""
        if not self._to:
            return
        try:
            with self._lock:
                if self._link is None or not self._link.alive():
                    self._attach(self._to)
        except (TierdError, TimeoutError, OSError) as error:
            log.warning("no daemon takes checkpoints from the spool: %s", error)

    def tell(self, request: Request) -> None:
        """Have the daemon know of something, after what it was told before; returns at once, and where none answers
        soon, nobody is told."""
        if self.tiers:
            told = request, self._telling
            self._telling = threading.Thread(target=self._tell, args=told, name="tierd-tell", daemon=True)
            try:
                self._telling.start()
            except RuntimeError:  # the interpreter is ending, or no thread is to be had
                pass

    def _tell(self, request: Request, before: threading.Thread | None) -> None:
        if before and before.ident:
            before.join(_TOLD)
        try:
            with Link(self._spool) as link:
                link.ask(request, _TOLD)
        except (TierdError, TimeoutError, OSError) as error:
            log.info("the daemon was not told: %s", error)

    def close(self) -> None:
        """Let go. The daemon flushes what is left and ends by itself."""
        if self._keeping and self._keeping.ident:
            self._keeping.join()
        if self._telling and self._telling.ident:
            self._telling.join(_TOLD)
        if self._link is not None:
            self._link.close()

    def _attach(self, to: Sequence[str]) -> None:
        config = from_urls(str(self._spool.root), to)
        try:
            self._link = Link(self._spool)
        except DaemonUnavailable:
            start_daemon(self._spool, to)
            self._link = Link(self._spool)
        tiers = self._link.ask(Attach())["tiers"]
        if sorted(tiers.values()) != sorted(tier.url for tier in config.tier):
            log.warning("spool %s: its daemon has other tiers than `to` names: %s", self._spool.root, tiers)
