"""The next step of each kind of problem is a command that exists, with its places quoted."""

from __future__ import annotations

import shlex

import pytest
from typer.main import get_command

from tierd.cli import app
from tierd.core.diagnosis.problems import NEXT_STEPS, problem

PLACES = {"spool": "/a spool", "url": "s3://b/it's", "directory": "/out"}


@pytest.mark.parametrize("step", NEXT_STEPS)
def test_command_of_a_next_step_exists_and_quotes_its_places(step: str) -> None:
    program, *words = shlex.split(problem("alert", "s3", "why", step, **PLACES).command)
    for name, text in PLACES.items():
        assert (text in words) == (f"{{{name}}}" in NEXT_STEPS[step].command)
    if program == "tierd":
        command = get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("tierd", list(words))  # raises for an option that it does not have


def test_place_without_a_url_leaves_it_out() -> None:
    assert problem("alert", "local", "why", "quarantined", spool="/s", url="").command == "tierd ls --spool /s"
