"""`tierd advise` as its users meet it; and the how-to's example is what it prints."""

from __future__ import annotations

import json
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.world import commit
from typer.main import get_command

from tierd.cli import app, run
from tierd.cli.command_runtime import EXIT_WARNING
from tierd.cli.commands.advise_answer import cost_lines
from tierd.core.advice.run_estimates import RunHistory
from tierd.core.advice.save_interval import Costs, advise, goodput
from tierd.core.ids import CheckpointId, PartId
from tierd.core.installation import install_command
from tierd.spool.spool import Spool

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "advise.md").read_text()
COST = ["--state-size", "96GB", "--blocked", "0.9s", "--bandwidth", "4GB/s"]
JOB = ["advise", *COST, "--mtbf", "36h"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def without(option: str) -> list[str]:
    at = JOB.index(option)
    return JOB[:at] + JOB[at + 2 :]


def test_how_to_shows_the_output_of_advise(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"^    \$ tierd (advise.*?)\n\n", PAGE, re.M | re.S)
    assert block is not None
    lines = [line.removeprefix("    ") for line in block[1].splitlines()]
    ends = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
    command = shlex.split(" ".join(line.removesuffix("\\") for line in lines[: ends + 1]))
    assert run(command) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines[ends + 1 :]


def test_every_option_has_a_row() -> None:
    command = get_command(app).commands["advise"]
    options = {name for parameter in command.params for name in parameter.opts} - {"--help", "--json"}
    rows = {
        option for line in PAGE.splitlines() if line.startswith("| `--") for option in re.findall(r"--[a-z-]+", line)
    }
    assert options == rows
    default = next(parameter.default for parameter in command.params if parameter.name == "restart")
    assert re.search(rf"^\| `--restart TIME` .*`{default}` \|$", PAGE, re.M)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *JOB, "--step-time", "6s", "--every", "500", "--restart", "8m")
    costs = Costs(**found["costs"])
    assert costs == Costs(blocked_s=0.9, durable_s=24.9, restart_s=480, mtbf_s=129_600)
    yours = found["advice"]["yours"]
    assert (yours["steps"], yours["interval_s"]) == (500, 3000)
    assert yours["goodput"] == goodput(3000, costs) < found["advice"]["recommended"]["goodput"]
    assert found["advice"]["recommended"]["steps"] * 6 == found["advice"]["recommended"]["interval_s"]


def test_nodes_share_the_failures(capsys: pytest.CaptureFixture[str]) -> None:
    many = answer(capsys, "advise", *COST, "--mtbf", "48d", "--nodes", "32")
    assert many == answer(capsys, *JOB)


def test_a_measurement_stands_for_three_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    measured = {"state_bytes": 96_000_000_000, "blocked_s": 0.9, "durable_s": 24.9}
    file.write_text(json.dumps({"machine": "x", "advise": {**measured, "later": 1}}))
    level = ["--tier-bandwidth", "1GB/s", "--node-loss", "0.2"]
    found = answer(capsys, "advise", "--from", str(file), "--mtbf", "36h", *level)
    assert found == answer(capsys, *JOB, *level)
    assert found["costs"]["flush_s"] == 96
    measured |= {"durable_s": 0.8}  # as measured where both are the same moment
    file.write_text(json.dumps({"advise": measured}))
    assert answer(capsys, "advise", "--from", str(file), "--mtbf", "36h")["costs"]["durable_s"] == 0.9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "truncated"),
        ("{}", "missing required field `advise`"),
        ('{"advise": {"state_bytes": 1, "blocked_s": 1}}', "missing required field `durable_s`"),
        ('{"advise": {"state_bytes": 0, "blocked_s": 1, "durable_s": 1}}', "`int` >= 1"),
        ('{"advise": {"state_bytes": 1, "blocked_s": -1, "durable_s": 1}}', "blocked_s"),
        ('{"advise": {"state_bytes": 1, "blocked_s": 1, "durable_s": 0}}', "durable_s"),
        ('{"advise": {"state_bytes": 1, "blocked_s": 1, "durable_s": 1e999}}', "out of range"),
        ('{"advise": {"state_bytes": 1, "blocked_s": NaN, "durable_s": 1}}', "malformed"),
    ],
)
def test_a_file_that_is_no_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    file = tmp_path / "bench.json"
    if text is not None:
        file.write_text(text)
    assert run(["advise", "--from", str(file), "--mtbf", "36h"]) == 3
    error = capsys.readouterr().err
    assert f"--from {file}: " in error
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["advise"], "missing: --state-size, --blocked, --bandwidth; or give --from FILE"),
        (without("--blocked"), "missing: --blocked;"),
        (without("--mtbf"), "--mtbf: say how often"),
        (["advise", "--sync", "140s"], "--mtbf: say how often"),
        ([*JOB, "--from", "x"], "leave --state-size, --blocked, --bandwidth out"),
        ([*JOB, "--mtbf", "36"], "--mtbf: '36' is no duration"),
        ([*JOB, "--mtbf", "nan"], "--mtbf: 'nan' is no duration"),
        ([*JOB, "--mtbf", "-3h"], "--mtbf: '-3h' is no duration"),
        ([*JOB, "--mtbf", "0h"], "--mtbf 0h: out of range"),
        ([*JOB, "--mtbf", "9" * 400 + "d"], "is no duration: write"),
        ([*JOB, "--restart", "soon"], "--restart: 'soon' is no duration"),
        ([*JOB, "--blocked", "0.9"], "--blocked: '0.9' is no duration"),
        ([*JOB, "--step-time", "0s"], "--step-time 0s: out of range"),
        ([*JOB, "--state-size", "96"], "--state-size: '96' is no size"),
        ([*JOB, "--state-size", ""], "--state-size: '' is no size"),
        ([*JOB, "--state-size", "96gb"], "--state-size: '96gb' is no size"),
        ([*JOB, "--state-size", "0GB"], "--state-size 0GB: less than a byte"),
        ([*JOB, "--bandwidth", "4GB"], "--bandwidth: '4GB' is no bandwidth: write"),
        ([*JOB, "--bandwidth", "4Gb/s"], "--bandwidth: '4Gb' is no size"),
        ([*JOB, "--nodes", "0"], "--nodes 0: at least 1"),
        ([*JOB, "--every", "100"], "say how long one takes with --step-time"),
        ([*JOB, "--every", "0", "--step-time", "1s"], "--every 0: at least 1"),
        ([*JOB, "--every", "9" * 30, "--step-time", "1s"], "at most"),
        ([*JOB, "--node-loss", "0.2"], "need each other"),
        ([*JOB, "--tier-bandwidth", "1GB/s"], "need each other"),
        ([*JOB, "--tier-bandwidth", "1GB/s", "--node-loss", "nan"], "--node-loss nan: a share"),
        ([*JOB, "--tier-bandwidth", "1GB/s", "--node-loss", "20"], "--node-loss 20: a share"),
        ([*JOB, "--mtbf", "20s"], "no interval helps: coming back from a failure takes 300 s"),
        ([*JOB, "--mtbf", "2s", "--restart", "0s"], "no interval helps: a save until it is durable takes 24.9 s"),
        ([*JOB, "--sync", "140"], "--sync: '140' is no duration"),
        ([*JOB, "--tier", "network=1GB/s"], "give --table as well"),
        ([*JOB, "--table", "--tier", "network"], "--tier 'network': a name of its own and a bandwidth"),
        ([*JOB, "--table", "--tier", "spool=1GB/s"], "--tier 'spool=1GB/s': a name of its own"),
        ([*JOB, "--table", "--tier", "a=1GB"], "--tier: '1GB' is no bandwidth"),
        (["advise", "--table", "--sync", "140s"], "the JSON of `tierd bench overhead`\n"),  # and not: or --sync
        ([*JOB, "--run", "x"], "--run is for --spool"),
        ([*JOB, "--from-run", "file:///x", "r", "--spool", "y"], "leave --spool and --run out"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(arguments) == 3
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def test_advise_names_the_quantity_that_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(JOB) == 0
    text = capsys.readouterr().out
    assert "of training: goodput" in text
    assert "bandwidth decides" not in text
    assert run([*JOB, "--bandwidth", "100MB/s", "--tier-bandwidth", "200MB/s", "--node-loss", "0.1"]) == 0
    assert "bandwidth decides" in capsys.readouterr().out


def test_a_save_that_training_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone it is the model's own; beside tierd's costs it is compared."""
    alone = answer(capsys, "advise", "--sync", "140s", "--mtbf", "36h", "--step-time", "6s", "--every", "500")
    assert Costs(**alone["costs"]) == Costs(140, 140, 300, 129_600)
    found = answer(capsys, *JOB, "--sync", "140s", "--step-time", "6s", "--every", "500")
    assert found["sync"] == alone["advice"] and found["sync_s"] == 140
    assert run([*JOB, "--sync", "140s", "--step-time", "6s", "--every", "500"]) == 0
    text = capsys.readouterr().out
    assert "sync, yours" in text and "points less goodput" in text


@pytest.mark.parametrize(("text", "s"), [("50ms", 0.05), ("1000000s", 1e6), ("3us", 3e-6), ("8min", 480), ("2m", 120)])
def test_units(capsys: pytest.CaptureFixture[str], text: str, s: float) -> None:
    assert answer(capsys, *without("--blocked"), "--blocked", text)["costs"]["blocked_s"] == pytest.approx(s)


def test_a_restart_as_long_as_the_mtbf_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "advise", "--sync", "1s", "--mtbf", "1h", "--restart", "1h")
    assert 0.35 < found["advice"]["recommended"]["goodput"] < 0.37


# -- the table --------------------------------------------------------------------------------------------------------

BLOG = [
    "advise",
    "--table",
    "--state-size",
    "140GB",
    "--blocked",
    "0.9s",
    "--bandwidth",
    "10GB/s",
    "--step-time",
    "50ms",
]


def test_the_table_of_the_founding_documents(capsys: pytest.CaptureFixture[str]) -> None:
    """140 GB at 10 and at 1 GB/s, steps of 50 ms: what the blog prints, to its rounding, and without failures."""
    found = answer(capsys, *BLOG, "--tier", "network=1GB/s")
    assert found["costs"] is found["advice"] is None
    shares = {(one["steps"], one["tier"]): one["sync"]["efficiency"] for one in found["table"]}
    blog = {100: (0.262, 0.0344), 500: (0.640, 0.151), 1000: (0.780, 0.262), 5000: (0.947, 0.640)}
    for steps, (local, network) in blog.items():
        assert shares[steps, "spool"] == pytest.approx(local, abs=0.002)
        assert shares[steps, "network"] == pytest.approx(network, abs=0.002)
    assert all(one["tierd"]["efficiency"] >= one["sync"]["efficiency"] for one in found["table"])
    assert all(one["tierd"]["goodput"] is None for one in found["table"])


def test_the_table_as_markdown_and_with_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "table.png"
    fails = ["--mtbf", "6h", "--node-loss", "0.2", "--tier", "network=1GB/s", "--tier", "object=500MB/s"]
    assert run([*BLOG, *fails, "--plot", str(file)]) == 0
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0].count("|") == rows[1].count("|") == 10 and "tierd: goodput" in rows[0]
    assert len(rows) == 2 + 3 * 5  # the recommended interval has rows as well
    assert "20% of the failures take the spool along" in text
    assert file.read_bytes()[:4] == b"\x89PNG"
    found = answer(capsys, *BLOG, *fails)
    for one in found["table"]:
        if one["tier"] == "network":
            costs = Costs(0.9, 14.9, 300, 21_600, 140, 0.2)
            assert one["tierd"]["goodput"] == pytest.approx(goodput(one["interval_s"], costs), abs=1e-3)
            assert one["sync"]["goodput"] == pytest.approx(goodput(one["interval_s"], Costs(140, 140, 300, 21_600)))
    assert run([*BLOG, *fails, "--sync", "140s"]) == 0
    assert capsys.readouterr().out.count("| 2.33 min |") == 15


# -- a run that was ------------------------------------------------------------------------------------------------


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Three launches, 1000 s apart, that saved every 10 steps of a second each; retention took launch 1's first."""
    made, origin = Spool(tmp_path / "spool"), None
    for launch, steps in enumerate([(20, 30), (40, 50), (60, 70)]):
        began = 1_700_000_000 + launch * 1000
        attempt = f"{began * 1000:012x}-{launch:08x}"
        for step in steps:
            created = datetime.fromtimestamp(began + 10 + step - steps[0], UTC).isoformat()
            checkpoint = CheckpointId("llama", attempt, step)
            commit(made, PartId(checkpoint, 0, 1), {"x": bytes(1000)}, origin, created=created)
        origin = CheckpointId("llama", attempt, steps[-1])
    return tmp_path / "spool"


RAN = ["--blocked", "100ms", "--bandwidth", "1MB/s"]


def test_a_real_runs_own_account(spool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "advise", "--spool", str(spool), *RAN)
    past, costs = found["past"], Costs(**found["costs"])
    assert (past["run"], past["failures"], past["every_steps"], past["step_s"]) == ("llama", 2, 10, 1)
    assert past["state_bytes"] == 1000
    assert costs.mtbf_s == past["span_s"] / 2
    assert costs.restart_s == past["away_s"]
    assert found["advice"]["yours"]["steps"] == 10
    assert run(["advise", "--spool", str(spool), *RAN]) == 0
    text = capsys.readouterr().out
    assert "run llama saved every 10 steps and failed 2 times: about " in text
    assert answer(capsys, "advise", "--spool", str(spool), "--run", "llama", *RAN) == found
    assert answer(capsys, "advise", "--spool", str(spool), *RAN, "--mtbf", "50d")["costs"]["mtbf_s"] == 50 * 86400


def test_advise_says_the_cost_of_an_interval_that_was_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    costs = Costs(blocked_s=1, durable_s=20, restart_s=300, mtbf_s=50_000)
    found = advise(costs, 2.0, 3000)
    past = RunHistory("llama", 9 * 86400, 15, 3000, 2.0, 10**9, 300)
    first, second = cost_lines(past, found.yours, found.recommended)
    assert "in 9.00 d run llama saved every 3000 steps and failed 15 times" in first
    lost = (found.recommended.goodput - found.yours.goodput) * 9 * 24
    assert f"every {found.recommended.steps} steps would have lost {lost:#.3g} h less" == second


def test_advise_reads_a_run_on_a_tier_and_refuses_runs_with_too_little_history(
    spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    assert run(["run", "--spool", str(spool), "--to", tier.as_uri(), "--until-idle"]) == 0
    capsys.readouterr()
    found = answer(capsys, "advise", "--from-run", tier.as_uri(), "llama", *RAN)
    assert (found["past"]["every_steps"], found["past"]["failures"]) == (10, 2)
    assert run(["advise", "--from-run", tier.as_uri(), "absent", *RAN]) == 4
    commit(Spool(spool), PartId(CheckpointId("other", f"{5:012x}-00000001", 3), 0, 1))
    assert run(["advise", "--spool", str(spool), *RAN]) == 3
    assert run(["advise", "--spool", str(spool), "--run", "other", *RAN]) == 3
    err = capsys.readouterr().err
    assert "run absent: no checkpoint" in err
    assert "it has 2 runs; say which with --run" in err and "no launch has two checkpoints left" in err


decimals = st.from_regex(r"[0-9]{1,15}(\.[0-9]{1,9})?", fullmatch=True)


@given(
    st.tuples(decimals, st.sampled_from(["B", "kB", "TiB"])).map("".join),
    st.tuples(decimals, st.sampled_from(["B/s", "TB/s"])).map("".join),
    st.tuples(st.one_of(decimals, st.just("0")), st.sampled_from("sd")).map("".join),
    st.tuples(decimals, st.sampled_from("smhd")).map("".join),
    st.tuples(decimals, st.sampled_from("sd")).map("".join),
    st.integers(-1, 10**9 + 1),
)
def test_any_input_is_advice_or_one_line(size: str, rate: str, blocked: str, mtbf: str, step: str, every: int) -> None:
    costs = ["--state-size", size, "--bandwidth", rate, "--blocked", blocked, "--mtbf", mtbf]
    assert run(["advise", *costs, "--restart", "0s", "--step-time", step, f"--every={every}", "--json"]) in (0, 3)
    assert run(["advise", *costs, "--restart", "0s"]) in (0, 3)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"goodput{suffix}"
    arguments = ["--bandwidth", "200MB/s", "--step-time", "6s", "--every", "500", "--plot", str(file)]
    assert run([*JOB, *arguments]) == 0
    assert file.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


@pytest.mark.parametrize("name", ["goodput.nonsense", "absent/goodput.png"])
def test_a_plot_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    pytest.importorskip("matplotlib")
    assert run([*JOB, "--plot", str(tmp_path / name)]) == 3
    assert f"--plot {tmp_path / name}: " in capsys.readouterr().err


def test_plot_without_matplotlib_names_the_package_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([*JOB, "--plot", str(tmp_path / "goodput.png")]) == 3
    assert install_command("bench") in capsys.readouterr().err


# -- a notice ---------------------------------------------------------------------------------------------------------

NODE = ["advise", *COST, "--notice", "120s"]
SPOT = (Path(__file__).parents[2] / "docs" / "howto" / "spot.md").read_text()


def test_page_about_spot_instances_shows_the_output_of_advise(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^    \$ tierd (advise.*)\n((?:    .*\n)+)", SPOT, re.M)
    codes = []
    for command, output in blocks:
        codes.append(run(shlex.split(command)))
        assert capsys.readouterr().out.splitlines() == [line.removeprefix("    ") for line in output.splitlines()]
    assert codes == [0, EXIT_WARNING]


def test_a_notice_is_answered_in_json_without_a_failure_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *NODE, "--tier-bandwidth", "2GB/s", "--step-time", "6s")
    assert found == {
        "notice_s": 120,
        "due_s": 20,
        "durable_s": pytest.approx(44.9),
        "on_tier_s": pytest.approx(92.9),
        "left_s": pytest.approx(27.1),
        "fits": True,
        "why": "",
    }
    assert answer(capsys, *NODE)["on_tier_s"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tier-bandwidth", "1GB/s"], r"9 s too late: 1\.1 GB/s to the tier, or a notice of 129 s"),
        (["--step-time", "50s"], "not even durable in the spool when the node ends, 12.9 s too late"),
        (["--tier-bandwidth", "2GB/s", "--drain", "60s"], "drain = 60 s: set drain to at least 81 s"),
    ],
)
def test_advise_proposes_a_remedy_for_a_state_that_is_not_durable_in_time(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert run([*NODE, *options]) == EXIT_WARNING
    assert re.search(says, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--drain", "60s", "--mtbf", "36h"], "--drain is for --notice"),
        (["--notice", "120"], "--notice"),
        (["--notice", "2m", "--tier-bandwidth", "fast"], "--tier-bandwidth"),
    ],
)
def test_a_notice_that_is_given_wrongly_is_named(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert run(["advise", *COST, *options]) == 3
    assert says in capsys.readouterr().err
