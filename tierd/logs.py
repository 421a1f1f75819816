"""Logging: every line that tierd logs is escaped, so that it is safe to print by any handler."""

from __future__ import annotations

import logging
from typing import Any

from tierd.core.printable import printable, printable_lines

LOGGERS = (
    "tierd",
    "tierd.daemon",
    "tierd.daemon.http.requests",
    "tierd.stores.retry",
    "tierd.stores.s3.s3_store",
)  # each of them, because a logger's filter does not see the lines of its child loggers


def escape(record: logging.LogRecord) -> bool:
    """A logging filter that escapes every record and drops none."""
    said = record.getMessage()
    shown = printable(said)
    if shown != said:
        record.msg, record.args = shown, ()
    return True


class Formatter(logging.Formatter):
    """The formatter of the command line's own handler: also escapes other libraries' lines, and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return f"  {printable_lines(super().formatException(ei))}"


def install() -> None:
    """Add the escaping filter to all of tierd's loggers. Called once, when tierd is imported."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(escape)
