"""The command that installs tierd, as all pages show it: `tierd.core.installation` says from where."""

from __future__ import annotations

import re

from tierd.core.installation import SOURCE

_COMMAND = re.compile(r"pip install '(?:\.|tierd)\[([a-z0-9,]+)\]'(`?)(?: in a checkout|    # in a checkout)?")


def availability() -> str:
    """Where pip finds tierd, for the page about its installation."""
    if SOURCE == ".":
        return "tierd is on no package index yet. So pip installs it from a checkout: type this in the clone.\n"
    return "tierd is on PyPI.\n"


def with_install_commands(text: str, source: str = SOURCE) -> str:
    """A page whose every `pip install` of tierd takes it from `source`, and says where to type it."""

    def anew(match: re.Match[str]) -> str:
        extras, code = match.groups()
        where = "" if source != "." else " in a checkout" if code else "    # in a checkout"
        return f"pip install '{source}[{extras}]'{code}{where}"

    return _COMMAND.sub(anew, text)
