"""`tierd notify test` sends an event to each receiver and says which of them took it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.receiver import receiving

from tierd.cli import run


def test_each_receiver_gets_the_event_and_its_answer_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tierd.toml"
    places = f'spool = "{tmp_path}/spool"\n[[tier]]\nname = "nas"\nurl = "{tmp_path}/tier"\n'
    with receiving() as receiver:
        good = f'[[notify]]\nurl = "{receiver.url()}"\nevents = ["failing"]\n'
        file.write_text(places + good)
        assert run(["notify", "test", "--config", str(file)]) == 0
        assert "delivered" in capsys.readouterr().out
        (event,) = receiver.reported
        assert (event["what"], event["spool"], event["subject"]) == ("test", f"{tmp_path}/spool", "notify[0]")
        file.write_text(f'{places}{good}[[notify]]\ncommand = ["/bin/false", "secret"]\n')
        assert run(["notify", "test", "--config", str(file), "--json"]) == 6
    shown = capsys.readouterr().out
    assert [test["error"] for test in json.loads(shown)["receivers"]] == [None, "it ended with 1"]
    assert "secret" not in shown
    file.write_text(places)
    assert run(["notify", "test", "--config", str(file)]) == 3
