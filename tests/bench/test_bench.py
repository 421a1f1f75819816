"""The benchmark measures what it says: real processes at a tiny size, and arithmetic on made-up samples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tierd.bench import interleaved_run, overhead, overhead_result, process_counters
from tierd.bench.overhead_result import FORMAT, OverheadResult, SaveMethodResult, SizeResult, advise_input, percentile
from tierd.bench.process_counters import Machine
from tierd.bench.training import (
    SAVE_METHODS,
    STATE_BYTES_PER_PARAMETER,
    Training,
    model_shape,
)
from tierd.core.errors import ConfigError
from tierd.core.installation import install_command

ROOT = Path(__file__).parents[2]
SAMPLES = {
    "blocked_s": 1.0,
    "added_s": 1.0,
    "durable_s": 1.0,
    "quiet_durable_s": 1.0,
    "cpu_s": 0.5,
    "step_s": 0.3,
    "flush_s": 4.0,
    "flush_added_s": 2.0,
}


def made_up(gigabytes: float = 0.25, **changes: dict[str, float]) -> OverheadResult:
    """A result in which every arm's every sample is the same, but for `changes` by arm (`_` for what cannot stand)."""
    arms = {}
    for name, about in SAVE_METHODS.items():
        values = SAMPLES | changes.get(re.sub(r"\W", "_", name), {})
        samples = {figure: [value] * 3 for figure, value in values.items()}
        arms[name] = SaveMethodResult(
            about.settings, about.kind, about.durable, None, samples, {"first_blocked_s": [1.0]}, [10**9]
        )
    size = SizeResult(
        gigabytes=gigabytes,
        state_bytes=int(gigabytes * 1e9),
        tensors=3,
        model="tiny",
        steps=5,
        rounds=3,
        schedule="in turns",
        step_s=0.3,
        arms=arms,
        ceilings={
            name: [value] for name, value in ({"memcpy_s": 0.1, "raw_fresh_s": 0.3} | changes.get("raw", {})).items()
        },
        restore={"tierd": [1.0, 1.0, 9.0], "torch.load": [2.0, 2.0, 0.1]},
        cache_dropped=True,
    )
    machine = Machine("cpu", 2, 1, 1 << 30, "ext4", "6.0", "3.11", {"torch": "2"})
    return OverheadResult(FORMAT, "2026-01-01T00:00:00+00:00", machine, {}, [size], advise_input([size]))


def verdict(result: OverheadResult, text: str) -> overhead_result.TargetVerdict:
    return next(found for found in overhead_result.target_verdicts(result) if text in found.target)


# -- arithmetic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([3.0], 95, 3.0), (list(range(1, 21)), 95, 19), (list(range(1, 21)), 50, 10), ([2, 1], 95, 2), ([5, 4], 0, 4)],
)
def test_percentile(values, percent, found):
    assert percentile(values, percent) == found


def test_percentile_of_nothing():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("text", "met", "not_met"),
    [
        ("memcpy floor", {"tierd": {"blocked_s": 0.115}}, {"tierd": {"blocked_s": 0.116}}),
        ("fastest blocking peer", {"tierd": {"blocked_s": 0.9}}, {"dcp_async": {"blocked_s": 0.9}}),
        ("blocking save / torch.save", {"tierd": {"blocked_s": 0.124}}, {"tierd": {"blocked_s": 0.126}}),
        ("overlapped call", {"tierd_overlapped": {"blocked_s": 0.001}}, {"tierd_overlapped": {"blocked_s": 0.002}}),
        ("added seconds", {"tierd_overlapped": {"added_s": 0.9}}, {"torch_checkpointing": {"added_s": 0.9}}),
        ("until durable", {"tierd": {"quiet_durable_s": 0.4}}, {"tierd": {"quiet_durable_s": 0.41}}),
        ("raw overwrite", {"raw": {"raw_overwrite_s": 0.9}}, {"raw": {"raw_overwrite_s": 0.89}}),
        ("CPU-seconds", {"tierd": {"cpu_s": 0.5}}, {"tierd": {"cpu_s": 0.6}}),
        ("every 100", {"tierd_overlapped": {"added_s": 0.09, "blocked_s": 0}}, {"tierd_overlapped": {"added_s": 0.1}}),
        ("every 10 ", {"tierd_overlapped": {"added_s": 0.09, "blocked_s": 0}}, {"tierd_overlapped": {"added_s": 0.1}}),
    ],
)
def test_a_target_is_met_or_not_by_its_samples(text, met, not_met):
    assert verdict(made_up(**met), text).met is True
    assert verdict(made_up(**not_met), text).met is False


def test_a_restore_is_judged_by_its_median():
    found = verdict(made_up(), "restore")
    assert (found.measured, found.met) == (2.0, True)


def test_verdict_is_none_for_a_figure_that_was_not_measured():
    result = made_up(tierd_overlapped={"step_s": 0.19})
    assert verdict(result, "every 100").met is None and "shorter" in verdict(result, "every 100").by
    result.sizes[0].arms["torch_checkpointing"].skipped = "not installed"
    assert verdict(result, "added seconds").met is None
    assert verdict(result, "raw overwrite").met is None  # there are no samples of it
    assert not [one for one in overhead_result.target_verdicts(made_up(1.0)) if "efficiency" in one.target]


def test_efficiency_falls_back_on_the_blocking_arm_and_says_so():
    result = made_up()
    result.sizes[0].arms["tierd-overlapped"].skipped = "no attach"
    found = verdict(result, "every 10 ")
    assert found.by.startswith("tierd:") and found.measured == pytest.approx(3 / 4)


def test_the_post_s_rows_follow_from_its_own_cost():
    """1.4 s and 14 s a save are what its printed rows say; efficiency is training over the whole."""
    for cells in overhead_result.POST_ROWS.values():
        for overhead_s, share in cells:
            assert 5000 / (5000 + overhead_s) == pytest.approx(share, abs=6e-4)
    assert overhead_result.POST_ROWS[100][0][0] / 1000 == pytest.approx(overhead_result.POST_STATE_GB / 1.0, rel=0.01)


def test_measured_rows_scale_with_the_state_and_add_the_work_that_is_still_busy():
    size = made_up(0.7).sizes[0]
    costs = overhead_result.scaled_costs(size)
    assert [cost.added_s for cost in costs] == pytest.approx([2, 2, 2, 4, 4])
    assert [cost.busy_s for cost in costs] == pytest.approx([2] * 5)
    assert [cost.flushed_s for cost in costs] == [None, None, None, 8.0, 8.0]
    found = {(row.steps_per_save, row.label): row for row in overhead_result.overhead_rows(costs)}
    assert found[100, "tierd, local"].overhead_s == pytest.approx(2 * 1000)
    assert found[100, "tierd, local"].efficiency == pytest.approx(5000 / 7000)
    assert found[100, "tierd, flushed to a tier behind"].overhead_s == pytest.approx(4 * 1000)
    waits = overhead_result.overhead_rows([overhead_result.ScaledCost("slow", 1.0, 20.0)])
    assert next(row for row in waits if row.label == "slow").overhead_s == pytest.approx((20 - 5) * 1000)


def test_an_added_time_below_the_call_s_is_noise():
    size = made_up(1.4, tierd_overlapped={"added_s": -0.1, "blocked_s": 0.03}).sizes[0]
    assert overhead_result.training_efficiency(size, "tierd-overlapped", 10) == pytest.approx(3 / 3.03)
    assert next(
        cost for cost in overhead_result.scaled_costs(size) if cost.label == "tierd overlapped, local"
    ).added_s == pytest.approx(0.03)


def test_advise_reads_the_cost_of_tierds_overlapped_save():
    found = advise_input(made_up().sizes)
    assert found is not None and found.arm == "tierd-overlapped+daemon" and found.blocked_s == 1.0
    result = made_up()
    for name, arm in result.sizes[0].arms.items():
        arm.skipped = "gone" if name.startswith("tierd") else None
    assert advise_input(result.sizes) is None


def test_advise_reads_the_cost_of_the_largest_state_that_was_measured():
    sizes = [*made_up(0.25).sizes, *made_up(1.0).sizes]
    assert {advise_input(order).state_bytes for order in (sizes, sizes[::-1])} == {sizes[1].state_bytes}
    assert sizes[0].state_bytes < sizes[1].state_bytes


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_page_has_every_arm_and_every_verdict():
    result = made_up()
    result.sizes[0].arms["dcp.process"].skipped = "no gloo"
    text = overhead.overhead_page(result, "overhead.png")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for name in SAVE_METHODS:
        assert sum(line.startswith(f"| {name} |") for line in tables) == 1, name
    assert "skipped: no gloo" in text and "![" in text
    for found in overhead_result.target_verdicts(result):
        assert any(line.startswith(f"| {found.target} |") for line in tables)
    assert "**not met**" in text and "| met |" in text and "| not measured |" in text
    for block in re.split(r"\n\n", text):  # every table is rectangular
        assert len({line.count(" |") for line in block.splitlines() if line.startswith("| ")}) <= 1


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert overhead.draw_overhead(made_up(), tmp_path / "x.png") is None
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_page_and_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    said: list[str] = []
    overhead.write(made_up(), tmp_path, said.append)
    assert said == [f"no plot: matplotlib is not installed; {install_command('bench')}"]
    assert "![" not in (tmp_path / "overhead.md").read_text()


def test_the_reference_names_every_sample():
    text = (ROOT / "docs" / "reference" / "json.md").read_text()
    assert {name for name in SAMPLES if f"`{name}`" not in text} == set()


# -- what is measured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gigabytes", [0.25, 1, 4])
def test_the_state_has_the_size_that_was_asked_for(gigabytes):
    shape = model_shape(gigabytes)
    parameters = shape.depth * (12 * shape.width**2 + 13 * shape.width) + (2 * 256 + 32 + 3) * shape.width
    assert parameters * STATE_BYTES_PER_PARAMETER == pytest.approx(gigabytes * 1e9, rel=0.04)


def test_training_learns_and_its_state_has_the_declared_size():
    training = Training(0.002)
    losses = [training.step() for _ in range(30)]
    assert losses[-1] < losses[0]
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    counters = 4 * sum(1 for _ in training.model.parameters())
    assert training.state_bytes() == parameters * STATE_BYTES_PER_PARAMETER + counters


def test_a_tree_s_cpu_and_memory_count_its_children():
    code = "import time\nend = time.process_time() + 0.3\nx = b'x' * 50_000_000\nwhile time.process_time() < end: pass"
    cpu = process_counters.cpu_seconds(os.getpid())
    with subprocess.Popen([sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_counters.process_tree(os.getpid())
        assert process_counters.cpu_seconds(child.pid) >= 0.3
        assert process_counters.memory_bytes(child.pid) >= 50_000_000
    assert process_counters.cpu_seconds(os.getpid()) - cpu >= 0.3
    assert process_counters.memory_bytes(child.pid) == 0


def test_a_window_is_long_enough_to_write_behind_and_never_endless():
    cases = {(0.25, 0.3): 5, (0.25, 0.01): 10, (4, 3.0): 4, (1, 0.5): 5}
    assert {case: interleaved_run.steps_for(*case) for case in cases} == cases


@pytest.mark.parametrize(
    ("sizes", "rounds", "arms", "said"),
    [
        ([], [1], ["none"], "--sizes"),
        ([-1], [1], ["none"], "--sizes"),
        ([1], [0], ["none"], "--rounds"),
        ([1, 2, 3], [1, 2], ["none"], "--rounds"),
        ([1], [1], ["nobody"], "nobody"),
    ],
)
def test_options_that_cannot_be_used(sizes, rounds, arms, said):
    with pytest.raises(ConfigError, match=said):
        overhead.overhead(sizes, rounds, arms, None, None, None, print)


def test_an_arm_that_fails_says_why(tmp_path):
    lane = interleaved_run.WorkerProcess("nobody", 0.001, tmp_path)
    with pytest.raises(ChildProcessError, match="KeyError"):
        lane.request("base", steps=1)
        lane.request("start")
    lane.close()


@pytest.mark.parametrize(
    ("device", "why"), [("tpu", "--device tpu: cpu or cuda"), ("cuda", "torch sees no CUDA device")]
)
def test_a_device_that_is_not_there_is_named(monkeypatch, device, why):
    monkeypatch.setattr(overhead.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=why):
        overhead.overhead([0.002], [1], ["none"], None, None, None, print, device)


def test_a_step_on_a_gpu_has_more_to_do():
    assert model_shape(1.0, "cuda").batch > model_shape(1.0).batch
    assert model_shape(1.0, "cuda").width == model_shape(1.0).width


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stays", [True, False])
def test_a_whole_run(tmp_path, monkeypatch, stays):
    monkeypatch.setattr(interleaved_run, "fits", lambda *_: stays)
    arms, rounds = ["none", "tierd"], 2
    if not stays:  # each process loads torch, which takes seconds; one arm shows what blocks do, and restores have none
        arms, rounds = ["tierd"], 6  # which are two blocks
        monkeypatch.setattr(interleaved_run, "WAYS", ())
    out = tmp_path / "out"
    overhead.overhead([0.002], [rounds], arms, 2, tmp_path, out, print)
    raw = json.loads((out / "overhead.json").read_text())
    assert str(tmp_path) not in json.dumps(raw) and os.uname().nodename not in json.dumps(raw["machine"])
    result = msgspec.convert(raw, OverheadResult)
    size = result.sizes[0]
    assert list(size.arms) == arms and all(len(values) == rounds for values in size.restore.values())
    assert all(len(size.ceilings[name]) == rounds for name in ("memcpy_s", "raw_fresh_s", "raw_overwrite_s"))
    for name in set(arms) - {"none"}:
        arm = size.arms[name]
        for figure in ("blocked_s", "added_s", "durable_s", "quiet_durable_s", "cpu_s", "step_s"):
            assert len(arm.samples[figure]) == rounds, figure
        assert all(
            0 < blocked <= durable
            for blocked, durable in zip(*(arm.samples[f] for f in ("blocked_s", "durable_s")), strict=True)
        )
        assert len(arm.first["first_blocked_s"]) == len(arm.extra_memory_bytes) == (1 if stays else 2)
    assert all("blocked_s" not in size.arms[name].samples for name in arms if name == "none")
    assert result.advise is not None
    assert verdict(result, "memcpy floor").met is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
