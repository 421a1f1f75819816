"""`make lock`: write beside each pinned version the hashes of its files, as the package index states them.

To take another version: change its number in constraints/development.txt, add a line for what it newly needs,
`make lock`, and look at the difference. Only wheels are locked, because to build a source archive pip installs what
nobody has pinned. A lock with `--no-binary NAME` has the source archive of that package, which `make` builds with what
is installed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from tools import locked

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
OLDEST = 11  # the minor version of Python 3
_PLATFORM = re.compile(r"any|manylinux.*_(x86_64|aarch64)")


def fits(filename: str, version: str) -> bool:
    """Whether a file is a wheel of `version` for a CPython that tierd runs on, on Linux (glibc; x86_64 or aarch64)."""
    if not filename.endswith(".whl") or filename.split("-")[1] != version:
        return False
    return any(_usable(it.interpreter, it.abi, it.platform) for it in parse_wheel_filename(filename)[3])


def _usable(interpreter: str, abi: str, platform: str) -> bool:
    python = re.fullmatch(r"(?:py|cp)3(\d*)", interpreter)
    recent = python is not None and (abi in ("none", "abi3") or int(python[1] or 0) >= OLDEST)
    return recent and _PLATFORM.fullmatch(platform) is not None


def is_source(filename: str, version: str) -> bool:
    """Whether a file is the source archive of `version`."""
    return filename.endswith(".tar.gz") and parse_sdist_filename(filename)[1] == Version(version)


def files(name: str) -> list[dict[str, Any]]:
    """What the index says of each file of a package (PEP 691)."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{canonicalize_name(name)}/", headers=accept)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["files"]
    return found


def hashed(pin: locked.Pin, sources: frozenset[str] = frozenset()) -> locked.Pin:
    """The pin with the hashes that the index states today; `sources` are built from their source archives."""
    wanted = is_source if pin.key in sources else fits
    fitting = [it for it in files(pin.name) if wanted(it["filename"], pin.version)]
    if not fitting:
        kind = "source archive of it" if pin.key in sources else f"wheel of it for Linux and Python 3.{OLDEST} or newer"
        sys.exit(f"{pin.name}=={pin.version}: {INDEX} has no {kind}")
    if any(it.get("yanked") for it in fitting):
        sys.exit(f"{pin.name}=={pin.version} is yanked from {INDEX}: choose another version")
    return pin._replace(hashes=tuple(sorted({it["hashes"]["sha256"] for it in fitting})))


def main() -> None:
    for path in (locked.LOCK, locked.LOADERS, locked.DEEPSPEED, locked.DOCS, locked.MUTANTS, locked.LOWEST):
        text = path.read_text()
        sources = locked.sources(text)
        pins = sorted((hashed(pin, sources) for pin in locked.parse(text)), key=lambda pin: pin.key)
        path.write_text(locked.header(text) + "".join(pin.lines() + "\n" for pin in pins))


if __name__ == "__main__":
    main()
