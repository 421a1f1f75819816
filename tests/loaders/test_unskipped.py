"""With TIERD_LOADERS=all a test of others' libraries fails where it would be skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
@pytest.mark.loaders
def test_imports(): pytest.importorskip("no_such_module")
@pytest.mark.loaders
@pytest.mark.skipif(True, reason="never")
def test_marked(): pass
@pytest.fixture
def made(): pytest.skip("no such device")
@pytest.mark.loaders
def test_fixture(made): pass
@pytest.mark.loaders
@pytest.mark.xfail(reason="known")
def test_known(): assert False
@pytest.mark.loaders
def test_runs(): pass
def test_needs_no_library(): pytest.skip("no root")
"""
FILE = 'import pytest\npytest.importorskip("no_such_module")\ndef test_never(): pass\n'


def outcomes(directory: Path, loaders: str) -> str:
    (directory / "test_some.py").write_text(TESTS)
    (directory / "test_file.py").write_text(FILE)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  loaders\n")
    path = os.pathsep.join(
        str(one) for one in (Path(__file__).parents[1], *filter(None, [os.environ.get("PYTHONPATH")]))
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "support.unskipped", "-p", "no:cacheprovider"]
    environment = os.environ | {"TIERD_LOADERS": loaders, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, "--continue-on-collection-errors"], cwd=directory, env=environment,
        capture_output=True, text=True, timeout=250)  # fmt: skip
    return done.stdout


def test_a_skip_is_a_failure_where_all_libraries_are_installed(tmp_path: Path) -> None:
    said = outcomes(tmp_path, "all")
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors" in said, said
    assert "No module named 'no_such_module'" in said and "lets none be skipped: `make loaders/ready`" in said


@pytest.mark.parametrize("loaders", ["", "some"])
def test_elsewhere_it_is_a_skip(tmp_path: Path, loaders: str) -> None:
    assert "1 passed, 5 skipped, 1 xfailed" in outcomes(tmp_path, loaders)
