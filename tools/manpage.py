"""`python -m tools.manpage`: write docs/tierd.1, the manual page, from the help of the commands.

The page is committed, because a wheel is built of what is there, and pip installs it as share/man/man1/tierd.1.
`tests/test_manpage.py` fails where it differs from the code. Format: groff_man(7).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import tierd
from tierd.cli import app
from tierd.cli.command_runtime import EXIT_CODES
from tierd.cli.places import CONFIG, KEY_FILE, SPOOL
from tierd.core.store_schemes import PLACES
from tools.reference import ROOT, commands, parameters, usage

PAGE = ROOT / "docs" / "tierd.1"
_ABOUT = (
    "The daemon tierd flushes checkpoints from the spool of a training node to tiers, verifies, retains and restores "
    f"them. Commands look at places: a tier's URL ({PLACES}), the node's spool, or all that a "
    "configuration names. With --json a command prints its answer as JSON."
)


def escaped(text: str) -> str:
    """Text that groff shows as it is."""
    text = " ".join(text.replace("`", "").split()).replace("\\", "\\(rs").replace("-", "\\-")
    text = re.sub(r"[^ -~]", lambda one: f"\\[u{ord(one[0]):04X}]", text)
    return re.sub(r"^([.'])", r"\\&\1", text)


def page() -> str:
    """The manual page as the code has it today."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f'.TH TIERD 1 "" "tierd {tierd.__version__}" "User Commands"'
    yield from (".SH NAME", f"tierd \\- {escaped((app.info.help or '').rstrip('.'))}")
    yield from (".SH SYNOPSIS", ".B tierd", escaped("COMMAND [OPTIONS]"))
    yield from (".SH DESCRIPTION", escaped(_ABOUT))
    yield ".SH COMMANDS"
    for name, command in commands().items():
        yield from (".SS", escaped(usage(name, command)), escaped(command.help or ""))
        for word, text, default, _ in parameters(command):
            more = f" Default: {default}." if default.startswith("`") else " Required." if default else ""
            yield from (".TP", f".B {escaped(word)}", escaped(text + more) or "\\&")
    yield ".SH EXIT STATUS"
    for code, means in EXIT_CODES.items():
        yield from (".TP", f".B {code}", escaped(means))
    yield ".SH ENVIRONMENT"
    for name, means in {
        CONFIG: "The configuration of commands that name no place.",
        SPOOL: "Without it, the spool of commands that name no place.",
        KEY_FILE: "The key of tiers that are named by their URLs.",
    }.items():
        yield from (".TP", f".B {name}", escaped(means))
    yield ".SH FILES"
    for name, means in {
        "~/.config/tierd/tierd.toml, /etc/tierd/tierd.toml": "The configuration, if neither the command line nor the "
        "environment names a place; the first that exists.",
        ".tierd/daemon.log": "In a spool: the log of a daemon that a trainer started. From 8 MiB on it is continued in "
        "a new file, and one older file is kept, daemon.log.1.",
        ".tierd/status.json": "In a spool: the last known state, which tierd status shows when no daemon runs.",
    }.items():
        yield from (".TP", f".I {escaped(name)}", escaped(means))


def main() -> None:
    if not PAGE.exists() or PAGE.read_text() != page():
        PAGE.write_text(page())
        print(f"{PAGE.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
