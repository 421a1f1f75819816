"""`tierd config check` and `tierd run` come to one verdict over a configuration."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import tierd
from tierd.cli import run
from tierd.core.config import Config, TierConfig
from tierd.core.errors import ConfigError
from tierd.spool.spool import Spool
from tierd.stores import mounted_directories

_TIER = '[[tier]]\nname = "nas"\nurl = "file://{home}/tier"\n'
_HOOK = '[[notify]]\nurl = "https://hooks.example/x"\nheaders = {{ Authorization = "{value}" }}\n'


def verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    """The exit code, and the last line on stderr. A daemon that would begin its work ends there."""
    monkeypatch.setattr("tierd.daemon.daemon_service.Reconciler", _Begun)
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


TWO = '[[tier]]\nname = "a"\nurl = "{a}"\n[[tier]]\nname = "b"\nurl = "{b}"\n'
APART = {
    "a link to the other": ("{home}/disk", "{home}/link", "tier[1].url: {home}/link (which is {home}/disk) is the"),
    "in the other": ("{home}/disk", "{home}/link/in", "(which is {home}/disk/in) lies in the directory of tier 'a'"),
    "around the other": ("{home}/disk/in", "{home}/link", "contains the directory of tier 'a', {home}/disk/in,"),
    "the spool": ("{home}/disk", "{home}/node/spool", "tier[1].url: {home}/node/spool is the directory of the spool"),
    "a link to the spool": ("{home}/tospool", "{home}/disk", "tier[0].url: {home}/tospool (which is"),
    "in the spool": ("{home}/disk", "{home}/node/spool/tier", "tier[1].url: {home}/node/spool/tier lies in the"),
    "around the spool": ("{home}/disk", "{home}/node", "tier[1].url: {home}/node contains the directory of the spool,"),
    "not there, in the spool": ("{home}/disk", "{home}/tospool/x/y", "lies in the directory of the spool"),
    "beside, by the beginning of its name": ("{home}/disk", "{home}/disk2", ""),
    "not there": ("{home}/disk", "{home}/nowhere", ""),
}


@pytest.mark.parametrize("made", [True, False], ids=["a spool", "no spool yet"])
@pytest.mark.parametrize("kind", APART)
def test_directories_that_are_not_apart_are_refused(tmp_path: Path, monkeypatch, capsys, kind: str, made: bool) -> None:
    spool = tmp_path / "node" / "spool"
    for one in ("disk/in", "disk2", "node"):
        (tmp_path / one).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "tospool").symlink_to(spool)
    if made:
        Spool(spool)
    a, b, word = (text.replace("{home}", str(tmp_path)) for text in APART[kind])
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{spool}"\n' + TWO.format(a=a, b=b))
    checked = verdict(monkeypatch, capsys, "config", "check", str(file))
    assert checked[0] == (3 if word else 0)
    assert word in checked[1]
    assert not word or "give the tier a directory of its own" in checked[1]
    assert spool.exists() == made
    assert checked == verdict(monkeypatch, capsys, "run", "--config", str(file))
    assert spool.exists() == (made or not word)  # nothing is made where it is refused


def test_a_directory_that_does_not_answer_is_judged_by_its_text(monkeypatch) -> None:
    """A hung mount keeps no daemon from its other tiers."""
    hung = threading.Event()
    monkeypatch.setattr(mounted_directories.os.path, "realpath", lambda path: hung.wait(60))
    tiers = [TierConfig(name=name, url=f"/{name}") for name in ("a", "b")]
    asyncio.run(mounted_directories.check_no_overlap(Config(spool="/s", tier=tuple(tiers)), answer_s=0.1))
    with pytest.raises(ConfigError, match=r"tier\[2\]\.url: /a/c lies in"):
        nested = Config(spool="/s", tier=(*tiers, TierConfig(name="c", url="/a/c")))
        asyncio.run(mounted_directories.check_no_overlap(nested, answer_s=0.1))
    hung.set()


def test_a_trainers_own_daemon_is_refused_in_words_and_a_reader_of_nested_places_is_not(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    with pytest.raises(ConfigError, match=r"tier\[0\]\.url: .*/spool/tier lies in the directory of the spool"):
        tierd.Checkpointer(spool, "run", to=[str(spool / "tier")])
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    with tierd.open([str(tmp_path / "outer"), str(tmp_path / "outer" / "inner")], "run") as reader:
        assert reader.checkpoints() == () and not reader.unreached


def test_a_watched_directory_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tier").mkdir()
    watch = f'[[watch]]\ndirectory = "{tmp_path}/out"\nrun = "r"\n'
    (tmp_path / "tierd.toml").write_text(f'spool = "{tmp_path}/spool"\n' + _TIER.format(home=tmp_path) + watch)
    assert run(["config", "check", str(tmp_path / "tierd.toml")]) == 6
    assert "out as run r  does not exist yet" in capsys.readouterr().out
    (tmp_path / "out").write_text("")
    assert run(["config", "check", str(tmp_path / "tierd.toml")]) == 6
    assert "out as run r  not a directory" in capsys.readouterr().out
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    assert run(["config", "check", str(tmp_path / "tierd.toml")]) == 0


def test_the_configuration_of_the_environment_is_checked(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "tier").mkdir()
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path}/spool"\n' + _TIER.format(home=tmp_path))
    monkeypatch.setenv("TIERD_CONFIG", str(file))
    assert run(["config", "check"]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: in order")
    monkeypatch.delenv("TIERD_CONFIG")
    monkeypatch.setattr("tierd.cli.places.config_files", lambda: ())
    assert run(["config", "check"]) == 3
    assert "no configuration to check: give FILE, or " in capsys.readouterr().err
