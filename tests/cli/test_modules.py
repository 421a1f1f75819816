"""A command loads its own module alone: the table that says which is right, and no command is left out."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.doubles import Double
from support.world import Daemon, commit, part
from typer.main import get_command

from tierd import cli
from tierd.cli.purposes import OPTIONS, PURPOSES
from tierd.spool.spool import Spool
from tools.reference import ROOT

ALL = [command for commands in cli.MODULES.values() for command in commands]


def test_the_table_names_every_command_once_beside_its_module():
    assert len(ALL) == len(set(ALL))
    for module, commands in cli.MODULES.items():
        assert tuple(get_command(cli._app(module)).commands) == commands, module
    assert sorted(get_command(cli.app).commands) == sorted(ALL)


def test_the_help_has_the_groups_of_the_reference(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    sections = {section.partition("\n")[0]: section for section in page.split("\n## ")[1:]}
    assert list(cli.GROUPS) == list(sections)
    for title, names in cli.GROUPS.items():
        headings = re.findall(r"^### tierd ([a-z-]+)", sections[title], re.MULTILINE)
        assert tuple(dict.fromkeys(headings)) == names
    assert sorted(name for names in cli.GROUPS.values() for name in names) == sorted(ALL)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(sum(line.startswith(f"  {name} ") for line in lines) == 1 for name in ALL)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["ls", "file:///x"], "commands.checkpoint_commands"),
        (["--json", "status"], "commands.status_commands"),
        (["import", "--help"], "commands.copy_commands"),
        ([], ""),
        (["--help"], ""),
        (["lss"], None),
    ],
)
def test_command_line_imports_the_module_of_the_given_command(arguments, module, monkeypatch):
    assert cli._module_of(arguments) == module
    monkeypatch.setenv("_TIERD_COMPLETE", "complete_bash")
    assert cli._module_of(arguments) == ""


def test_a_status_loads_no_planner_no_store_and_no_library_for_them(tmp_path: Path) -> None:
    """pydantic is typer's: a newer one checks values with it."""
    spool = Spool(tmp_path / "spool")
    commit(spool, part(1))
    code = f"import sys, tierd.cli; tierd.cli.run(['status', '--spool', {str(spool.root)!r}]); print(*sys.modules)"
    with Daemon(spool.root, {"disk": Double()}):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(said.splitlines()[-1].split())
    assert "TIER " in said and "tierd.cli.commands.status_commands" in loaded
    assert not {"asyncio", "numpy", "rich", "torch", "zstandard"} & loaded
    assert not [name for name in loaded if name.startswith(("tierd.stores.", "tierd.watching.", "tierd.formats."))]
    assert {name for name in loaded if name.startswith("tierd.daemon.")} == {"tierd.daemon.status_file"}
    assert not {"tierd.core.planning.inventory", "tierd.core.run_report", "tierd.cli.progress"} & loaded


def test_purposes_are_the_first_sentences_of_the_commands_help():
    commands = get_command(cli.app).commands
    sentences = {name: " ".join(commands[name].help.split()).split(". ")[0].rstrip(".") for name in ALL}
    assert sentences == PURPOSES


def test_completed_options_are_those_of_the_commands() -> None:
    for name, command in get_command(cli.app).commands.items():
        options = [param for param in getattr(command, "params", ()) if param.param_type_name == "option"]
        words = [word.partition("=") for word in OPTIONS.get(name, "").split()]
        if not hasattr(command, "commands"):
            assert [param.opts[-1] for param in options] == [word.removesuffix("+") for word, _, _ in words], name
            assert [not param.is_flag for param in options] == [bool(sign) for _, sign, _ in words], name
            assert [param.multiple for param in options] == [word.endswith("+") for word, _, _ in words], name
            choices = [param.metavar for param in options if "|" in (param.metavar or "")]
            assert choices == [values for _, _, values in words if values], name


def test_help_names_arguments_without_their_types(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in (*ALL, "config check", "notify test", "bench overhead"):
        assert cli.run([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert " show [OPTIONS] RUN STEP [URL]...\n" in text and " config check [OPTIONS] [FILE]\n" in text
    assert not re.search("[<{](?!directory|step|attempt|run|name)", text) and max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "completed"),
    [
        (["--help"], None),
        (["--version"], None),
        ([], "tierd "),
        ([], "tierd st"),
        ([], "tierd status --js"),
    ],
)
def test_help_and_completion_load_no_module_of_another_command(arguments, completed):
    code = (
        f"import sys, tierd.cli; sys.argv = ['tierd']; tierd.cli.run({arguments}); print(*sys.modules, file=sys.stderr)"
    )
    completing = {"_TIERD_COMPLETE": "complete_bash", "COMP_WORDS": completed or "", "COMP_CWORD": "1"}
    if completed and completed.count(" ") == 2:
        completing["COMP_CWORD"] = "2"
    env = os.environ | (completing if completed else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    loaded = set(done.stderr.split())
    commands = {name.removeprefix("tierd.cli.") for name in loaded if name.startswith("tierd.cli.commands.")}
    if completed and "status" in completed:
        assert "--json" in done.stdout and not commands
        assert not {"asyncio", "pydantic", "rich.console", "numpy", "torch"} & loaded
    else:
        assert (not commands and "status" in done.stdout) or "format" in done.stdout
        assert not {"tierd.daemon", "tierd.stores", "tierd.spool", "rich.console", "numpy", "torch"} & loaded
        assert completed is None or "pydantic" not in loaded


@pytest.mark.parametrize(("command", "shown"), [("verify", False), ("run", True), ("watch", True)])
def test_retries_of_a_store_are_logged_by_services_alone(command: str, shown: bool, monkeypatch) -> None:
    handlers: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: handlers.extend(options["handlers"]))
    assert cli.run([command, "--help"]) == 0
    record = logging.LogRecord("tierd.stores.retry", logging.INFO, "", 0, "attempt 1 of 5 failed", None, None)
    assert bool(handlers[0].filter(record)) == shown
    record.levelno = logging.WARNING
    assert handlers[0].filter(record)
