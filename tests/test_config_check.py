"""`tierd config check` and `tierd run` come to one verdict over a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierd.cli import run

_TIER = '[[tier]]\nname = "nas"\nurl = "file://{home}/tier"\n'
_HOOK = '[[tell]]\nurl = "https://hooks.example/x"\nheaders = {{ Authorization = "{value}" }}\n'


def verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """The exit code, and the last line on stderr. A daemon that would begin its work ends there."""
    monkeypatch.setattr("tierd.daemon.service.Reconciler", _Begun)
    code = run(list(command))
    lines = capsys.readouterr().err.splitlines()
    return code, lines[-1] if code else ""


class _Begun:
    def __init__(self, *_: object) -> None:
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("more", "environment", "word"),
    [
        (_HOOK.format(value="env:HOOK"), {}, "env:HOOK holds nothing"),
        (_HOOK.format(value="env:HOOK"), {"HOOK": "two\nlines"}, "env:HOOK holds nothing, or no plain line"),
        (_HOOK.format(value="env:HOOK"), {"HOOK": "Bearer x"}, ""),
        (_HOOK.format(value="file:/nowhere/at/all"), {}, "/nowhere/at/all"),
        ('key_file = "{home}/key"\n', {}, "key"),
        ("", {}, ""),
    ],
    ids=["unset", "two lines", "set", "no file", "no key", "plain"],
)
def test_one_verdict(tmp_path: Path, monkeypatch, capsys, more: str, environment: dict[str, str], word: str) -> None:
    (tmp_path / "tier").mkdir()
    monkeypatch.delenv("HOOK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "tierd.toml"
    text = f'spool = "{tmp_path}/spool"\n' + _TIER.format(home=tmp_path) + more.replace("{home}", str(tmp_path))
    file.write_text(text)
    checked = verdict(monkeypatch, capsys, "config", "check", str(file))
    assert checked == verdict(monkeypatch, capsys, "run", "--config", str(file))
    assert checked[0] == (3 if word else 0)
    assert word in checked[1]


def test_a_spool_that_is_a_file_is_none(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "spool").write_text("")
    (tmp_path / "tier").mkdir()
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path}/spool"\n' + _TIER.format(home=tmp_path))
    checked = verdict(monkeypatch, capsys, "config", "check", str(file))
    assert checked == verdict(monkeypatch, capsys, "run", "--config", str(file))
    assert checked[0] == 3 and "not a directory" in checked[1]


def test_a_check_makes_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "tier").mkdir()
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path}/spool"\n' + _TIER.format(home=tmp_path))
    assert verdict(monkeypatch, capsys, "config", "check", str(file))[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tier", "tierd.toml"]
    assert not list((tmp_path / "tier").iterdir())
