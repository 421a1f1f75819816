"""What the README documents exists, and what exists is documented: commands, options, codes, keys, metrics, JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from faults.__main__ import KINDS, kit
from faults.page import RESULTS, put, refused, table
from typer.main import get_command

from tierd.check import Report as Checked
from tierd.check.causes import Cause
from tierd.check.compare import Divergence, RankResult
from tierd.check.report import LaunchResult
from tierd.cli import EXIT_CODES, app
from tierd.cli.act import Judged
from tierd.cli.disown import Disowned
from tierd.cli.ending import Drained, LeftPart, Waited
from tierd.cli.read import Check
from tierd.cli.space import Removal, Usages
from tierd.client.save import Stats
from tierd.core import events
from tierd.core.config import Config, TellConfig, TierConfig, from_toml
from tierd.core.events import MORE, Event
from tierd.core.launches import Lease, Rival
from tierd.core.report import Checkpoint, Copy, Report
from tierd.core.retention import Best, RetentionPolicy
from tierd.daemon.disown import Claim
from tierd.daemon.export import Exported
from tierd.daemon.journal import AlertStatus
from tierd.daemon.remove import Held
from tierd.daemon.scrub import ScrubStatus
from tierd.daemon.status import COUNTERS, PolicyStatus, Status, TierStatus
from tierd.daemon.tell import TellStatus
from tierd.daemon.usage import Usage

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands(command: object = None, prefix: str = "tierd") -> dict[str, list[str]]:
    """Each command's path -> its options."""
    command = get_command(app) if command is None else command
    inner = getattr(command, "commands", None)
    if inner:
        found: dict[str, list[str]] = {}
        for name, one in inner.items():
            found |= commands(one, f"{prefix} {name}")
        return found
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    return {prefix: [option for option in options if option != "--help"]}


def test_every_command_and_option_is_in_the_readme() -> None:
    found = commands()
    assert len(found) == 20
    for command, options in found.items():
        assert command in README, f"{command} is not documented"
        for option in options:
            assert option in README, f"{command} {option} is not documented"


def test_every_command_that_the_readme_names_exists() -> None:
    named = {match[1] for match in re.finditer(r"`?tierd ((?:config |bench )?[a-z]+(?:-[a-z]+)*)\b", README)}
    verbs = {command.removeprefix("tierd ") for command in commands()}
    prose = named - verbs
    assert {word for word in prose if f"`tierd {word}" in README or f"    tierd {word}" in README} == set()


def test_every_option_that_the_readme_names_exists() -> None:
    section = README.split("## The command line")[1].split("## Metrics")[0]
    known = {option for options in commands().values() for option in options}
    known |= {option for parameter in get_command(app).params for option in parameter.opts}  # before any command
    assert set(re.findall(r"--[a-z][a-z-]+", section)) <= known


def test_every_option_before_a_command_is_in_the_readme() -> None:
    for parameter in get_command(app).params:
        for option in parameter.opts:
            assert f"`tierd --version {option}`" in README or f"`tierd {option}`" in README


def test_exit_codes() -> None:
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in README


def test_every_configuration_key_and_default() -> None:
    section = README.split("### Configuration")[1].split("### Places")[0]
    for struct in (Config, TierConfig, TellConfig, RetentionPolicy, Best):
        for name in struct.__struct_fields__:
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", section), f"{struct.__name__}.{name} is not documented"
    for name in ("rescan", "drain", "min_free_percent", "finished", "scrub", "scrub_rate"):
        default = Config.__struct_defaults__[Config.__struct_fields__.index(name) - len(Config.__struct_fields__)]
        row = next(line for line in section.splitlines() if line.startswith(f"| `{name}` "))
        assert f"`{default:g}`" in row if isinstance(default, float) else f"`{default}`" in row
    for name in ("per_minute", "timeout_s"):
        row = next(line for line in section.splitlines() if line.startswith(f"| `tell.{name}` "))
        assert f"`{getattr(TellConfig(url='https://h'), name):g}`" in row


def test_the_example_configuration_is_valid() -> None:
    text = (ROOT / "systemd" / "tierd.toml").read_text()
    assert from_toml(text, "tierd.toml").named("s3").retention.keep_best == Best(metric="val_loss", count=2)
    assert set(tomllib.loads(text)) <= set(Config.__struct_fields__)


def test_every_counter_and_stat() -> None:
    section = README.split("## Metrics")[1].split("## Recovery")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))
    assert {name: rows.get(name) for name in COUNTERS} == COUNTERS
    stats = {field.name for field in dataclasses.fields(Stats)}
    assert set(rows) == set(COUNTERS) | stats


@pytest.mark.parametrize(
    ("command", "shapes"),
    [
        ("status", (Status, TierStatus, PolicyStatus, Rival, ScrubStatus, Event, AlertStatus, TellStatus, Lease)),
        ("ls", (Report, Checkpoint, Copy)),
        ("verify", (Check,)),
        ("restore", (Exported,)),
        ("prune", (Judged,)),
        ("du", (Usages, Usage)),
        ("rm", (Removal, Held)),
        ("disown", (Disowned, Claim)),
        ("drain", (Drained, LeftPart)),
        ("wait", (Waited,)),
        ("check-resume", (Checked, LaunchResult, RankResult, Divergence, Cause)),
    ],
)
def test_the_json_contract_names_every_member(command: str, shapes: tuple[type, ...]) -> None:
    contract = README.split("is a stable contract")[1].split("## Metrics")[0]
    row = next(line for line in contract.splitlines() if line.startswith(f"| `{command}` |"))
    named = set(re.findall(r"`(\w+)`", row)) - {command}
    fields = {field.name for shape in shapes for field in msgspec.inspect.type_info(shape).fields}
    wrappers = {"checks", "unreached", "verdicts"}
    assert fields - named == set()
    assert named - fields <= wrappers


def test_every_kind_of_event() -> None:
    section = README.split("### Telling")[1].split("\n### ")[0]
    rows = dict(re.findall(r"^\| `([a-z ]+)` \| (.*) \|$", section, re.M))
    assert rows == {name: kind.means for name, kind in events.KINDS.items()}
    assert all(f"`{name}`" in section for name in Event.__struct_fields__)
    # And no event is told that is none of these.
    told = set()
    for path in (ROOT / "tierd" / "daemon").rglob("*.py"):
        told |= set(re.findall(r"\b(?:tell|_tell_of)\(\s*\"([^\"]+)\"", path.read_text()))
    assert told | {MORE} == set(events.KINDS)


def test_relative_links_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), ROOT / "tierd" / "FORMAT.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_gate_is_what_the_readme_says() -> None:
    """Each kind of fault is described, and the table is that of the last full round, in which nothing was lost."""
    section = README.split("## What it was put through")[1].split("\n## ")[0]
    assert re.findall(r"^\| ([a-z0-9]+) \| [^|]+ \|$", section, re.M)[1:] == list(KINDS)
    results = json.loads(RESULTS.read_text())
    assert put(README, table(results, KINDS)) == README
    assert refused(results, {kind: kit(kind).GATE for kind in KINDS}) == []
    assert not any(result["losses"] for result in results.values())
