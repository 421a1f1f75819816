"""Read the lock: which version of each package `make` installs, the hashes of its files, and what needs what.

A lock is a requirements file of pip that holds only exact versions with hashes, so pip refuses every other file.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "constraints/development.txt"  # all that `make test` and `make bench` import, and the build backend
LOADERS = ROOT / "constraints/loaders.txt"  # what `make loaders` adds
DEEPSPEED = ROOT / "constraints/deepspeed.txt"  # what `make loaders` installs apart; the file says why
DOCS = ROOT / "constraints/docs.txt"  # what `make docs` adds
MUTANTS = ROOT / "constraints/mutants.txt"  # what `make mutants` installs apart
LOWEST = ROOT / "constraints/lowest.txt"  # the oldest versions that pyproject.toml allows, for `make lowest`
TORCH = ROOT / "constraints/torch.txt"  # torch alone, by version; the file says why

# What torch's build for CUDA needs besides; it is installed with torch, and torch's build for CPUs does not name it.
ACCELERATOR = re.compile(r"(nvidia|cuda|triton)\b")

# Where a lock must be whole: each minor version of Python that tierd runs on, times each machine.
ENVIRONMENTS = [
    {
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": machine,
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.0",
    }
    for minor in (11, 12, 13, 14)
    for machine in ("x86_64", "aarch64")
]


class Pin(NamedTuple):
    """One package of a lock. `hashes` are SHA-256, in hex, of each file that may be installed."""

    name: str
    version: str
    marker: Marker | None
    hashes: tuple[str, ...]

    @property
    def key(self) -> str:
        return canonicalize_name(self.name)

    def applies(self, environment: dict[str, str]) -> bool:
        return self.marker is None or self.marker.evaluate(environment)

    def lines(self) -> str:
        """The pin as a requirements file has it."""
        pinned = f"{self.name}=={self.version}" + (f"; {self.marker}" if self.marker else "")
        return " \\\n    ".join([pinned, *(f"--hash=sha256:{it}" for it in self.hashes)])


def header(text: str) -> str:
    """The comments and the options above the first pin."""
    return "".join(line for line in text.splitlines(keepends=True) if re.match(r"#|--|\s*$", line))


def sources(text: str) -> frozenset[str]:
    """The canonical names of the packages that a lock has as source archives."""
    return frozenset(canonicalize_name(name) for name in re.findall(r"(?m)^--no-binary (\S+)$", text))


def parse(text: str) -> list[Pin]:
    """The pins of a lock; a `ValueError` names a line that pins no version."""
    pins = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip() or line.startswith(("#", "--")):
            continue
        words, *hashes = re.split(r"\s+--hash=sha256:", line.rstrip())
        requirement = Requirement(words)
        (exact,) = requirement.specifier or [None]
        if exact is None or exact.operator != "==":
            raise ValueError(f"{words}: name one version, as in {requirement.name}==1.0")
        pins.append(Pin(requirement.name, exact.version, requirement.marker, tuple(hashes)))
    return pins


def read(*paths: Path) -> dict[str, Pin]:
    """The pins of these locks, by canonical name."""
    return {pin.key: pin for path in paths for pin in parse(path.read_text())}


def active(declared: Iterable[str], extras: Iterable[str], environment: dict[str, str]) -> Iterator[Requirement]:
    """Those of the declared requirements that hold in `environment`, for the base install and these extras."""
    marked = [{**environment, "extra": extra} for extra in ("", *extras)]
    for requirement in map(Requirement, declared):
        if requirement.marker is None or any(requirement.marker.evaluate(it) for it in marked):
            yield requirement


@cache
def _declared(name: str) -> tuple[str, ...]:
    try:
        return tuple(importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:  # nothing can be said of what is not installed
        return ()


def closure(wanted: Iterable[Requirement], environment: dict[str, str]) -> Iterator[tuple[str, Requirement]]:
    """All that `wanted` needs in `environment`, by the metadata of what is installed here, each once with each extra.

    Pairs of who needs it, a canonical name that is empty for what was wanted, and the requirement.
    """
    todo = [("", requirement) for requirement in wanted]
    seen = set()
    while todo:
        by, requirement = todo.pop()
        yield by, requirement
        name = canonicalize_name(requirement.name)
        if (found := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(found)
        needs = active(_declared(name), requirement.extras, environment)
        todo += [(name, it) for it in needs if not (name == "torch" and ACCELERATOR.match(it.name))]


def lacking(pins: dict[str, Pin], others: dict[str, Pin]) -> list[str]:
    """What `pins` need by the metadata of what is installed here, and what neither they nor `others` install."""
    environment = {key: str(value) for key, value in default_environment().items()}
    here = {key: active(_declared(pin.name), (), environment) for key, pin in pins.items()}
    return [
        f"{by} needs {need}"
        for by, needs in here.items()
        for need in needs
        if canonicalize_name(need.name) not in {**pins, **others}
    ]


def main() -> None:
    """Say whether this interpreter runs with the oldest versions, because tests of any others would show nothing.

    What they need is looked for in the locks, because an environment may happen to hold it from an earlier command.
    """
    lowest = read(LOWEST)
    here = {pin.name: importlib.metadata.version(pin.name) for pin in lowest.values()}
    if others := [f"{pin.name} {here[pin.name]}" for pin in lowest.values() if here[pin.name] != pin.version]:
        sys.exit(f"not the oldest versions: {', '.join(others)}")
    if missing := lacking(lowest, read(LOCK, TORCH)):
        sys.exit(f"add to {LOWEST.name}: {', '.join(missing)}")


if __name__ == "__main__":
    main()
