"""The output that a how-to guide shows below `$ tierd …` is the program's, but for numbers, ids and spaces."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.world import Daemon

import tierd
from tierd.cli import run
from tierd.stores.file_store import FileStore

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
_BLOCK = re.compile(r"^    \$ tierd .*\n(?:    .*\n)*", re.M)


def shown(page: str) -> list[tuple[str, list[str]]]:
    """Each command that a page shows with its output."""
    blocks = [textwrap.dedent(block) for block in _BLOCK.findall((HOWTO / f"{page}.md").read_text())]
    texts = [text for block in blocks for text in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(lines[0], lines[1:]) for lines in (text.splitlines() for text in texts)]


PAGES = (
    *("own-loop", "operate", "monitor", "recovery", "export", "follow", "copy", "import"),
    *("slurm", "kubernetes", "container", "s3", "encryption", "notifications", "service"),
)
SHOWN = [(page, command, lines) for page in PAGES for command, lines in shown(page)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A spool with three checkpoints of a run, the daemon that has sent them, and another program's files."""
    torch = pytest.importorskip("torch")
    layouts = pytest.importorskip("support.layouts")
    home = tmp_path_factory.mktemp("node")
    for name in ("tier", "copies", "encrypted", "outputs"):
        (home / name).mkdir()
    (home / "key").write_text("0123456789abcdef" * 4)
    (home / "key").chmod(0o600)
    (home / "page").write_text("#!/bin/sh\n")
    (home / "page").chmod(0o755)
    layouts.trainer(home / "outputs")
    tier = f'[[tier]]\nname = "s3"\nurl = "file://{home}/tier"\n[[notify]]\ncommand = ["{home}/page"]\n'
    (home / "tierd.toml").write_text(f'spool = "{home}/spool"\n{tier}')
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    with Daemon(home / "spool", lambda: {"file": FileStore(home / "tier")}) as daemon:
        with tierd.Checkpointer(home / "spool", run="llama-7b") as ckpt:
            for step in (100, 200, 300):
                model(torch.randn(8, 200)).square().mean().backward()
                optimizer.step()
                state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": step}
                ckpt.save(step, state, metrics={"loss": 1 / step}).wait("file", timeout=60)
        daemon.settle()
        yield home


@pytest.mark.parametrize(("page", "command", "lines"), SHOWN, ids=[f"{page}: {line}" for page, line, _ in SHOWN])
def test_output_of_a_page_is_printed(page, command, lines, home, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(home)
    on_terminal(monkeypatch)
    assert run(shlex.split(_there(command, home))[1:]) == 0, capfd.readouterr().err
    assert_printed(lines, capfd.readouterr().out, home)


def test_output_of_the_page_about_watching_is_printed(home, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(home)
    on_terminal(monkeypatch)
    explain, prepare = shown("watch")
    assert run(shlex.split(explain[0])[1:]) == 0
    assert_printed(explain[1], capfd.readouterr().out, home)
    assert run(["watch", "outputs", "--run", "watched", "--to", f"{home}/copies", "--until-idle"]) == 0
    optimizer = home / "outputs" / "checkpoint-500" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-20])
    capfd.readouterr()
    command = prepare[0].replace("llama-7b", "watched").replace("URL", f"{home}/copies")
    assert run(shlex.split(command)[1:]) == 0
    assert_printed(prepare[1], capfd.readouterr().out, home)


_LAUNCH = """
import sys, tierd
with tierd.Checkpointer(sys.argv[1], run="any", to=[]) as ckpt:
    state = {"step": 0}
    ckpt.restore(state)
    ckpt.save(int(sys.argv[2]), state)
"""


def test_lines_that_pages_show_of_a_launch_are_those_of_a_launch(tmp_path: Path) -> None:
    """Of the first launch of a run, and of a second one."""
    pytest.importorskip("torch")
    said = ""
    for step in ("1", "2"):
        command = [sys.executable, "-c", _LAUNCH, str(tmp_path / "spool"), step]
        said += subprocess.run(command, capture_output=True, text=True, check=True).stderr
    pages = [*HOWTO.glob("*.md"), HOWTO.parent / "tutorial" / "quickstart.md"]
    lines = {line for page in pages for line in re.findall(r"^    (tierd: run .*)$", page.read_text(), re.M)}
    assert lines and {_of_any_run(line) for line in lines} <= {_of_any_run(line) for line in said.splitlines()}


def _of_any_run(line: str) -> str:
    return _plain(re.sub(r"\([^)]*\)|(?<=run )\S+|(?<=in )/\S+|(?<=spool )/\S+", "#", line))


def _places(home: Path) -> dict[str, str]:
    """The pages' paths, and those of this test."""
    named = {"s3://bucket/checkpoints": "tier", "/mnt/copies": "copies", "/mnt/encrypted": "encrypted"}
    named |= {"/nvme/tierd": "spool", "/etc/tierd/key": "key", "/usr/local/bin/page": "page"}
    places = {there: f"{home}/{name}" for there, name in named.items()}
    return places | {"/etc/tierd/tierd.toml": f"{home}/tierd.toml", "/home/alice": str(home)}


def _there(command: str, home: Path) -> str:
    for shown_path, path in _places(home).items():
        command = command.replace(shown_path, path)
    return command


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands print as on a terminal of 80 columns, which is what a reader of the page has."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def assert_printed(lines: list[str], out: str, home: Path) -> None:
    """The lines are among those of the output, in their order."""
    for shown_path, path in sorted(_places(home).items(), key=lambda place: -len(place[1])):  # a path begins another
        out = out.replace(f"file://{path}", shown_path).replace(path, shown_path)
    printed = _plain(re.sub(r"\bfile\b", "s3", out))  # as one line, because real paths are longer and wrap elsewhere
    for line in lines:
        _, text, printed = printed.partition(_plain(line))
        assert text, f"{line!r} is not printed there:\n{out}"


def _plain(line: str) -> str:
    return " ".join(re.sub(r"\S*\d\S*", "#", line.replace("s3", "S")).split())
