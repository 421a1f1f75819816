"""The manual page: as the code has it, well formed, and installed where man looks for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib

import pytest

from tools import manpage, reference


def test_the_page_is_that_of_the_code() -> None:
    """`make reference` writes it anew."""
    assert manpage.PAGE.read_text() == manpage.page()


def test_it_has_every_command_and_option() -> None:
    text = manpage.page()
    for name, command in reference.commands().items():
        assert f"\n{manpage.escaped(reference.usage(name, command))}\n" in text
        for word, *_ in reference.parameters(command):
            assert f"\n.B {manpage.escaped(word)}\n" in text, (name, word)


def test_text_is_no_command_of_groff() -> None:
    assert manpage.escaped(".so /etc/passwd") == "\\&.so /etc/passwd"
    assert manpage.escaped("a\\fB  --b\n`c` →") == "a\\(rsfB \\-\\-b c \\[u2192]"


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_groff_reads_it_without_a_warning() -> None:
    command = ["groff", "-man", "-ww", "-Tutf8", str(manpage.PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr == ""
    shown = re.sub(".\b", "", done.stdout)  # bold is struck twice
    assert "tierd drain [OPTIONS]" in shown and "EXIT STATUS" in shown


def test_pip_installs_it() -> None:
    project = tomllib.loads((reference.ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["data-files"] == {"share/man/man1": ["docs/tierd.1"]}
