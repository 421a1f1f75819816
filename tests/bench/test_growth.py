"""`tierd bench growth`: goals are judged by the samples, and a run keeps each of them."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.s3stub import Bucket, serving

from tierd.bench.growth import cold_restores, flush_costs, growth_run, save_costs
from tierd.bench.growth.growth_result import FORMAT, GOALS, GrowthResult, goal_verdicts, timed
from tierd.bench.growth.growth_run import growth
from tierd.bench.process_counters import Machine
from tierd.core.errors import ConfigError
from tierd.core.urls import parse_url

MACHINE = Machine("CPU", 2, 1, 8 << 30, "ext4", "6.1", "3.11", {"tierd": "1"})


def result(**parts):
    return GrowthResult(FORMAT, "2026-01-01T00:00:00+00:00", MACHINE, parts)


def judged(found, goal):
    return [(verdict.row, verdict.measured, verdict.met) for verdict in goal_verdicts(found) if verdict.goal == goal]


def arm(figure, *samples):
    return [{figure: value} for value in samples]


@pytest.mark.parametrize(("ours", "met"), [(0.5, True), (0.51, False)])
def test_a_goal_is_the_ratio_of_two_medians_of_one_row(ours, met):
    rows = {"list": {"save": arm("cpu_s", ours, 9.0, 0.1), "torch.save+fsync": arm("cpu_s", 0.1, 1.0, 2.0)}}
    assert judged(result(values=rows), "save / torch.save+fsync, CPU") == [("list", ours, met)]


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.01, False)])
def test_a_goal_of_a_speed_divides_the_other_way(ours, met):
    rows = {"file fp32": {"tierd": arm("wall_s", ours), "unverified": arm("wall_s", 1.0)}}
    (found,) = judged(result(cold=rows), "unverified / verified, wall")[1:]
    assert found == ("file fp32", 1 / ours, met)


def test_growth_is_the_last_row_by_the_first():
    rows = {name: {"tierd": arm("cpu_s", value)} for name, value in (("1", 1.0), ("100", 9.0), ("5,000", 2.5))}
    assert judged(result(restore=rows), "restore: most checkpoints / one, CPU") == [("5,000", 2.5, False)]


def test_flushes_to_two_tiers_are_compared_with_flushes_to_a_single_tier():
    rows = {
        "weights, one tier": {"tierd": arm("cpu_s", 2.0)},
        "weights, two tiers": {"tierd": arm("cpu_s", 3.0)},
        "noise, one tier": {"tierd": arm("cpu_s", 9.0)},
    }
    assert judged(result(flush=rows), "two tiers / one, CPU") == [("weights, two tiers", 1.5, True)]


def test_a_ceiling_of_the_same_run_stands_beside_the_figure():
    rows = {"bf16": {"tierd": arm("decode_gb_per_cpu_s", 2.0), "ceiling": arm("decode_gb_per_cpu_s", 4.0)}}
    (found,) = [verdict for verdict in goal_verdicts(result(decode=rows)) if verdict.row == "bf16"]
    assert (found.measured, found.ceiling, found.met) == (2.0, 4.0, False)
    assert "| 2 | 4 (50% of it) | **not met** |" in growth_run.growth_page(result(decode=rows))


def test_a_ceiling_of_a_ratio_is_a_ratio_too():
    rows = {"file bf16": {"tierd": arm("wall_s", 4.0), "unverified": arm("wall_s", 3.0), "least": arm("wall_s", 2.0)}}
    found = [one for one in goal_verdicts(result(cold=rows)) if "wall" in one.goal and one.row == "file bf16"]
    assert [(one.measured, one.ceiling, one.met) for one in found] == [(0.75, 1.5, False)]


def test_a_ceiling_may_be_another_figure():
    rows = {
        "0.25 GB": {
            "tierd": arm("quiet_durable_s", 2.0),
            "torch.save+fsync": arm("quiet_durable_s", 3.0),
            "ceiling": arm("raw_overwrite_s", 1.5),
        }
    }
    found = [one for one in goal_verdicts(result(training=rows)) if one.goal == "torch.save+fsync / durable"]
    assert [(one.measured, one.ceiling, one.met) for one in found] == [(1.5, 2.0, False)]


def test_share_of_a_ceiling_below_a_limit_is_the_part_that_the_least_takes_of_it():
    rows = {"200 x 50 x 8": {"tierd": arm("wall_s", 8.0), "least": arm("wall_s", 2.0)}}
    assert "| 8 | 2 (25% of it) | **not met** |" in growth_run.growth_page(result(ls=rows))


def test_verdict_is_none_for_a_growth_figure_that_was_not_measured():
    assert all(verdict.met is None for verdict in goal_verdicts(result()))
    assert growth_run.growth_page(result()).count("not measured") == len(GOALS)


def test_every_goal_is_of_a_part_of_the_page():
    assert {goal.part for goal in GOALS} <= set(growth_run.TITLES)


def test_cpu_seconds_count_the_process_s_own_work():
    answer, figures = timed(lambda: sum(range(1_000_000)))
    assert answer == 499999500000 and figures["cpu_s"] > 0


@pytest.mark.parametrize(
    ("only", "scale", "said"), [(["speed"], 1.0, "--only: speed"), (["status"], 0.0, "--scale"), ([], 2.0, "--scale")]
)
def test_options_that_cannot_be_used(only, scale, said):
    with pytest.raises(ConfigError, match=said):
        growth(only, scale, "", None, None, print)


def test_a_run_keeps_every_sample_and_those_of_parts_that_it_does_not_measure(tmp_path):
    out = tmp_path / "out"
    growth(["restore"], 0.005, "", tmp_path, out, print)
    growth(["status"], 0.005, "", tmp_path, out, print)
    raw = json.loads((out / "growth.json").read_text())
    assert str(tmp_path) not in json.dumps(raw)
    found = msgspec.convert(raw, GrowthResult)
    assert set(found.parts) == {"restore", "status"}
    assert list(found.parts["restore"]) == ["1", "5", "25"]
    assert [len(samples["tierd"]) for samples in found.parts["restore"].values()] == [5, 5, 5]
    assert "A restore from a spool" in (out / "growth.md").read_text()


def test_values_are_restored_and_every_library_has_its_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(save_costs, "ROUNDS", 1)
    monkeypatch.setattr(save_costs, "MANY", 2000)
    found = save_costs.value_samples(tmp_path, "list of 1,000,000 floats")
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(found, 1)


def test_flushes_to_one_tier_and_to_two(tmp_path, monkeypatch):
    monkeypatch.setattr(flush_costs, "GIGABYTES", 0.004)
    monkeypatch.setattr(flush_costs, "ROUNDS", 1)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    flush_costs.flush_samples(tmp_path / "one", "noise", 1)
    found = flush_costs.flush_samples(tmp_path / "two", "weights", 2)
    assert found["tierd"][0]["read_bytes"] > 0 and found["raw"][0]["cpu_s"] > 0
    assert all(flush_costs._stored(tmp_path / "two" / "0" / name) > 3e6 for name in ("tier", "tier2", "raw"))


def test_share_of_changed_rows_counts_the_bytes_that_are_sent_again(tmp_path):
    found = flush_costs.changed_rows(tmp_path, 1000)
    assert found["first"][0]["sent_share"] > 0.5 and found["again"][0]["sent_share"] > 0


def test_a_codec_arm_that_returns_other_bytes_is_noticed(monkeypatch):
    raw = bytes(range(256)) * 64
    assert all(len(samples) == flush_costs.CODEC_ROUNDS for samples in flush_costs.codec_samples(raw, 4).values())
    broken = flush_costs.MeasuredCodec(lambda raw, _: raw, lambda data, _: data[::-1])
    monkeypatch.setattr(flush_costs, "arms", lambda: {"broken": broken})
    with pytest.raises(AssertionError, match="broken"):
        flush_costs.codec_samples(raw, 4)


def test_overlapped_saves_have_a_call_and_a_step_each(tmp_path, monkeypatch):
    monkeypatch.setattr(save_costs, "GIGABYTES", 0.001)
    monkeypatch.setattr(save_costs, "OVERLAPPED_ROUNDS", 1)
    found = save_costs.overlapped_saves(tmp_path, listed=10)
    assert {name: len(samples) for name, samples in found.items()} == {"call": 1, "step": 1, "least": 1}


def test_every_way_to_restore_brings_back_the_saved_state(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_restores, "GIGABYTES", 0.004)
    (tmp_path / "tier").mkdir()
    url = f"file://{tmp_path}/tier"
    cold_restores.put_state("bf16", url, tmp_path)
    expected = json.loads((tmp_path / cold_restores.DIGESTS).read_text())
    for way in ("unverified", "tierd", "restore --to", "least"):
        state, figures = cold_restores.RESTORE_CALLS[way]("bf16", url, tmp_path)
        assert figures["wall_s"] > 0
        assert state is None or cold_restores.tensor_digests(state) == expected
    assert cold_restores.tensor_digests(cold_restores._blank("bf16")) != expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digests.json", "plain", "tier"]


def test_a_download_has_every_range(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serving(Bucket()) as bucket:
        url, data = parse_url(bucket.url()), bytes(range(256)) * 41
        bucket.objects[cold_restores.object_location(url)["Key"]] = data
        cold_restores.download(url, tmp_path / "there", 1000)
    assert (tmp_path / "there").read_bytes() == data
