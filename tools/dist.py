"""`make dist`: what a release consists of, in dist/, made from the last commit alone.

The source archive and the wheel, built twice in different surroundings, the same byte for byte; the lock of all that a
node installs; the bill of materials; SHA256SUMS over these, and its signature by the ssh key that the releaser names.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from tools import sbom
from tools.locked import LOCK, TORCH, Pin, header, read

OUT = Path("dist")
NODE = ("daemon", "s3", "crypt", "metrics", "obstore")  # the extras that the service installs
NAMESPACE = "tierd"  # of the signature: what a key signed for another purpose is no release
_HOOK = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> bytes:
    """The output of a command; if it fails, its words end this process."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, umask=0o022)
    if done.returncode:
        sys.exit(f"{command[0]} failed:\n{done.stdout.decode()}{done.stderr.decode()}")
    return done.stdout


def unpack(archive: Path, directory: Path) -> None:
    """Owner and modes are not the archive's: they would get into the wheel."""
    directory.mkdir()
    run("tar", "-xf", archive, "-C", directory, "--no-same-owner", "--no-same-permissions")


def settle(archive: Path, epoch: int) -> None:
    """Write a .tar.gz anew with nothing in it of this machine or this hour, which setuptools leaves in."""
    with tarfile.open(archive) as packed:
        members = [(it, packed.extractfile(it)) for it in sorted(packed.getmembers(), key=lambda it: it.name)]
        with (
            archive.with_suffix(".new").open("wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as anew,
        ):
            for member, content in members:
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                member.mtime, member.pax_headers = epoch, {}
                anew.addfile(member, content)
    archive.with_suffix(".new").replace(archive)


def build(scratch: Path, epoch: int, **surroundings: str) -> list[Path]:
    """The last commit's source archive, and the wheel that is built from that archive."""
    scratch.mkdir()
    (scratch / "commit.tar").write_bytes(run("git", "archive", "HEAD"))
    unpack(scratch / "commit.tar", scratch / "commit")
    env = {"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": str(epoch), "TIERD_PURE": "1", **surroundings}
    made = scratch / "made"
    run(sys.executable, "-c", _HOOK, "build_sdist", made, cwd=scratch / "commit", env=env)
    (source,) = made.iterdir()
    settle(source, epoch)
    unpack(source, scratch / "source")
    (tree,) = (scratch / "source").iterdir()
    run(sys.executable, "-c", _HOOK, "build_wheel", made, cwd=tree, env=env)
    return sorted(made.iterdir())


def same(one: list[Path], other: list[Path]) -> None:
    for a, b in zip(one, other, strict=True):
        if a.name != b.name or a.read_bytes() != b.read_bytes():
            sys.exit(f"{a.name}: two builds of one commit differ; nothing is released. Compare {a} and {b}")


def described(wheel: Path) -> Message:
    """A wheel's metadata."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (it for it in packed.namelist() if it.endswith(".dist-info/METADATA"))
        return message_from_bytes(packed.read(name))


def node_lock(wheel: Message, pins: dict[str, Pin]) -> str:
    """The part of the lock that a node needs, as a requirements file."""
    options = "".join(it for it in header(LOCK.read_text()).splitlines(keepends=True) if it.startswith("--"))
    chosen = sorted(sbom.names(sbom.needs(wheel, NODE)))
    title = f"# What {wheel['Name']}[{','.join(NODE)}] {wheel['Version']} needs: pip install --no-deps -r THIS FILE\n"
    return title + options + "".join(pins[name].lines() + "\n" for name in chosen)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def release(key: Path | None) -> None:
    if run("git", "status", "--porcelain", "--untracked-files=no"):
        sys.exit("a release is made from the last commit, and there are changes beside it: commit or drop them")
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    pins = read(LOCK, TORCH)
    scratch = Path(tempfile.mkdtemp(prefix="tierd-dist-"))
    first = build(scratch / "one", epoch, TZ="UTC", LC_ALL="C", PYTHONHASHSEED="1")
    same(first, build(scratch / "another place", epoch, TZ="Asia/Tokyo", LC_ALL="C.UTF-8", PYTHONHASHSEED="2"))
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    for path in first:
        shutil.copy(path, OUT)
    shutil.rmtree(scratch)

    (wheel,) = OUT.glob("*.whl")
    metadata = described(wheel)
    stem = f"{metadata['Name']}-{metadata['Version']}"
    (OUT / f"{stem}-requirements.txt").write_text(node_lock(metadata, pins))
    (OUT / f"{stem}.cdx.json").write_text(sbom.made(metadata, digest(wheel), pins, epoch))
    sums = OUT / "SHA256SUMS"
    sums.write_text("".join(f"{digest(path)}  {path.name}\n" for path in sorted(OUT.iterdir())))
    print(sums.read_text(), end="")
    if key is None:
        print("NOT SIGNED: nobody can tell these files from others. Do not publish them.", file=sys.stderr)
        return
    run("ssh-keygen", "-Y", "sign", "-f", key, "-n", NAMESPACE, sums)
    print(f"{sums}.sig: signed with {key}. SECURITY.md says how it is verified.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make dist")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--unsigned", action="store_true")
    given = parser.parse_args()
    if (given.key is None) != given.unsigned:
        sys.exit(
            "make dist KEY=FILE signs with this ssh key (a public one, if an agent holds its private half);"
            " make dist UNSIGNED=1 leaves the signature out"
        )
    if given.key is not None and not given.key.is_file():
        sys.exit(f"KEY={given.key}: there is no such file")
    release(given.key)


if __name__ == "__main__":
    main()
