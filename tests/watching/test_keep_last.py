"""`tierd run --config FILE --keep-last N` keeps N checkpoints in each place, also of a watched directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.by_hand import parts_on
from support.watched_run import RUN
from support.whole_layouts import pt, write

from tierd.cli import run


def configured(root: Path, tier: Path, more: str = "") -> Path:
    file = root.parent / "tierd.toml"
    file.write_text(
        f'spool = "{root.parent}/spool"\n{more}[[tier]]\nname = "t"\nurl = "file://{tier}"\n'
        f'[[watch]]\ndirectory = "{root}"\nrun = "{RUN}"\n'
    )
    return file


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [1, 5])
def test_keep_last_is_policy_of_watched_run(number: int, root: Path, tier: Path) -> None:
    for step in range(1, 7):
        write(root, {f"step_{step}/w.pt": pt(step)}, 1_000_000 + step)
    for _ in range(2):
        assert run(["run", "--config", str(configured(root, tier)), "--keep-last", str(number), "--until-idle"]) == 0
    assert sorted(step for step, *_ in parts_on(tier, RUN)) == [*range(7 - number, 7)]


@pytest.mark.parametrize("more", ["[retention]\nkeep_last = 2\n", ""])
def test_keep_last_is_refused_beside_retention_of_the_file(
    more: str, root: Path, tier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configured(root, tier, more)
    if not more:
        file.write_text(
            f"{file.read_text()}[[tier]]\nname = 'u'\nurl = 'file://{tier}2'\nretention = {{keep_last = 2}}\n"
        )
    assert run(["run", "--config", str(file), "--keep-last", "5", "--until-idle"]) == 3
    assert "leave --keep-last out" in capsys.readouterr().err
