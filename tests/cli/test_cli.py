"""The command line as its users meet it: answers, JSON, exit codes, and one clear line for every bad input."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.chunk_keys import chunk_files

import tierd
from tierd.cli import run
from tierd.cli.progress import Meter
from tierd.core.config import from_urls
from tierd.core.ids import CheckpointId, PartId
from tierd.core.installation import install_command
from tierd.core.manifest import WITH_DELTAS
from tierd.core.manifest_codec import decode, seal
from tierd.core.planning.inventory import Inventory
from tierd.daemon.daemon_service import open_tiers
from tierd.daemon.reconciler import Reconciler
from tierd.daemon.tiers.tier_prune import PruneResult, prune
from tierd.ipc.protocol import PROTOCOL
from tierd.spool.spool import Spool
from tierd.stores.base import Store


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A spool with three checkpoints of run `r`, flushed to a directory tier."""
    spool, tier = tmp_path / "spool", tmp_path / "tier"
    tier.mkdir()
    with tierd.Checkpointer(spool, run="r") as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, {"weights": torch.arange(1000.0) * step}, metrics={"loss": 1 / step}).wait()
    asyncio.run(_flush_all(spool, tier))
    return spool, tier


async def _flush_all(spool: Path, tier: Path) -> None:
    config = msgspec.structs.replace(
        from_urls(str(spool), [str(tier)]), min_free_percent=0.0
    )  # however full this disk is
    async with AsyncExitStack() as stack:
        reconciler = Reconciler(config, Spool(spool), await open_tiers(config, stack))
        work = asyncio.ensure_future(reconciler.run())
        async with asyncio.timeout(60):
            while reconciler.journal.counters["flushed"] < 3 or reconciler.backlog.parts():
                await asyncio.sleep(0.02)
        work.cancel()


def flip(path: Path, where: int = -10) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)


def a_chunk(tier: Path, step: int) -> Path:
    return next(path for path in chunk_files(tier, "r", step) if path.stat().st_size > 500)


def test_ls_shows_every_copy(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    spool, tier = places
    assert run(["ls", str(tier), "--spool", str(spool), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [30, 20, 10]
    assert [checkpoint["resumes"] for checkpoint in found["checkpoints"]] == [True, False, False]
    for checkpoint in found["checkpoints"]:
        assert [(copy["place"], copy["state"]) for copy in checkpoint["copies"]] == [
            ("local", "committed"),
            ("file", "verified"),
        ]
    assert run(["ls", str(tier)]) == 0
    assert "30→" in capsys.readouterr().out


def test_ls_does_not_make_the_text_of_all_that_it_observed(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.run` does that with a task's result, as it ends."""
    made: list[object] = []
    monkeypatch.setattr(Inventory, "__repr__", lambda self: (made.append(self), "")[1])
    assert run(["ls", str(places[1])]) == 0
    assert made == []


def test_ls_of_another_run_finds_nothing(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(places[1]), "--run", "other", "--json"]) == 4
    shown = capsys.readouterr()
    assert json.loads(shown.out)["checkpoints"] == []
    assert "run 'other': there is no such checkpoint" in shown.err and "the runs there are: r" in shown.err
    assert run(["ls", str(places[1]), "--run", "other"]) == 4
    assert capsys.readouterr().out == ""
    (places[1].parent / "empty").mkdir()
    assert run(["ls", str(places[1].parent / "empty")]) == 0  # a place without any run is as it was asked for


@pytest.mark.parametrize("command", ["ls r", "verify r", "du r", "show r 20 r"])
def test_a_runs_name_in_place_of_a_url_is_answered_by_the_option(places, capsys, command: str) -> None:
    assert run(command.split()) == 3
    said = capsys.readouterr().err
    assert "a relative path is none of these" in said
    assert ("if 'r' is a run's name, write --run r" in said) == (command != "show r 20 r")


def test_show(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "r", "20", str(places[1]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["metrics"] == {"loss": 0.05}
    assert [file["path"] for file in found["manifests"][0]["files"]] == ["state.json", "tensors.safetensors"]
    assert run(["show", "r", "20", "--spool", str(places[0])]) == 0
    assert "tensors.safetensors" in capsys.readouterr().out
    assert run(["show", "r", "25", str(places[1])]) == 4
    assert "there is no such checkpoint" in capsys.readouterr().err


def test_verify_finds_one_flipped_bit_and_changes_nothing(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spool, tier = places
    assert run(["verify", str(tier), "--spool", str(spool), "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert len(checks) == 6
    assert all(check["wrong"] == [] for check in checks)
    flip(a_chunk(tier, 20))
    before = sorted(tier.rglob("*"))
    assert run(["verify", str(tier), "--spool", str(spool), "--json"]) == 5
    wrong = [(c["place"], c["step"]) for c in json.loads(capsys.readouterr().out)["checks"] if c["wrong"]]
    assert wrong == [("file", 20)]
    assert sorted(tier.rglob("*")) == before
    flip(next(spool.glob("r/*10.*/*/tensors.safetensors")))
    assert run(["verify", "--spool", str(spool), "--run", "r", "--step", "10"]) == 5
    shown = capsys.readouterr()
    assert "differ from their digest" in " ".join(shown.out.split())
    assert "the daemon repairs it" in " ".join(shown.err.split())
    assert run(["verify", "--spool", str(spool), "--step", "11"]) == 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("where", ["tier", "spool"])
@pytest.mark.parametrize("kind", ["manifest", "later"])
def test_verify_counts_a_copy_that_retention_deletes_meanwhile_as_pruned(
    places: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    kind: str,
) -> None:
    spool, tier = places
    home = next((spool / "r").glob("*20.*"))
    chunks = [*(tier / "r" / "chunks").glob(f"*/{home.name}"), *(tier / "r" / "manifests").glob(home.name)]

    class Pruning(Meter):
        """Deletes step 20 once it was listed, or once step 30 was read."""

        def update(self, done: float, total: float | None, what: str | None = None) -> None:
            super().update(done, total, what)
            if kind == "manifest":
                self.prune()

        def advance(self, done: int) -> None:
            super().advance(done)
            self.prune()

        def prune(self) -> None:
            for path in [home] if where == "spool" else chunks:
                shutil.rmtree(path, ignore_errors=True)

    monkeypatch.setattr("tierd.cli.progress.Meter", Pruning)
    options = ["--spool", str(spool)] if where == "spool" else [str(tier)]
    assert run(["verify", *options, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(check["step"], check["pruned"], check["wrong"]) for check in checks] == [
        (30, False, []),
        (20, True, []),
        (10, False, []),
    ]


def test_verify_continues_past_chunks_that_it_cannot_check(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, tier = places
    path = next((tier / "r" / "manifests").glob("*30.*/*.json"))
    which = PartId.parse_key(path.relative_to(tier).as_posix())
    assert which
    path.write_bytes(seal(msgspec.structs.replace(decode(path.read_bytes(), which), version=2)))
    assert run(["verify", str(tier), "--json"]) == 6
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(check["step"], bool(check["unchecked"]), check["wrong"]) for check in checks] == [
        (30, True, []),
        (20, False, []),
        (10, False, []),
    ]
    flip(a_chunk(tier, 10))
    assert run(["verify", str(tier)]) == 5, "what is corrupt comes first"
    assert "not checked" in capsys.readouterr().out


def test_restore_needs_no_daemon_and_falls_back(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tier = places
    target = tmp_path / "out"
    assert run(["restore", str(tier), "--run", "r", "--to", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["skipped"]) == (30, [])
    part = Path(found["directories"][0])
    from safetensors.torch import load_file

    assert torch.equal(next(iter(load_file(part / "tensors.safetensors").values())), torch.arange(1000.0) * 30)

    flip(a_chunk(tier, 30))
    again = tmp_path / "again"
    assert run(["restore", str(tier), "--run", "r", "--to", str(again)]) == 0
    text = capsys.readouterr().out
    assert "restored r step 20" in text
    assert "skipped step 30" in text
    assert not list(tmp_path.glob(".again*"))

    assert run(["restore", str(tier), "--run", "r", "--step", "30", "--to", str(tmp_path / "x")]) == 4
    assert not (tmp_path / "x").exists()
    assert run(["restore", str(tier), "--run", "r", "--to", str(again)]) == 3
    assert "not an empty directory" in capsys.readouterr().err


def test_prune(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, tier = places
    assert run(["prune", str(tier), "--keep-last", "1", "--dry-run", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [(v["step"], v["keep"], v["pruned"]) for v in verdicts] == [
        (30, True, False),
        (20, False, False),
        (10, False, False),
    ]
    assert len(list(tier.glob("r/manifests/*"))) == 3
    assert run(["pin", "r", "10", str(tier)]) == 0
    assert run(["prune", str(tier), "--keep-last", "1"]) == 0
    assert sorted(path.name[:12] for path in tier.glob("r/manifests/*")) == ["000000000010", "000000000030"]
    assert sorted({path.parents[1].name[:12] for path in chunk_files(tier, "r")}) == ["000000000010", "000000000030"]
    assert run(["unpin", "r", "10", str(tier)]) == 0
    assert run(["prune", str(tier), "--keep-last", "1"]) == 0
    assert [path.name[:12] for path in tier.glob("r/manifests/*")] == ["000000000030"]


def test_prune_uses_a_quarantined_copy_again_that_proves_right(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, tier = places
    for step in (10, 20):
        [manifest] = tier.glob(f"r/manifests/{step:012}*/*")
        quarantined = tier / "r/quarantine" / manifest.parent.name / manifest.name
        quarantined.parent.mkdir(parents=True)
        manifest.rename(quarantined)
    flip(a_chunk(tier, 10))
    assert run(["prune", str(tier), "--keep-last", "1", "--json"]) == 0
    held = {one["step"]: one["held"] for one in json.loads(capsys.readouterr().out)["verdicts"] if not one["pruned"]}
    assert held.keys() == {20, 30} and "proved right" in held[20]
    assert sorted(path.parent.name[:12] for path in tier.glob("r/manifests/*/*")) == ["000000000020", "000000000030"]
    assert not list(tier.glob("r/quarantine/*/*"))


@pytest.mark.parametrize("which", [0, 1], ids=["this_batch", "next_batch"])
def test_prune_continues_past_checkpoints_that_the_daemon_deleted_first(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], which: int
) -> None:
    _, tier = places
    batches = []

    async def meanwhile(store: Store, some: list[CheckpointId], **given: Any) -> PruneResult:
        if not batches:
            step = (20, 10)[which]
            for path in tier.glob(f"r/*/{step:012}.*"):
                shutil.rmtree(path)
        batches.append([one.step for one in some])
        return await prune(store, some, **given)

    monkeypatch.setattr("tierd.cli.commands.prune_commands.MAX_BATCH_CHECKPOINTS", 1)
    monkeypatch.setattr("tierd.cli.commands.prune_commands.prune_tier", meanwhile)
    assert run(["prune", str(tier), "--keep-last", "1", "--json"]) == 0
    assert batches == [[20], [10]]
    assert not any("not there any more" in one["held"] for one in json.loads(capsys.readouterr().out)["verdicts"])
    assert [path.name[:12] for path in tier.glob("r/manifests/*")] == ["000000000030"]


def test_prune_names_its_obstacle_and_until_when_it_holds(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A flush that was killed left its intent, and nothing said why the checkpoint stayed."""
    _, tier = places
    [manifest] = tier.glob("r/manifests/000000000010*/*")
    now = time.time_ns() // 1_000_000
    intent = tier / f"r/flushing/{manifest.parent.name}/{manifest.stem}.{now:012x}-01234567"
    intent.parent.mkdir(parents=True)
    intent.write_bytes(manifest.read_bytes())
    assert run(["prune", str(tier), "--keep-last", "1", "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)["verdicts"]
    assert [one["step"] for one in dry if one["held"]] == [10] and not any(one["pruned"] for one in dry)
    assert run(["prune", str(tier), "--keep-last", "1"]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert "heldback" in text and "wouldprune" not in text
    assert run(["prune", str(tier), "--keep-last", "1", "--json"]) == 0
    [one] = [one for one in json.loads(capsys.readouterr().out)["verdicts"] if one["step"] == 10]
    assert (one["keep"], one["pruned"]) == (False, False)
    assert str(intent.relative_to(tier)) in one["held"]
    assert f"{datetime.fromtimestamp(now // 1000 + 86400, UTC):%Y-%m-%d %H:%M:%S} UTC" in one["held"]
    assert one == next(each for each in dry if each["step"] == 10)
    assert manifest.exists()
    intent.rename(intent.with_name(f"{manifest.stem}.{now - 90_000_000:012x}-01234567"))  # a day old, and more
    assert run(["prune", str(tier), "--keep-last", "1", "--dry-run", "--json"]) == 0
    assert not any(one["held"] for one in json.loads(capsys.readouterr().out)["verdicts"])


def test_a_pin_that_reaches_the_spool_alone_is_refused(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pin", "r", "10", "--spool", str(places[0])]) == 6
    assert "name the tiers" in capsys.readouterr().err
    assert not Spool(places[0]).pins()


def test_show_invents_no_policy(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "r", "10", str(places[1]), "--json"]) == 0
    assert all(copy["keep"] for copy in json.loads(capsys.readouterr().out)["checkpoint"]["copies"])


def test_prune_applies_the_default_policy_that_the_daemon_recorded(places: tuple[Path, Path]) -> None:
    assert list(places[1].glob("r/retention/*.default.json"))
    assert run(["prune", str(places[1])]) == 0
    assert len(list(places[1].glob("r/manifests/*"))) == 3
    assert len(list(places[1].glob("r/manifests/*"))) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('spool = "/s"\nspol = 1\n[[tier]]\nname = "a"\nurl = "/t"', "unknown field `spol`"),
        (
            'spool = "/s"\n[[tier]]\nname = "a"\nurl = "/t"\n[tier.retention]\nkeep_last = "3"',
            "tier[0].retention.keep_last",
        ),
        ("spool = ", "not TOML"),
    ],
)
def test_config_check_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(text)
    assert run(["config", "check", str(file)]) == 3
    error = capsys.readouterr().err
    assert str(file) in error
    assert message in error


def test_config_check_reaches_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tierd.toml"
    (tmp_path / "there").mkdir()
    file.write_text(f'spool = "/s"\n[[tier]]\nname = "a"\nurl = "{tmp_path / "there"}"')
    assert run(["config", "check", str(file), "--reach"]) == 0
    assert list((tmp_path / "there").iterdir()) == []  # no mark, which would make it a tier
    file.write_text(f'spool = "/s"\n[[tier]]\nname = "a"\nurl = "{tmp_path / "gone"}"')
    assert run(["config", "check", str(file)]) == 0
    assert run(["config", "check", str(file), "--reach", "--json"]) == 6
    assert str(tmp_path / "gone") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls"], 3, "nothing to look at"),
        (["ls", "--spool", "/does/not/exist"], 3, "/does/not/exist"),
        (["ls", "s3://"], 3, "s3://"),
        (["ls", "gopher://x"], 3, "gopher"),
        (["run"], 3, "no spool"),
        (["run", "--spool", "/tmp"], 3, "no tier"),
        (["restore", "/tmp"], 3, "--into"),
        (["verify", "/does/not/exist"], 6, ""),
        (["ls", "/does/not/exist"], 6, ""),
        (["show", "r", "1", "/does/not/exist"], 6, "did not answer"),
        (["pin", "r", "1", "/does/not/exist"], 6, "did not answer"),
        (["nonsense"], 3, "nonsense"),
        (["show", "r"], 3, "STEP"),
    ],
)
def test_bad_input_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_command_line_without_the_daemons_packages_names_the_package_to_install(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no', name='typer')")
    done = subprocess.run(
        [sys.executable, "-m", "tierd", "ls"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 3
    assert install_command("daemon") in done.stderr


# -- versions -------------------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tierd {tierd.__version__}, protocol {PROTOCOL}, format {WITH_DELTAS}\n"
    assert run(["--version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"version": tierd.__version__, "protocol": str(PROTOCOL), "format": WITH_DELTAS}


@pytest.mark.parametrize("line", [[], ["--json"], ["--json", "advise"]])
def test_a_command_line_without_its_command(line: list[str]) -> None:
    assert run(line) == 3
