"""Imports run one way, as ARCHITECTURE.md draws them, and a trainer loads nothing of the daemon.

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
from tierd.core.installation import install_command

TIERD = Path(tierd.__file__).parent
DAEMON_ONLY = {"asyncio", "aiofiles", "aiobotocore", "aiohttp", "botocore", "cryptography", "rich", "typer", "watchdog"}
DAEMON_ONLY |= {"obstore", "zstandard"}

# A component may import these components of tierd. A component is a package, or a module at the top; in packages that
# many import, each module is a component of its own, because a trainer loads some of them and not the others.
EACH = ("codec", "ipc", "spool")
ZSTANDARD = ("codec.chunk_codec", "codec.byte_planes", "codec.zstd_frames", "codec.block_patches")  # what imports it
MAY: dict[str, set[str]] = {
    "core": {"core"},
    "formats": {"formats", "core"},
    "watching": {"watching", "formats", "core"},
    "spool": set(),
    "spool.direct_io": set(),
    "spool.arena": {"spool.direct_io"},
    "spool.spool_access": {"core"},
    "spool.spool_directory": {"spool.file_io", "core"},
    "spool.file_io": {"spool.direct_io", "core"},
    "spool.verified_reads": {"spool.direct_io", "spool.file_io", "core"},
    "spool.foreign_files": {"spool.direct_io", "spool.file_io", "spool.verified_reads", "core"},
    "spool.stage": {"spool.foreign_files", "spool.file_io", "core"},
    "spool.run_records": {"spool.file_io", "spool.spool_access", "core"},
    "spool.leases": {"spool.file_io", "spool.spool_access", "core"},
    "spool.local_parts": {
        "spool.spool_directory",
        "spool.file_io",
        "spool.spool_access",
        "spool.run_records",
        "spool.verified_reads",
        "core",
    },
    "spool.leftovers": {
        "spool.file_io",
        "core",
        "spool.spool_directory",
        "spool.leases",
        "spool.local_parts",
        "spool.spool_access",
        "spool.run_records",
        "spool.stage",
    },
    "spool.spool": {
        "spool.spool_directory",
        "spool.verified_reads",
        "spool.spool_access",
        "spool.leftovers",
        "spool.leases",
        "spool.run_records",
        "spool.stage",
        "spool.file_io",
        "spool.direct_io",
        "core",
    },
    "spool.commit": {"spool.spool_access", "spool.spool", "spool.file_io", "spool.direct_io", "core"},
    "codec": set(),
    "codec.number_layout": set(),
    "codec.zstd_frames": set(),
    "codec.numpy_loops": {"codec.number_layout"},
    "codec.byte_planes": {
        "codec.numpy_loops",
        "codec",  # its compiled module
        "codec.number_layout",
        "codec.zstd_frames",
        "spool.direct_io",
    },
    "codec.block_patches": {"codec.byte_planes", "codec.number_layout", "codec.zstd_frames", "spool.direct_io"},
    "codec.element_deltas": {
        "codec.block_patches",
        "codec.byte_planes",
        "codec.number_layout",
        "codec.numpy_loops",
        "spool.direct_io",
    },
    "codec.chunk_codec": {
        "codec.block_patches",
        "codec.byte_planes",
        "codec.element_deltas",
        "codec.zstd_frames",
        "spool.direct_io",
        "codec.number_layout",
        "spool.file_io",
        "core",
    },
    "ipc": set(),
    "ipc.protocol": {"core"},
    "ipc.messages": {"ipc.protocol", "core"},
    "ipc.message_codec": {"ipc.messages", "core", "ipc.protocol"},
    "ipc.daemon_connection": {
        "spool.spool_access",
        "ipc.messages",
        "ipc.message_codec",
        "ipc.protocol",
        "spool.file_io",
        "spool.spool",
        "core",
        "",
    },
    "ipc.daemon_start": {"ipc.daemon_connection", "ipc.messages", "spool.spool", "spool.file_io", "core"},
    "threads": set(),
    "stores": {"stores", "spool.direct_io", "threads", "core"},
    "state": {"state", "spool.direct_io", "spool.file_io", "core"},
    "events": {"events", "stores", "threads", "spool.commit", "spool.spool_access", "core"},
    "client": {
        "client",
        "state",
        "codec.chunk_codec",  # in a restore from a tier
        "ipc.daemon_connection",
        "ipc.daemon_start",
        "ipc.message_codec",
        "ipc.messages",
        "ipc.protocol",
        "spool.foreign_files",
        "spool.spool_access",
        "spool.commit",
        "spool.arena",
        "spool.spool",
        "spool.leases",
        "spool.run_records",
        "spool.stage",
        "spool.file_io",
        "spool.verified_reads",
        "spool.direct_io",
        "logs",
        "core",
        "",
    },
    "dcp": {
        "dcp",
        "client",
        "state",
        "spool.spool_access",
        "spool.direct_io",
        "spool.spool",
        "spool.stage",
        "spool.file_io",
        "spool.commit",
        "core",
    },
    "daemon": {
        "spool.spool_directory",
        "daemon",
        "events",
        "stores",
        "codec.chunk_codec",
        "codec.byte_planes",
        "codec.number_layout",
        "ipc.message_codec",
        "ipc.messages",
        "ipc.protocol",
        "threads",
        "spool.spool_access",
        "watching",
        "formats",
        "spool.foreign_files",
        "stores.mounted_directories",
        "spool.commit",
        "spool.arena",
        "spool.spool",
        "spool.leases",
        "spool.run_records",
        "spool.stage",
        "spool.file_io",
        "spool.verified_reads",
        "spool.direct_io",
        "core",
        "",
    },
    "exporting": {
        "exporting",
        "dcp",
        "formats",
        "client",
        "state",
        "spool.spool_access",
        "spool.direct_io",
        "spool.file_io",
        "watching",
        "core",
    },
    "reading": {
        "reading",
        "exporting",
        "client",
        "state",
        "daemon",
        "stores",
        "spool.direct_io",
        "spool.file_io",
        "threads",
        "core",
    },
    "bench.growth": {
        "bench.growth",
        "bench",
        "client",
        "codec.chunk_codec",
        "daemon",
        "stores",
        "threads",
        "spool.direct_io",
        "spool.run_records",
        "spool.spool",
        "spool.file_io",
        "core",
        "",
    },
    "bench": {
        "bench",
        "client",
        "state",
        "ipc.daemon_connection",
        "ipc.messages",
        "spool.spool",
        "spool.file_io",
        "core",
        "",
    },
    "cli": {
        "cli",
        "bench",
        "bench.growth",
        "check",
        "daemon",
        "doctor",
        "events",
        "stores",
        "codec.chunk_codec",
        "threads",
        "ipc.daemon_connection",
        "ipc.messages",
        "ipc.message_codec",
        "ipc.protocol",
        "logs",
        "spool.spool_access",
        "reading",
        "spool.spool",
        "spool.verified_reads",
        "watching",
        "core",
        "",
    },
    "filesystem": {"exporting", "reading", "core"},
    "doctor": {
        "doctor",
        "codec.byte_planes",
        "codec.numpy_loops",
        "codec",  # its compiled module
        "daemon",
        "events",  # receivers, which are tried
        "stores",
        "ipc.daemon_connection",
        "ipc.messages",
        "ipc.message_codec",
        "stores.mounted_directories",
        "spool.arena",
        "spool.direct_io",
        "spool.spool",
        "threads",
        "core",
        "",
    },
    "logs": {"core"},
    "adapters": {"adapters", "client", "dcp", "state", "core"},
    "observing": {"observing"},
    "pytest_plugin": {"pytest_plugin", "check"},
    "check": {
        "check",
        "client",
        "state",
        "spool.commit",
        "ipc.daemon_connection",
        "ipc.messages",
        "observing",
        "spool.spool",
        "spool.stage",
        "core",
        "",
    },
    "": {"client", "state", "dcp", "logs", "observing", "core"},
    "__main__": {"cli", "core"},
}
SYNC = {
    "core",
    "formats",
    "watching",
    "spool",
    "ipc",
    "client",
    "state",
    "dcp",
    "exporting",
    "adapters",
    "codec",
    "observing",
    "check",
    "pytest_plugin",
    "",
}  # and each module of those
OPENS_STORES = {"tierd/daemon/daemon_service.py", "tierd/reading/reader_opening.py", "tierd/stores/open.py"}
PURE = {"os", "time", "random", "asyncio", "io", "socket", "threading", "subprocess", "secrets", "pathlib", "tempfile"}


def component(module: str) -> str:
    """`tierd.core.ids` -> `core`; `tierd.spool.stage.Stage` -> `spool.stage`; `tierd` and a name in it -> ``."""
    package, *below = [*module.split(".")[1:], ""]
    if (inner := f"{package}.{below[0]}" if below else package) in MAY and (TIERD / inner.replace(".", "/")).is_dir():
        return inner  # a package in a package that may import more
    if package in EACH and below[0] and (TIERD / package / f"{below[0]}.py").exists():
        return f"{package}.{below[0]}"
    return package if (TIERD / package).is_dir() or (TIERD / f"{package}.py").exists() else ""


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
    here, found = component(name), []
    for module in imports(tree):
        top = module.split(".")[0]
        if top == "tierd":
            if component(module) not in MAY[here]:
                found.append(f"{path}: {here or 'tierd'} imports {module}")
            if module.startswith("tierd.stores.open") and path not in OPENS_STORES and here != "cli":
                found.append(f"{path}: opens stores")
        if top == "torch" and here not in ("adapters", "bench", "bench.growth", "client", "dcp", "exporting", "state"):
            found.append(f"{path}: imports torch")
        if top in DAEMON_ONLY - {"zstandard"} and here.split(".")[0] in SYNC:
            found.append(f"{path}: imports {module}")
        if top == "zstandard" and here not in {*ZSTANDARD, "bench.growth"}:
            found.append(f"{path}: imports {module}")
        if top in PURE and here in ("core", "formats"):
            found.append(f"{path}: {here} imports {module}")
    if here in ("core", "formats"):
        for node in ast.walk(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                found.append(f"{path}:{node.lineno}: {here} awaits")
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("open", "print", "input") or called.endswith((".now", ".utcnow", ".today")):
                found.append(f"{path}:{node.lineno}: {here} calls {called}")
    return found


MODULES = sorted(path.relative_to(TIERD.parent).as_posix() for path in TIERD.rglob("*.py"))


def test_imports_run_downward_only():
    upward = {path: faults(path, (TIERD.parent / path).read_text()) for path in MODULES}
    assert {path: reasons for path, reasons in upward.items() if reasons} == {}


def test_every_component_is_there_and_no_other():
    assert {component(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")) for path in MODULES} == set(
        MAY
    )


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tierd/core/planning/plan.py", "from tierd.spool.spool import Spool"),
        ("tierd/core/planning/plan.py", "def f():\n    import time"),
        ("tierd/core/planning/plan.py", "from datetime import datetime\nx = datetime.now()"),
        ("tierd/core/ids.py", "x = open('/etc/passwd')"),
        ("tierd/core/ids.py", "async def f(): ..."),
        ("tierd/core/ids.py", "import asyncio"),
        ("tierd/core/ids.py", "from os import path"),
        ("tierd/formats/zip_archives.py", "import os"),
        ("tierd/formats/zip_archives.py", "x = open('model.pt', 'rb')"),
        ("tierd/formats/file_checks.py", "from tierd.dcp.metadata import read_metadata"),
        ("tierd/stores/file_store.py", "from tierd.spool.spool import Spool"),
        ("tierd/stores/file_store.py", "import tierd.daemon.transfer.flush"),
        ("tierd/spool/spool.py", "from tierd.daemon import reconcile"),
        ("tierd/spool/spool.py", "import torch"),
        ("tierd/spool/file_io.py", "from tierd.codec.chunk_codec import encode"),
        ("tierd/spool/file_io.py", "from tierd.spool.verified_reads import read_file"),
        ("tierd/spool/direct_io.py", "from tierd.core.manifest import File"),
        ("tierd/spool/commit.py", "from tierd.state.state_loading import flatten"),
        ("tierd/spool/commit.py", "import asyncio"),
        ("tierd/spool/arena.py", "import torch"),
        ("tierd/client/saving/save_jobs.py", "from tierd.daemon.transfer.flush import flush"),
        ("tierd/client/restoring/restorer.py", "from tierd.reading import open"),
        ("tierd/daemon/transfer/restore_to_directory.py", "from tierd.reading.run_on_tiers import Tiers"),
        ("tierd/reading/run_on_tiers.py", "from tierd.stores.open import open_store"),
        ("tierd/reading/restore_from_tiers.py", "import torch"),
        ("tierd/exporting/checkpoint_export.py", "from tierd.reading.run_on_tiers import TierFiles"),
        ("tierd/reading/run_reader.py", "from tierd.spool.spool import Spool"),
        ("tierd/__init__.py", "from tierd.reading import open"),
        ("tierd/client/saving/save_jobs.py", "from tierd.codec.zstd_frames import expand_frame"),
        ("tierd/client/saving/save_jobs.py", "from tierd.codec import byte_planes"),
        (
            "tierd/client/saving/save_jobs.py",
            "def f():\n    try:\n        import asyncio\n    except ImportError:\n        pass",
        ),
        ("tierd/ipc/daemon_connection.py", "from aiobotocore import session"),
        ("tierd/daemon/transfer/flush.py", "import torch.nn"),
        ("tierd/bench/interleaved_run.py", "from tierd.daemon import service"),
        ("tierd/bench/interleaved_run.py", "from tierd.bench.growth import run"),
        ("tierd/client/saving/save_jobs.py", "from tierd.bench.stats import median"),
        ("tierd/daemon/transfer/flush.py", "from tierd.state import flatten"),
        ("tierd/daemon/transfer/flush.py", "from tierd.stores.open import open_store"),
        ("tierd/daemon/transfer/flush.py", "from tierd.cli import run"),
        ("tierd/__init__.py", "from tierd.daemon import service"),
    ],
)
def test_planted_violation_is_detected(path, source):
    assert faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tierd/stores/open.py", "from tierd.stores.open import open_store"),
        (
            "tierd/client/saving/save_jobs.py",
            "import torch\nfrom tierd.ipc.daemon_connection import Link\nfrom tierd import __version__",
        ),
        (
            "tierd/core/planning/plan.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tierd.spool.spool import Spool",
        ),
    ],
)
def test_allowed_import_is_not_reported(path, source):
    assert faults(path, source) == []


# -- what a process really loads --------------------------------------------------------------------------------------


def loaded(code: str) -> set[str]:
    """The top-level modules in a fresh process after `code`."""
    script = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing():
    assert not loaded("import tierd; tierd.__version__") & (DAEMON_ONLY | {"torch", "numpy", "msgspec"})


def test_errors_that_users_catch_are_imported_from_the_package():
    names = [name for name, error in vars(errors).items() if isinstance(error, type) and name in tierd.__all__]
    assert {"TierdError", "ConfigError", "StateMismatch", "SaveFailed", "TornSnapshot"} <= set(names)
    assert all(getattr(tierd, name) is getattr(errors, name) for name in names)
    page = (TIERD.parent / "docs" / "reference" / "api.md").read_text()
    assert [name for name in names if f"`tierd.{name}`" not in page] == []
    assert not loaded(f"from tierd import {', '.join(names)}") & (DAEMON_ONLY | {"torch", "numpy", "msgspec"})


@pytest.fixture(scope="module")
def trainers() -> list[set[str]]:
    """All modules of a process that imports torch, then what a trainer imports, then everything that tierd names."""
    print_all = "print(*sys.modules)"
    steps = ["import sys", "import torch", print_all, "from tierd import Checkpointer, RngState", print_all]
    script = "\n".join([*steps, "from tierd import *", print_all])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_a_trainer_loads_nothing_of_the_daemon(trainers):
    """Torch may load asyncio for itself, and rich where it finds it: only what torch alone does not load counts."""
    torch, *more = ({name.split(".")[0] for name in names} for names in trainers)
    assert len(more) == 2
    for names in more:
        assert "tierd" in names - torch and not (names - torch) & DAEMON_ONLY


def test_a_trainer_loads_no_codec(trainers):
    assert not trainers[1] & {f"tierd.{module}" for module in ZSTANDARD}


@pytest.mark.parametrize(
    ("name", "package", "extras"),
    [("open", "zstandard", "torch,daemon"), ("Checkpointer", "torch", "torch"), ("dcp", "torch", "torch")],
)
def test_name_whose_package_is_missing_names_the_package_to_install(name, package, extras):
    script = f"""
import sys
sys.modules["{package}"] = None  # as if it were not installed
import tierd
try:
    tierd.{name}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip() == f"tierd.{name} needs the package {package}: {install_command(extras)}"


def test_the_public_names_are_listed_and_each_is_there():
    assert {"Checkpointer", "StateMismatch", "dcp", "observe", "open"} <= set(dir(tierd))
    assert not [name for name in dir(tierd) if not hasattr(tierd, name)]
    assert set(tierd.__all__) <= set(dir(tierd))


def test_the_trainers_side_without_torch_loads_no_asyncio():
    """All that the client uses below `client/`."""
    assert (
        not loaded(
            "import tierd.ipc.daemon_connection, tierd.spool.spool, tierd.core.config\n"
            "import tierd.core.timeline.restore_order"
        )
        & DAEMON_ONLY
    )


def test_single_file_sets_the_preload_of_the_tests_fork_server():
    """The last list would hold for all, and forks of a server without torch spend seconds each to import it."""
    tests = Path(__file__).parent
    setters = [path for path in tests.rglob("*.py") if ".set_forkserver_preload(" in path.read_text()]
    assert {path.relative_to(tests).as_posix() for path in setters} - {"test_imports.py"} == {"support/nursery.py"}
