"""Completion in a real bash, by the script that `tierd --show-completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
source <(_TIERD_COMPLETE=source_bash tierd)
complete -p tierd
for line in "tierd dr" "tierd status --che" "tierd run --log-f"; do
  COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMPREPLY=()
  _tierd_completion tierd
  echo "$line: ${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    tierd = tmp_path / "tierd"
    code = "import sys; from tierd.cli import run; sys.argv[0] = 'tierd'; sys.exit(run())"
    tierd.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    tierd.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    command = ["bash", "--norc", "--noprofile", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout.splitlines() == [
        "complete -o default -F _tierd_completion tierd",
        "tierd dr: drain",
        "tierd status --che: --check",
        "tierd run --log-f: --log-format",
    ], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tierd"]  # nothing is installed without being asked
