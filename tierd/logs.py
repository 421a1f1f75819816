"""Logging: every line that tierd logs is escaped, so that it is safe to print by any handler.

The command line's own handler writes for its reader: text for a person, a priority on each line for journald, or one
JSON object a line for a program that collects logs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from tierd.core.errors import printable, printable_json, printable_lines

LOGGERS = (
    "tierd",
    "tierd.daemon",
    "tierd.daemon.http.requests",
    "tierd.stores.retry",
    "tierd.stores.s3.s3_store",
)  # each of them, because a logger's filter does not see the lines of its child loggers
LogFormat = Literal["text", "json"]


def announce(message: str, *args: object) -> None:
    """Log at INFO by the logger `tierd`; where no logging is configured, print the line on the standard error.

    A level of this logger counts as configured, so setting it to WARNING turns these lines off.
    """
    logger = logging.getLogger("tierd")
    if logger.hasHandlers() or logger.level != logging.NOTSET:
        logger.info(message, *args)
    else:
        print(f"tierd: {printable(message % args)}", file=sys.stderr)


def escape_record(record: logging.LogRecord) -> bool:
    """A logging filter that escapes every record and drops none."""
    text = record.getMessage()
    escaped = printable(text)
    if escaped != text:
        record.msg, record.args = escaped, ()
    return True


class Formatter(logging.Formatter):
    """The formatter of the command line's own handler: also escapes other libraries' lines, and indents tracebacks."""

    def __init__(self, fmt: str = "%(asctime)s %(levelname)s %(message)s") -> None:
        super().__init__(fmt)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return f"  {printable_lines(super().formatException(ei))}"


class JournalFormatter(Formatter):
    """Begin each line with its priority, as sd-daemon(3) describes it. journald adds the time by itself."""

    def __init__(self) -> None:
        super().__init__("%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return with_syslog_priority(super().format(record), record.levelno)


class JsonFormatter(Formatter):
    """Write each record as one JSON object on one line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, and
    `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        members = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            members["exception"] = logging.Formatter.formatException(self, record.exc_info)
        return printable_json(json.dumps(members, ensure_ascii=False))


def with_syslog_priority(text: str, level: int) -> str:
    """Begin each line of `text` with the priority of a logging level, because journald reads line by line."""
    return "\n".join(f"<{syslog_priority(level)}>{line}" for line in text.split("\n"))


def syslog_priority(level: int) -> int:
    """Return the syslog priority of a logging level: 3 for errors, 4 for warnings, 6 for information, 7 for more."""
    bounds = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
    return next((number for bound, number in bounds if level >= bound), 7)


def is_journal() -> bool:
    """Return whether journald reads the standard error: systemd.exec(5), JOURNAL_STREAM."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something without a descriptor
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


def make_formatter(log_format: LogFormat = "text") -> Formatter:
    """Return the formatter for lines on the standard error."""
    if log_format == "json":
        return JsonFormatter()
    return JournalFormatter() if is_journal() else Formatter()


def use_format(log_format: LogFormat) -> None:
    """Have the command line's own handler write this format from now on."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Formatter):
            handler.setFormatter(make_formatter(log_format))


def format_exit_error(text: str) -> str:
    """Format an error that ends a command as the log is formatted, or as ``tierd: text`` for a person."""
    formatters = (
        handler.formatter for handler in logging.getLogger().handlers if isinstance(handler.formatter, Formatter)
    )
    formatter = next(formatters, None)
    if isinstance(formatter, JsonFormatter):
        return formatter.format(logging.LogRecord("tierd", logging.ERROR, "", 0, text, (), None))
    line = f"tierd: {printable_lines(text)}"
    return with_syslog_priority(line, logging.ERROR) if isinstance(formatter, JournalFormatter) else line


def install_escaping() -> None:
    """Add the escaping filter to all of tierd's loggers. Called once, when tierd is imported."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(escape_record)
