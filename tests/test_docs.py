"""What the pages document exists, and what exists is documented: commands, options, codes, keys, metrics, JSON."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
from faults.__main__ import KINDS, kit
from faults.page import PAGE as GATE
from faults.page import RESULTS, put, refused, tables

import tierd
from tierd.core import event_kinds
from tierd.core.config import Config, HttpConfig, NotifyConfig, TierConfig, from_toml
from tierd.core.event_kinds import MORE_EVENTS, TEST_EVENT, Event
from tierd.core.retention.policy import Best, RetentionPolicy
from tools import reference
from tools.installation import with_install_commands

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_tables_of_the_reference_are_those_of_the_code() -> None:
    """`make reference` writes them anew."""
    assert [str(path.relative_to(ROOT)) for path in reference.stale()] == []


def test_one_constant_decides_from_where_all_pages_install() -> None:
    page = "    pip install '.[crypt]'    # in a checkout\nThey need `pip install '.[s3]'` in a checkout.\n"
    released = "    pip install 'tierd[crypt]'\nThey need `pip install 'tierd[s3]'`.\n"
    assert (with_install_commands(page, "tierd"), with_install_commands(released, ".")) == (released, page)


def test_the_reference_has_every_command_event_counter_and_public_name() -> None:
    """That a page has all the tables; what stands in them is made of the code."""
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    marks = {mark for text in pages.values() for mark in re.findall(r"<!-- made: (?!end)(.+?) -->", text)}
    assert {f"cli {words.removeprefix('tierd ')}" for words in reference.commands()} <= marks
    tables = {
        "codes",
        "events",
        "counters",
        "families",
        "findings",
        "stats",
        "configuration",
        "answers",
        "types",
        "errors",
    }
    assert tables <= marks
    assert {"api tierd", "api tierd open Reader Loaded", "api tierd.dcp", "api tierd.check"} <= marks
    shown = {*tierd.__all__, "open", "Reader", "Loaded"} - {"__version__"}
    assert {name for name in shown if f"tierd.{name}" not in pages["api"]} == set()


def test_every_member_of_the_configuration_and_of_an_event_has_a_meaning() -> None:
    for kind in (Config, TierConfig, NotifyConfig, HttpConfig, RetentionPolicy, Best, Event):
        assert [name for name in reference.members(kind) if not reference.attributes(kind).get(name)] == []
    rows = [line for line in reference.types().splitlines() if line.startswith("| `")]
    assert [line for line in rows if line.endswith("|  |")] == []


def test_every_retention_rule_is_explained_where_people_look() -> None:
    """Beside the reference, which is made of the code."""
    pages = ("docs/howto/choosing.md", "tierd/FORMAT.md", "systemd/tierd.toml", "docs/explanation/parity.md")
    named = {page: set(re.findall(r"keep_[a-z_]+", (ROOT / page).read_text())) for page in pages}
    assert [
        (page, name) for page in pages for name in RetentionPolicy.__struct_fields__ if name not in named[page]
    ] == []


def test_every_command_s_json_is_in_the_reference() -> None:
    """Commands print an object of a class, which is shown whole, or a few members, which are compared here."""
    printed = set()
    for path in (ROOT / "tierd" / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print_json":
                for one in node.args:
                    if isinstance(one, ast.Dict):
                        printed.add(tuple(ast.literal_eval(key) for key in one.keys if key))
    assert printed == {tuple(shape) for shape in reference.SHAPES.values() if isinstance(shape, dict)}
    like = {"unpin": "pin", "resume": "pause"}
    named = {words.removeprefix("tierd ") for words in reference.commands()}
    others = {"--version", "/runs", ".tierd/last-verified.json"}
    shown = {name.partition(" --")[0] for name in reference.SHAPES} - others  # an option changes it
    assert {like.get(name, name) for name in named} - {"top"} == shown  # which prints `status` and `/runs`


def test_every_command_that_a_page_names_exists() -> None:
    verbs = {words.removeprefix("tierd ") for words in reference.commands()}
    for page in PAGES:
        named = re.findall(
            r"(?:`|^    (?:\$ )?)tierd ((?:config |bench |notify )?[a-z]+(?:-[a-z]+)*)\b", page.read_text(), re.M
        )
        assert set(named) - verbs == set(), page


def test_every_option_that_a_page_names_exists() -> None:
    """Options that stand in a code span or block with `tierd COMMAND`."""
    known = {
        words.removeprefix("tierd "): {option for parameter in command.params for option in parameter.opts}
        for words, command in reference.commands().items()
    }
    for page in PAGES:
        text = page.read_text().replace("\\\n", "")
        for call in re.findall(r"(?:`|^    (?:\$ )?)(tierd [^`\n#]+)", text, re.M):
            command = next((name for name in known if call.startswith(f"tierd {name}")), None)
            if command is not None:
                assert set(re.findall(r"--[a-z][a-z-]+", call)) <= known[command] | {"--help"}, f"{page.name}: {call}"


def test_the_example_configuration_is_valid() -> None:
    text = (ROOT / "systemd" / "tierd.toml").read_text()
    assert from_toml(text, "tierd.toml").tier_named("s3").retention.keep_best == Best(metric="val_loss", count=2)
    assert set(tomllib.loads(text)) <= set(Config.__struct_fields__)


def test_the_configuration_of_receivers_is_valid() -> None:
    text = (ROOT / "docs" / "howto" / "notifications.md").read_text().split("```toml\n")[1].split("```")[0]
    places = 'spool = "/spool"\n[[tier]]\nname = "disk"\nurl = "file:///tier"\n'
    assert len(from_toml(places + text, "it").notify) == 2


def test_no_event_is_sent_that_is_not_listed() -> None:
    sent = set()
    for path in (ROOT / "tierd").rglob("*.py"):
        sent |= set(re.findall(r"\b(?:record|_record_alert)\(\s*\"([^\"]+)\"", path.read_text()))
    assert sent | {MORE_EVENTS, TEST_EVENT} == set(event_kinds.EVENT_KINDS)


def test_the_readme_is_short() -> None:
    assert len(README.read_bytes()) <= 8192


def test_the_readme_s_quickstart_resumes(tmp_path: Path) -> None:
    """Its fifteen lines, ended after 40 steps and started again, come to where they come to without the end."""
    torch = pytest.importorskip("torch")
    code = README.read_text().split("```python\n")[1].split("```")[0]
    assert code.count("\n") <= 20

    def trained(last: int, spool: str) -> list[float]:
        torch.manual_seed(0)
        found: dict[str, object] = {}
        exec(
            code.replace('"spool"', repr(str(tmp_path / spool))).replace("1000", str(last)).replace("% 50", "% 20"),
            found,
        )
        return found["model"].weight.tolist()[0]  # type: ignore[attr-defined]

    whole = trained(100, "whole")
    trained(40, "killed")
    assert trained(100, "killed") == whole


def test_gate_page_shows_the_results_of_the_last_full_rounds() -> None:
    """Each kind of fault is described, and the table is that of the last full rounds, in which nothing was lost."""
    text = GATE.read_text()
    assert re.findall(r"^\| ([a-z0-9]+) \| [^|]+ \|$", text, re.M)[1:] == list(KINDS)
    results = json.loads(RESULTS.read_text())
    assert put(text, tables(results, {kind: kit(kind).GATE for kind in KINDS})) == text
    assert refused(results) == []
    assert not any(result["losses"] for result in results.values())


# -- ARCHITECTURE ------------------------------------------------------------------------------------------------------


def test_the_architecture_names_every_package_and_no_other():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {path.parent.relative_to(ROOT / "tierd").as_posix() for path in (ROOT / "tierd").rglob("__init__.py")}
    assert set(re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)) == packages - {"."}


def test_files_that_the_architecture_names_are_there():
    pages = (ROOT / "ARCHITECTURE.md", *(ROOT / "docs" / "explanation").glob("*.md"))
    named = {file for page in pages for file in re.findall(r"`([\w/]+/\w+\.py)`", page.read_text())}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "tierd" / name).exists() and not (ROOT / name).exists()] == []
