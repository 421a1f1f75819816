"""An image built from a Containerfile and run, without a container engine and without a registry.

Invariant: nothing of this machine changes but the directory of the build. Each step runs in mount and PID namespaces of
its own, over the image's files alone. Only instructions that are known here are taken, so none is passed over.

A base image `debian:SUITE-slim` is made by mmdebstrap from the same packages. Needs root, unshare, and Debian's mirror.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_GIVEN = "/run/builder"  # what the builder's machine gives to a step: its certificates and wheels
_STEP_S = 1200.0
_MIRROR = "http://deb.debian.org/debian"


@dataclass
class Image:
    """The files of an image below `root`, and how its containers are started."""

    root: Path
    user: str = "0"
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    stop: str = "SIGTERM"

    def container(
        self, words: Sequence[str] | None, mounts: dict[Path, str], more: dict[str, str] | None = None
    ) -> list[str]:
        """The command that runs a container as an ordinary runtime does: as the image's user, who has no name and no
        capability, over read-only files.

        Args:
            words: what the image's entry point is given; None: its own words.
            mounts: what is mounted where, writable.
            more: variables beside those of the image.
        """
        arguments = self.entrypoint + (self.command if words is None else list(words))
        return self.process(arguments, mounts, more or {})

    def process(self, arguments: Sequence[str], mounts: dict[Path, str], more: dict[str, str]) -> list[str]:
        """The command of one process in such a container, as `exec` of a probe or a hook starts it."""
        user, _, group = self.user.partition(":")
        become = ["setpriv", f"--reuid={user}", f"--regid={group or user}", "--clear-groups", "--no-new-privs"]
        become += ["--bounding-set=-all", "--inh-caps=-all"]
        lines = [*_prepared(self.root)]
        for source, target in mounts.items():
            lines.append(f"mkdir -p {self.root}{target} && mount --bind {source} {self.root}{target}")
        lines.append(f"mount -o remount,bind,ro {self.root}")
        environment = [f"{name}={value}" for name, value in {**self.environment, "HOME": "/", **more}.items()]
        inside = ["env", "-i", *environment, *become, *arguments]
        return _namespaces(lines, self.root, inside)


def _prepared(root: Path) -> Iterator[str]:
    yield "mount --make-rprivate /"
    yield f"mount --bind {root} {root}"
    yield f"mount -t proc proc {root}/proc"
    yield f"mount -t tmpfs -o mode=755 tmpfs {root}/dev"
    for name in ("null", "zero", "full", "random", "urandom"):
        yield f"touch {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
    yield f"mkdir -m 1777 {root}/dev/shm"


def _namespaces(lines: Sequence[str], root: Path, words: Sequence[str]) -> list[str]:
    script = "set -e\n" + "\n".join(lines) + f'\nexec chroot {root} "$@"'
    flags = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
    return ["unshare", *flags, "/bin/sh", "-c", script, "sh", *words]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Containerfile, each a word and the rest."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in filter(None, map(str.strip, re.sub(r"\\\n", " ", lines).splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def base(name: str, cache: Path) -> Path:
    """The files of a base image; made once."""
    match = re.fullmatch(r"docker\.io/library/debian:([a-z]+)-slim", name)
    assert match, f"{name}: no base image that can be made here"
    tree = cache / match[1]
    if not tree.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f"{match[1]}.{os.getpid()}"
        # A mirror that is frozen in time has expired dates, not wrong signatures.
        options = ["--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"']
        command = ["mmdebstrap", *options, match[1], str(fresh), _MIRROR]
        subprocess.run(command, check=True, timeout=_STEP_S, capture_output=True)
        fresh.rename(tree)
    return tree


def build(containerfile: Path, context: Path, room: Path, cache: Path) -> Image:
    """Build the last stage of `containerfile`."""
    stages: dict[str, Image] = {}
    image: Image | None = None
    for word, rest in instructions(containerfile.read_text()):
        if word == "FROM":
            name, _, alias = rest.partition(" AS ")
            root = room / (alias or "image")
            subprocess.run(["cp", "-a", "--reflink=auto", base(name, cache), root], check=True, timeout=_STEP_S)
            image = stages[alias] = Image(root)
            continue
        assert image is not None, "FROM comes first"
        match word:
            case "RUN":
                _run(image, rest)
            case "COPY":
                _copy(image, rest, context, stages)
            case "ENV":
                name, _, value = rest.partition("=")
                image.environment[name] = value
            case "USER":
                image.user = rest
            case "ENTRYPOINT":
                image.entrypoint = json.loads(rest)
            case "CMD":
                image.command = json.loads(rest)
            case "STOPSIGNAL":
                image.stop = rest
            case _:
                raise ValueError(f"{word}: no instruction that is known here")
    assert image is not None, f"{containerfile}: no FROM"
    return image


def _run(image: Image, command: str) -> None:
    environment = {**image.environment, **{name: os.environ[name] for name in _PROXIES if name in os.environ}}
    lines = [*_prepared(image.root), f"mount -t tmpfs tmpfs {image.root}/run", f"mkdir {image.root}{_GIVEN}"]
    lines.append(f"cat /etc/resolv.conf > {image.root}/etc/resolv.conf")
    for name, target in (("PIP_CERT", "ca.crt"), ("PIP_FIND_LINKS", "wheels"), ("PIP_INDEX_URL", "")):
        if (given := os.environ.get(name)) is None:
            continue
        environment[name] = given
        if target and Path(given).exists():
            environment[name] = f"{_GIVEN}/{target}"
            make = "touch" if Path(given).is_file() else "mkdir"
            lines.append(f"{make} {image.root}{_GIVEN}/{target} && mount --bind {given} {image.root}{_GIVEN}/{target}")
    words = ["env", "-i", *(f"{name}={value}" for name, value in environment.items()), "/bin/sh", "-c", command]
    done = subprocess.run(
        _namespaces(lines, image.root, words), capture_output=True, text=True, timeout=_STEP_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"RUN {command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def _copy(image: Image, rest: str, context: Path, stages: dict[str, Image]) -> None:
    *sources, target = rest.split()
    place = image.root / target.lstrip("/")
    if match := re.fullmatch(r"--from=(\w+)", sources[0]):
        (source,) = sources[1:]
        shutil.copytree(stages[match[1]].root / source.lstrip("/"), place, symlinks=True)
        return
    found = [path for pattern in sources for path in sorted(context.glob(pattern))]
    assert found, f"COPY {rest}: nothing in {context} matches"
    place.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copy(path, place)
