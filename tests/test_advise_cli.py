"""`tierd advise` as its users meet it; and the README's example is what it prints."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from tierd.cli import app, run
from tierd.cli.advise import Advised
from tierd.core.advise import Advice, Choice, Costs, goodput

README = (Path(__file__).parent.parent / "README.md").read_text()
SECTION = README.split("### How often to save")[1].split("\n### ")[0]
COST = ["--state-size", "96GB", "--blocked", "0.9s", "--bandwidth", "4GB/s"]
JOB = ["advise", *COST, "--mtbf", "36h"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def without(option: str) -> list[str]:
    at = JOB.index(option)
    return JOB[:at] + JOB[at + 2 :]


def test_the_readmes_example_is_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"^    \$ tierd (advise.*?)\n\n", SECTION, re.M | re.S)
    assert block is not None
    lines = [line.removeprefix("    ") for line in block[1].splitlines()]
    ends = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
    command = shlex.split(" ".join(line.removesuffix("\\") for line in lines[: ends + 1]))
    assert run(command) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines[ends + 1 :]


def test_every_option_has_a_row_in_the_readme() -> None:
    command = get_command(app).commands["advise"]
    options = {name for parameter in command.params for name in parameter.opts} - {"--help", "--json"}
    rows = {
        option for line in SECTION.splitlines() if line.startswith("| `--") for option in re.findall(r"--[a-z-]+", line)
    }
    assert options == rows
    default = next(parameter.default for parameter in command.params if parameter.name == "restart")
    assert re.search(rf"^\| `--restart TIME` .*`{default}` \|$", SECTION, re.M)


def test_the_json_contract_names_every_member() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| `advise` |"))
    shapes = (Advised, Costs, Advice, Choice)
    fields = {field.name for shape in shapes for field in msgspec.inspect.type_info(shape).fields}
    assert set(re.findall(r"`(\w+)`", row)) - {"advise"} == fields


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
        ([*JOB, "--tier-bandwidth", "1MB/s", "--node-loss", "0.2", "--mtbf", "3h"], "does not catch up"),
        ([*JOB, "--mtbf", "3m"], "no interval helps: coming back from a failure takes 300 s"),
        ([*JOB, "--mtbf", "20s", "--restart", "0s"], "no interval helps: a save until it is durable takes 24.9 s"),
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(arguments) == 3
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def test_words_for_what_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(JOB) == 0
    text = capsys.readouterr().out
    assert "of training: goodput" in text
    assert "bandwidth decides" not in text and "optimistic" not in text
    assert run([*JOB, "--bandwidth", "100MB/s", "--tier-bandwidth", "200MB/s", "--node-loss", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "bandwidth decides" in text and "optimistic" in text


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


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run([*JOB, "--plot", str(tmp_path / "goodput.png")]) == 3
    assert "pip install 'tierd[bench]'" in capsys.readouterr().err
