"""`make dist`: a stranger verifies a release as SECURITY.md says, and a changed one is refused.

It is made of a copy of this checkout that is committed there, since a release is what the last commit holds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tierd
from tierd.core.installation import install_command
from tools import locked
from tools.locked import ROOT, Pin

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".demo", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
STEM = f"tierd-{tierd.__version__}"
WHEEL = f"{STEM}-py3-none-any.whl"


def run(*command: str | Path, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=250, **how)


def git(tree: Path, *words: str) -> None:
    done = run("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words, cwd=tree)
    assert done.returncode == 0, done.stderr


def dist(tree: Path, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "tools.dist", *words, cwd=tree, **how)


def keyed(path: Path) -> Path:
    """A new ssh key; its public half stands beside it, as `.pub`."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed checkout with a release in dist/, the signer's public key beside it."""
    base = tmp_path_factory.mktemp("release")
    tree = base / "checkout"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "all of it")
    (tree / "tierd" / "stray.py").write_text("a file that is not committed is not released\n")
    done = dist(tree, "--key", str(keyed(base / "releaser")))
    assert done.returncode == 0, done.stderr
    return tree


@pytest.fixture
def files(tree: Path, tmp_path: Path) -> Path:
    """The release as a stranger has it, and the public key."""
    shutil.copytree(tree / "dist", tmp_path / "files")
    shutil.copy(tree.parent / "releaser.pub", tmp_path / "files")
    return tmp_path / "files"


def documented() -> list[str]:
    """The commands of SECURITY.md for who installs a release."""
    section = (ROOT / "SECURITY.md").read_text().partition("\n## What you install\n")[2].partition("\n## ")[0]
    return [line.strip() for line in section.splitlines() if line.startswith("    ")]


def verify(files: Path) -> list[int]:
    """How the three commands that verify end."""
    commands = documented()
    assert [command.split()[0] for command in commands[:3]] == ["echo", "ssh-keygen", "sha256sum"]
    return [run("bash", "-c", command, cwd=files).returncode for command in commands[:3]]


def test_a_release_is_complete_and_verifies_as_documented(files: Path) -> None:
    sums = [line.split()[1] for line in (files / "SHA256SUMS").read_text().splitlines()]
    assert sums == [WHEEL, f"{STEM}-requirements.txt", f"{STEM}.cdx.json", f"{STEM}.tar.gz"]
    assert {it.name for it in files.iterdir()} == {*sums, "SHA256SUMS", "SHA256SUMS.sig", "releaser.pub"}
    assert verify(files) == [0, 0, 0]


@pytest.mark.parametrize("name", [WHEEL, f"{STEM}.tar.gz", f"{STEM}-requirements.txt", f"{STEM}.cdx.json"])
def test_a_changed_file_is_refused(files: Path, name: str) -> None:
    with (files / name).open("ab") as changed:
        changed.write(b"\n")
    assert verify(files) == [0, 0, 1]


def test_changed_sums_and_another_s_signature_are_refused(files: Path) -> None:
    sums = files / "SHA256SUMS"
    whole = sums.read_text()
    sums.write_text(whole.replace(WHEEL, "another.whl"))
    assert verify(files)[1] != 0
    sums.write_text(whole)
    other = keyed(files / "other")
    (files / "SHA256SUMS.sig").unlink()
    for namespace, key in (("tierd", other), ("file", files.parent / "releaser")):
        if key != other:
            keyed(key)
            shutil.copy(key.with_suffix(".pub"), files / "releaser.pub")
        assert run("ssh-keygen", "-Y", "sign", "-f", key, "-n", namespace, sums, cwd=files).returncode == 0
        assert verify(files)[1] != 0, f"by {key.name} for {namespace}"
        (files / "SHA256SUMS.sig").unlink()


def test_two_builds_are_equal_and_an_unsigned_build_says_so(tree: Path, files: Path) -> None:
    shutil.rmtree(tree / "dist")
    done = dist(tree, "--unsigned", umask=0o077, env={**os.environ, "TZ": "America/Lima"})
    assert done.returncode == 0
    assert "NOT SIGNED" in done.stderr
    again = {it.name: it.read_bytes() for it in (tree / "dist").iterdir()}
    first = {it.name: it.read_bytes() for it in files.iterdir() if it.name not in ("SHA256SUMS.sig", "releaser.pub")}
    assert again.keys() == first.keys()
    assert [name for name in first if first[name] != again[name]] == []


def test_a_release_needs_a_key_and_a_committed_tree(tree: Path, tmp_path: Path) -> None:
    assert "make dist KEY=FILE signs" in dist(tree).stderr
    assert "there is no such file" in dist(tree, "--key", str(tmp_path / "none")).stderr
    readme = tree / "README.md"
    whole = readme.read_text()
    readme.write_text(whole + "more\n")
    done = dist(tree, "--unsigned")
    readme.write_text(whole)
    assert (done.returncode, done.stderr[:55]) == (1, "a release is made from the last commit, and there are c")


def test_make_hands_the_key_on(tmp_path: Path) -> None:
    done = run("make", "-n", "-o", ".venv/.ready", "dist", f"KEY={tmp_path}/a key", cwd=ROOT)
    assert f"-m tools.dist --key '{tmp_path}/a key'" in done.stdout


def test_the_wheel_alone_installs_and_runs(files: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=250)
    (command,) = [it for it in documented() if it.endswith(".whl")]
    assert command == f"pip install --no-deps {WHEEL}"
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--quiet")
    done = run(*pip, "install", "--no-index", *command.split()[2:], cwd=files)
    assert done.returncode == 0, done.stderr
    bare = run(venv / "bin" / "tierd", "--version", cwd=files)
    assert (bare.returncode, install_command("daemon") in bare.stderr) == (3, True)

    # With the packages of the lock beside it, which are those that this test runs on.
    (purelib,) = venv.glob("lib/python*/site-packages")
    beside = {str(Path(it).resolve()) for it in sys.path if it.endswith("site-packages")}
    (purelib / "locked.pth").write_text("".join(f"{it}\n" for it in sorted(beside)))
    done = run(venv / "bin" / "tierd", "--version", cwd=files)
    assert re.fullmatch(rf"tierd {re.escape(tierd.__version__)}, protocol \S+, format \d+\n", done.stdout), done.stderr
    where = run(venv / "bin" / "python", "-c", "import tierd; print(tierd.__file__)", cwd=files).stdout
    assert Path(where).is_relative_to(purelib)


def test_the_archives_hold_the_package_and_no_stray_file(files: Path) -> None:
    with zipfile.ZipFile(files / WHEEL) as wheel, tarfile.open(files / f"{STEM}.tar.gz") as source:
        inside = set(wheel.namelist())
        packed = {it.name.partition("/")[2] for it in source.getmembers()}
    own = (it for suffix in ("*.py", "*.pyi", "*.md", "page.*", "py.typed") for it in (ROOT / "tierd").rglob(suffix))
    package = {str(it.relative_to(ROOT)) for it in own if it.parent.name != "__pycache__"}
    page = f"{STEM}.data/data/share/man/man1/tierd.1"
    assert {it for it in inside if not it.startswith(f"{STEM}.dist-info/")} == package | {page}
    assert "docs/tierd.1" in packed
    assert {it for it in packed if it.startswith("tierd/") and "." in it} == package
    assert not [it for it in packed if it.startswith(("tests", "tools", "benchmarks"))]


def test_the_bill_names_all_that_the_wheel_can_need(files: Path) -> None:
    bill = json.loads((files / f"{STEM}.cdx.json").read_text())
    parts = {it["name"]: it for it in bill["components"]}
    with zipfile.ZipFile(files / WHEEL) as packed:
        metadata = message_from_bytes(packed.read(f"{STEM}.dist-info/METADATA"))
    declared = {canonicalize_name(Requirement(it).name) for it in metadata.get_all("Requires-Dist", [])}
    assert declared - {"tierd"} <= parts.keys()
    assert {it for it in parts if it in ("pytest", "mypy", "cyclonedx-python-lib")} == set(), "nobody installs these"
    pins = locked.read(locked.LOCK, locked.TORCH)
    for name, part in parts.items():
        hashes = [it["content"] for reference in part.get("externalReferences", []) for it in reference["hashes"]]
        assert (part["version"], sorted(hashes)) == (pins[name].version, list(pins[name].hashes))
        assert part["purl"] == f"pkg:pypi/{name}@{part['version']}"
        assert part["licenses"], name
    assert {name for name, part in parts.items() if part["scope"] == "required"} == {"msgspec", "xxhash"}
    assert {name for name, part in parts.items() if "externalReferences" not in part} == {"torch"}
    (root,) = [it for it in bill["dependencies"] if it["ref"] == bill["metadata"]["component"]["bom-ref"]]
    assert {it.partition("@")[0].removeprefix("pkg:pypi/") for it in root["dependsOn"]} == declared - {"tierd"}
    assert bill["metadata"]["component"]["hashes"][0]["content"] in (files / "SHA256SUMS").read_text()


def test_pip_installs_locked_packages_and_nothing_else(files: Path, tmp_path: Path) -> None:
    """The lock of a node has the form by which pip checks; here with the wheel itself as what is locked."""
    options = locked.header((files / f"{STEM}-requirements.txt").read_text())
    assert "pytest" not in (files / f"{STEM}-requirements.txt").read_text()
    digest = (files / "SHA256SUMS").read_text().split()[0]
    (tmp_path / "lock.txt").write_text(options + Pin("tierd", tierd.__version__, None, (digest,)).lines() + "\n")
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--find-links", files, "--target")
    words = (*documented()[3].split()[2:4], tmp_path / "lock.txt")
    done = run(*pip, tmp_path / "one", *words, cwd=files)
    assert done.returncode == 0, done.stderr
    with (files / WHEEL).open("ab") as changed:
        changed.write(b"\n")
    done = run(*pip, tmp_path / "other", *words, cwd=files)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "other").exists()
