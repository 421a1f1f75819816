"""The house stands the way the design draws it: imports run downward only, and a trainer loads nothing of the daemon.

Checked over the syntax tree, so that a lazy import inside a function counts as well. What stands under
`if TYPE_CHECKING:` is not run and does not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierd
from tierd.core import errors

HOUSE = Path(tierd.__file__).parent
DAEMON_ONLY = {"asyncio", "aiofiles", "aiobotocore", "aiohttp", "botocore", "cryptography", "rich", "typer", "watchdog"}
DAEMON_ONLY |= {"zstandard"}

# A room may import these rooms of tierd; a room is a package, or a module at the top.
MAY = {
    "core": {"core"},
    "device": {"device"},
    "arena": {"arena", "device"},
    "persist": {"persist", "device", "core"},
    "stage": {"stage", "persist", "core"},
    "trust": {"trust", "core"},
    "records": {"records", "persist", "trust", "core"},
    "living": {"living", "persist", "trust", "core"},
    "spool": {"spool", "living", "records", "stage", "persist", "device", "trust", "core"},
    "commit": {"commit", "spool", "persist", "device", "core"},
    "layout": {"layout"},
    "planes": {"planes", "layout", "device"},
    "codec": {"codec", "planes", "layout", "persist", "core"},
    "link": {"link", "spool", "persist", "trust", "core", ""},
    "priority": {"priority"},
    "stores": {"stores", "device", "priority", "core"},
    "client": {
        "client",
        "living",
        "records",
        "link",
        "commit",
        "arena",
        "spool",
        "stage",
        "persist",
        "device",
        "trust",
        "core",
        "",
    },
    "daemon": {
        "daemon",
        "stores",
        "codec",
        "priority",
        "commit",
        "arena",
        "spool",
        "living",
        "records",
        "stage",
        "persist",
        "device",
        "trust",
        "core",
        "",
    },
    "reading": {"reading", "client", "daemon", "stores", "device", "persist", "priority", "core"},
    "bench": {"bench", "client", "link", "spool", "persist", "core", ""},
    "cli": {
        "cli",
        "bench",
        "check",
        "daemon",
        "stores",
        "codec",
        "priority",
        "link",
        "logs",
        "spool",
        "persist",
        "core",
        "",
    },
    "logs": {"core"},
    "dcp": {"client"},
    "adapters": {"adapters", "client", "core"},
    "observing": {"observing"},
    "check": {"check", "client", "commit", "link", "observing", "spool", "stage", "core", ""},
    "": {"client", "logs", "observing"},  # `import tierd` itself: names, loaded at their first use
    "__main__": {"cli"},
}
SYNC = {
    "core",
    "device",
    "persist",
    "trust",
    "living",
    "records",
    "stage",
    "spool",
    "commit",
    "arena",
    "link",
    "client",
    "dcp",
    "adapters",
    "codec",
    "planes",
    "layout",
    "observing",
    "check",
    "",
}
OPENS_STORES = {"tierd/daemon/service.py", "tierd/reading/reader.py", "tierd/stores/open.py"}
PURE = {"os", "time", "random", "asyncio", "io", "socket", "threading", "subprocess", "secrets", "pathlib", "tempfile"}


def room(module: str) -> str:
    """`tierd.core.ids` -> `core`; `tierd` -> ``."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that the code imports, as full names; `from a import b` as ``a.b``, which may be a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def faults(path: str, source: str) -> list[str]:
    """What a module at `path` (``tierd/...``) imports or does that its place does not allow."""
    tree = ast.parse(source)
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    here, found = room(name), []
    for module in imports(tree):
        top = module.split(".")[0]
        if top == "tierd":
            there = room(module) if (HOUSE / room(module)).is_dir() or (HOUSE / f"{room(module)}.py").exists() else ""
            if there not in MAY[here]:
                found.append(f"{path}: {here or 'tierd'} imports {module}")
            if module.startswith("tierd.stores.open") and path not in OPENS_STORES and here != "cli":
                found.append(f"{path}: opens stores")
        if top == "torch" and here not in ("adapters", "client", "bench"):
            found.append(f"{path}: imports torch")
        if top in DAEMON_ONLY - {"zstandard"} and here in SYNC:
            found.append(f"{path}: imports {module}")
        if top == "zstandard" and here not in ("codec", "planes"):
            found.append(f"{path}: imports {module}")
        if top in PURE and here == "core":
            found.append(f"{path}: core imports {module}")
    if here == "core":
        for node in ast.walk(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                found.append(f"{path}:{node.lineno}: core awaits")
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("open", "print", "input") or called.endswith((".now", ".utcnow", ".today")):
                found.append(f"{path}:{node.lineno}: core calls {called}")
    return found


MODULES = sorted(path.relative_to(HOUSE.parent).as_posix() for path in HOUSE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_imports_run_downward_only(path):
    assert faults(path, (HOUSE.parent / path).read_text()) == []


def test_every_room_is_there_and_no_other():
    assert {room(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")) for path in MODULES} == set(MAY)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tierd/core/plan.py", "from tierd.spool import Spool"),
        ("tierd/core/plan.py", "def f():\n    import time"),
        ("tierd/core/plan.py", "from datetime import datetime\nx = datetime.now()"),
        ("tierd/core/ids.py", "x = open('/etc/passwd')"),
        ("tierd/core/ids.py", "async def f(): ..."),
        ("tierd/core/ids.py", "import asyncio"),
        ("tierd/core/ids.py", "from os import path"),
        ("tierd/stores/file.py", "from tierd.spool import Spool"),
        ("tierd/stores/file.py", "import tierd.daemon.flush"),
        ("tierd/spool.py", "from tierd.daemon import reconcile"),
        ("tierd/spool.py", "import torch"),
        ("tierd/persist.py", "from tierd.codec import encode"),
        ("tierd/device.py", "from tierd.core.manifest import File"),
        ("tierd/commit.py", "from tierd.client.state import flatten"),
        ("tierd/commit.py", "import asyncio"),
        ("tierd/arena.py", "import torch"),
        ("tierd/client/save.py", "from tierd.daemon.flush import flush"),
        ("tierd/client/restore.py", "from tierd.reading import open"),
        ("tierd/daemon/export.py", "from tierd.reading.tiers import Tiers"),
        ("tierd/reading/tiers.py", "from tierd.stores.open import open_store"),
        ("tierd/reading/shared.py", "import torch"),
        ("tierd/reading/reader.py", "from tierd.spool import Spool"),
        ("tierd/__init__.py", "from tierd.reading import open"),
        ("tierd/client/save.py", "from tierd.codec import encode"),
        ("tierd/client/save.py", "from tierd import planes"),
        ("tierd/client/save.py", "def f():\n    try:\n        import asyncio\n    except ImportError:\n        pass"),
        ("tierd/link.py", "from aiobotocore import session"),
        ("tierd/daemon/flush.py", "import torch.nn"),
        ("tierd/bench/drive.py", "from tierd.daemon import service"),
        ("tierd/client/save.py", "from tierd.bench.stats import median"),
        ("tierd/daemon/flush.py", "from tierd.client import state"),
        ("tierd/daemon/flush.py", "from tierd.stores.open import open_store"),
        ("tierd/daemon/flush.py", "from tierd.cli import run"),
        ("tierd/__init__.py", "from tierd.daemon import service"),
    ],
)
def test_a_planted_violation_is_found(path, source):
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tierd/daemon/service.py", "from tierd.stores.open import open_store"),
        ("tierd/client/save.py", "import torch\nfrom tierd.link import Link\nfrom tierd import __version__"),
        (
            "tierd/core/plan.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tierd.spool import Spool",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(path, source):
    assert faults(path, source) == []


# -- what a process really loads --------------------------------------------------------------------------------------


def loaded(code: str) -> set[str]:
    """The top-level modules in a fresh process after `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing():
    assert not loaded("import tierd; tierd.__version__") & (DAEMON_ONLY | {"torch", "numpy", "msgspec"})


def test_errors_that_users_catch_are_imported_from_the_package():
    names = [name for name, error in vars(errors).items() if isinstance(error, type) and name in tierd.__all__]
    assert {"TierdError", "ConfigError", "StateMismatch", "SaveFailed", "TornSnapshot"} <= set(names)
    assert all(getattr(tierd, name) is getattr(errors, name) for name in names)
    readme = (HOUSE.parent / "README.md").read_text()
    assert [name for name in names if f"`{name}`" not in readme] == []
    assert not loaded(f"from tierd import {', '.join(names)}") & (DAEMON_ONLY | {"torch", "numpy", "msgspec"})


@pytest.fixture(scope="module")
def trainers() -> list[set[str]]:
    """All modules of a process that imports torch, then what a trainer imports, then everything that tierd names."""
    print_all = "print(*sys.modules)"
    steps = ["import sys", "import torch", print_all, "from tierd import Checkpointer, RngState", print_all]
    script = "\n".join([*steps, "from tierd import *", print_all])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_a_trainer_loads_nothing_of_the_daemon(trainers):
    """Torch may load asyncio for itself, and rich where it finds it: only what torch alone does not load counts."""
    torch, *more = ({name.split(".")[0] for name in names} for names in trainers)
    assert len(more) == 2
    for names in more:
        assert "tierd" in names - torch and not (names - torch) & DAEMON_ONLY


def test_a_trainer_loads_no_codec(trainers):
    assert not trainers[1] & {"tierd.codec", "tierd.planes", "tierd.layout"}


def test_a_reader_without_the_daemons_extra_is_told_what_to_install():
    script = """
import sys
sys.modules["zstandard"] = None  # as if it were not installed
import tierd
from tierd.core import errors
tierd.Checkpointer
try:
    tierd.open
except tierd.core.errors.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "tierd.open needs the package zstandard: pip install 'tierd[torch,daemon]'"


def test_the_trainers_side_without_torch_loads_no_asyncio():
    """All that the client uses below `client/`."""
    assert (
        not loaded("import tierd.link, tierd.spool, tierd.persist, tierd.core.resume, tierd.core.config") & DAEMON_ONLY
    )
