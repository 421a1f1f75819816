"""What tierd logs: each line is made safe to look at, whoever's handlers it goes to."""

from __future__ import annotations

import logging
from typing import Any

from tierd.core.printable import printable, printable_lines

LOGGERS = (
    "tierd",
    "tierd.daemon",
    "tierd.stores.retry",
    "tierd.stores.s3",
)  # a logger's filter sees its own lines only


def escape(record: logging.LogRecord) -> bool:
    """A filter that lets everything pass, escaped."""
    said = record.getMessage()
    shown = printable(said)
    if shown != said:
        record.msg, record.args = shown, ()
    return True


class Formatter(logging.Formatter):
    """For the command line's own handler: escapes what other libraries log, too, and indents tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return f"  {printable_lines(super().formatException(ei))}"


def install() -> None:
    """Have all of tierd's loggers escape; done once, when tierd is imported."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(escape)
