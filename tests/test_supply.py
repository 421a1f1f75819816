"""The lock: whatever pyproject.toml names is pinned with hashes, with all that it needs, wherever tierd runs."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools import lock, locked
from tools.locked import (
    DEEPSPEED,
    DOCS,
    ENVIRONMENTS,
    LOADERS,
    LOCK,
    LOWEST,
    MUTANTS,
    ROOT,
    TORCH,
    Pin,
    active,
    closure,
)

LOCKS = {path: path.read_text() for path in (LOCK, LOADERS, DEEPSPEED, DOCS, MUTANTS)}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
APART = ("loaders", "docs", "mutants")  # groups that a lock of their own has
NUMPY, GLIBC = "numpy-2.4.6", "manylinux_2_28_x86_64"


def named(project: dict[str, Any]) -> dict[str, list[str]]:
    """The requirements of pyproject.toml by where they stand, but those on tierd itself, for its own extras."""
    stand = {
        "the build backend": project["build-system"]["requires"],
        "the base install": project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        **project["dependency-groups"],
    }
    return {where: [it for it in wanted if Requirement(it).name != "tierd"] for where, wanted in stand.items()}


def lacking(text: str) -> list[str]:
    """What is wrong with a lock by itself."""
    first = [line for line in text.splitlines() if not line.startswith("#")][:2]
    faults = [] if first == ["--require-hashes", "--only-binary :all:"] else ["it does not make pip check"]
    for pin in locked.parse(text):
        if not pin.hashes or not all(re.fullmatch("[0-9a-f]{64}", it) for it in pin.hashes):
            faults.append(f"{pin.name} has no hash")
    return faults


def unpinned(project: dict[str, Any], *texts: str) -> list[str]:
    """What pyproject.toml names and these locks do not pin, or in a version that it does not allow."""
    pins = {pin.key: pin for text in texts for pin in locked.parse(text)}
    return [
        f"{where}: {wanted}"
        for where, names in named(project).items()
        for wanted in map(Requirement, names)
        if (pin := pins.get(canonicalize_name(wanted.name))) is None or pin.version not in wanted.specifier
    ]


def without(name: str) -> str:
    """constraints/development.txt without one package."""
    pins = [pin for pin in locked.parse(LOCKS[LOCK]) if pin.key != name]
    return locked.header(LOCKS[LOCK]) + "".join(pin.lines() + "\n" for pin in pins)


@pytest.mark.parametrize("path", [*LOCKS, LOWEST], ids=lambda path: path.name)
def test_everything_that_is_pinned_has_hashes(path: Path) -> None:
    assert lacking(path.read_text()) == []


def test_torch_alone_is_pinned_without_hashes() -> None:
    assert [(pin.name, pin.hashes) for pin in locked.parse(TORCH.read_text())] == [("torch", ())]
    assert "torch" not in locked.read(LOCK, LOADERS)


def test_everything_that_pyproject_names_is_pinned_in_a_version_that_it_allows() -> None:
    assert unpinned(PROJECT, *LOCKS.values(), TORCH.read_text()) == []


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    parts = ("the base install", "torch", "daemon", "s3", "crypt", "metrics")
    wanted = [Requirement(it) for part in parts for it in named(PROJECT)[part]]
    oldest = {it.name: next(iter(it.specifier)).version for it in wanted if it.name != "torch"}
    pinned = {pin.name: pin.version for pin in locked.read(LOWEST).values() if pin.name not in ("botocore", "click")}
    assert {name: Version(it) for name, it in pinned.items()} == {name: Version(it) for name, it in oldest.items()}


def test_missing_requirements_of_the_oldest_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here newer versions are installed than the oldest, so the metadata of one of those stands in."""
    monkeypatch.setattr(
        locked, "_declared", lambda name: ("click>=8", "gone; extra == 'more'") if name == "typer" else ()
    )
    lowest = locked.read(LOWEST)
    assert locked.lacking(lowest, locked.read(LOCK, TORCH)) == []
    del lowest["click"]
    assert locked.lacking(lowest, locked.read(LOCK, TORCH)) == ["typer needs click>=8"]


def test_missing_hash_or_pin_is_detected() -> None:
    assert lacking(re.sub(r"(msgspec==\S+) \\\n( +--hash=\S+( \\)?\n)+", r"\1\n", LOCKS[LOCK])) == [
        "msgspec has no hash"
    ]
    assert lacking(LOCKS[LOCK].replace("--require-hashes\n", "")) == ["it does not make pip check"]
    rest = (LOCKS[LOADERS], LOCKS[DEEPSPEED], LOCKS[DOCS], LOCKS[MUTANTS], TORCH.read_text())
    assert unpinned(PROJECT, without("zstandard"), *rest) == ["daemon: zstandard>=0.23"]
    assert unpinned(PROJECT, without("setuptools"), *rest) == ["the build backend: setuptools>=77"]
    older = re.sub(r"(?m)^aiobotocore==\S+", "aiobotocore==3.7.0", LOCKS[LOCK])
    assert unpinned(PROJECT, older, *rest) == ["s3: aiobotocore>=3.8"]


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=[f"{it['python_version']}-{it['platform_machine']}" for it in ENVIRONMENTS]
)
def test_the_lock_holds_all_that_its_packages_need(environment: dict[str, str]) -> None:
    """pip is told to install no dependencies, so what the lock lacks would be missed only where it is imported."""
    pins = locked.read(LOCK, TORCH)
    wanted = [it for where, names in named(PROJECT).items() if where not in APART for it in names]
    for by, requirement in closure(active(wanted, (), environment), environment):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin and pin.applies(environment), (
            f"{by or 'tierd'} needs {requirement}: add it to constraints/development.txt"
        )
        assert pin.version in requirement.specifier, f"{by or 'tierd'} needs {requirement}, and {pin.version} is pinned"


def test_nothing_is_locked_that_nothing_needs() -> None:
    wanted = [it for where, names in named(PROJECT).items() if where not in APART for it in names]
    needed = {
        canonicalize_name(requirement.name)
        for environment in ENVIRONMENTS
        for _, requirement in closure(active(wanted, (), environment), environment)
    }
    assert locked.read(LOCK).keys() - needed == set()
    assert locked.read(LOADERS).keys() & locked.read(LOCK).keys() == set()
    assert locked.read(DOCS).keys() & locked.read(LOCK).keys() == set()
    assert locked.read(MUTANTS).keys() & locked.read(LOCK).keys() == set()


def test_docs_and_loaders_agree_on_the_packages_that_both_need() -> None:
    """Both are installed into one environment, so one would replace what the other needs."""
    docs, loaders = locked.read(DOCS), locked.read(LOADERS)
    assert {name: docs[name] for name in docs.keys() & loaders} == {
        name: loaders[name] for name in docs.keys() & loaders
    }


def test_make_installs_the_locks_without_dependencies() -> None:
    done = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", "loaders", "docs", "mutants"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    installs = [
        line.partition(" pip install --quiet ")[2] for line in done.stdout.splitlines() if " pip install" in line
    ]
    assert installs == [
        "--no-deps --requirement constraints/development.txt",
        "--requirement constraints/torch.txt",
        "--no-deps --no-build-isolation --editable .",
        "--no-deps --no-build-isolation --target .venv/apart --requirement constraints/deepspeed.txt",
        "--no-deps --requirement constraints/loaders.txt",
        "--no-deps --requirement constraints/docs.txt",
        "--no-deps --target .venv/mutants --requirement constraints/mutants.txt",
    ]


# -- `make lock` -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        f"{NUMPY}-cp311-cp311-{GLIBC}.whl",
        f"{NUMPY}-cp314-cp314t-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl",
        f"{NUMPY}-cp38-abi3-manylinux2014_x86_64.whl",
        f"{NUMPY}-py3-none-any.whl",
        f"{NUMPY}-py2.py3-none-any.whl",
        f"{NUMPY}-1-py3-none-{GLIBC}.whl",
    ],
)
def test_wheels_that_some_machine_needs_are_locked(name: str) -> None:
    assert lock.fits(name, "2.4.6")


@pytest.mark.parametrize(
    "name",
    [
        f"{NUMPY}.tar.gz",
        f"{NUMPY}-cp310-cp310-{GLIBC}.whl",
        f"{NUMPY}-pp311-pypy311_pp73-{GLIBC}.whl",
        f"{NUMPY}-cp311-cp311-musllinux_1_2_x86_64.whl",
        f"{NUMPY}-cp311-cp311-win_amd64.whl",
        f"{NUMPY}-cp311-cp311-macosx_14_0_arm64.whl",
        f"{NUMPY}-cp311-cp311-manylinux_2_28_riscv64.whl",
        f"{NUMPY}-py2-none-any.whl",
        f"numpy-2.4.60-cp311-cp311-{GLIBC}.whl",
        "numpy-0.18-py36+-none-any.whl",
    ],
)
def test_other_files_are_not_locked(name: str) -> None:
    assert not lock.fits(name, "2.4.6")


def listed(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    found = [
        {"filename": f"{NUMPY}-cp312-cp312-{GLIBC}.whl", "hashes": {"sha256": "b" * 64}, **more},
        {"filename": f"{NUMPY}-cp311-cp311-{GLIBC}.whl", "hashes": {"sha256": "a" * 64}, **more},
        {"filename": f"{NUMPY}.tar.gz", "hashes": {"sha256": "c" * 64}, **more},
    ]
    monkeypatch.setattr(lock, "files", lambda name: found)


def test_the_hashes_are_the_index_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed(monkeypatch)
    text = (
        "# why\n--require-hashes\n--only-binary :all:\nnumpy==2.4.6; python_version < '3.14' \\\n    --hash=sha256:0\n"
    )
    (tmp_path / "development.txt").write_text(text)
    (tmp_path / "loaders.txt").write_text("")
    monkeypatch.setattr(locked, "LOCK", tmp_path / "development.txt")
    monkeypatch.setattr(locked, "LOADERS", tmp_path / "loaders.txt")
    monkeypatch.setattr(locked, "DEEPSPEED", tmp_path / "loaders.txt")
    monkeypatch.setattr(locked, "DOCS", tmp_path / "loaders.txt")
    monkeypatch.setattr(locked, "MUTANTS", tmp_path / "loaders.txt")
    monkeypatch.setattr(locked, "LOWEST", tmp_path / "loaders.txt")
    lock.main()
    hashes = " \\\n".join(f"    --hash=sha256:{it * 64}" for it in "ab")
    pinned = f'numpy==2.4.6; python_version < "3.14" \\\n{hashes}\n'
    assert (tmp_path / "development.txt").read_text() == "# why\n--require-hashes\n--only-binary :all:\n" + pinned


def test_a_package_without_a_wheel_is_locked_by_its_source_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed(monkeypatch)
    head = "--require-hashes\n--only-binary :all:\n--no-binary NumPy\n"
    for name in ("LOCK", "LOADERS", "DEEPSPEED", "DOCS", "MUTANTS", "LOWEST"):
        monkeypatch.setattr(locked, name, tmp_path / "lock.txt")
    (tmp_path / "lock.txt").write_text(head + "numpy==2.4.6\n")
    lock.main()
    assert (tmp_path / "lock.txt").read_text() == head + f"numpy==2.4.6 \\\n    --hash=sha256:{'c' * 64}\n"
    with pytest.raises(SystemExit, match=r"numpy==2\.4\.7: .* has no source archive of it"):
        lock.hashed(Pin("numpy", "2.4.7", None, ()), frozenset({"numpy"}))


def test_a_version_that_cannot_be_locked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch)
    with pytest.raises(SystemExit, match=r"numpy==2\.4\.7: .* has no wheel of it"):
        lock.hashed(Pin("numpy", "2.4.7", None, ()))
    listed(monkeypatch, yanked="wrong numbers")
    with pytest.raises(SystemExit, match=r"numpy==2\.4\.6 is yanked"):
        lock.hashed(Pin("numpy", "2.4.6", None, ()))
    with pytest.raises(ValueError, match=r"numpy>=2: name one version"):
        locked.parse("numpy>=2\n")
