"""Whether compressing pays: the decision is the faster way by the formula, and near rates do not make it flap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.core.chunk_boundaries import compression_choice

MB = 1e6
rates = st.floats(1e5, 1e11)
ratios = st.floats(0.01, 0.96)


def seconds(raw: float, link: float, encoder: float, ratio: float, pack: bool) -> float:
    """How long `raw` bytes take to get to a tier, by the formula of the module; all rates in bytes a second."""
    return raw * max(1 / encoder, ratio / link) if pack else raw / link


@pytest.mark.parametrize(
    ("link", "encoder", "ratio", "why"),
    [
        (180 * MB, 900 * MB, 0.8, "compressing: the link takes 180 MB/s, the encoder makes 900 MB/s"),
        (2400 * MB, 900 * MB, 0.8, "not compressing: the link takes 2.4 GB/s, the encoder makes 900 MB/s"),
        (180 * MB, 900 * MB, 0.999, "not compressing: 100% would be left"),
        (None, 900 * MB, 0.8, "compressing: the rates are not known yet"),
        (180 * MB, None, None, "compressing: the rates are not known yet"),
        (0, 0, None, "compressing: the rates are not known yet"),
        (999.9 * MB, 0.4 * MB, None, "not compressing: the link takes 1.0 GB/s, the encoder makes 0 MB/s"),
    ],
)
def test_the_decision_explains_itself_in_one_line(link, encoder, ratio, why):
    found = compression_choice(link, encoder, ratio)
    assert found.why == why
    assert found.pack == why.startswith("compressing")


@given(rates, rates, ratios, st.booleans())
def test_compression_choice_is_at_most_a_fifth_slower_than_its_alternative(link, encoder, ratio, before):
    pack = compression_choice(link, encoder, ratio, before).pack
    mine, other = (seconds(1, link, encoder, ratio, way) for way in (pack, not pack))
    assert mine <= other * 1.2 * (1 + 1e-9)


@given(rates, rates, ratios, st.booleans())
def test_clear_compression_choice_does_not_depend_on_the_previous_choice(link, encoder, ratio, before):
    if not link / 1.25 < encoder < link * 1.25:
        assert compression_choice(link, encoder, ratio, before).pack == (encoder > link)


@given(rates, st.floats(-0.08, 0.08), st.floats(-0.08, 0.08), ratios, st.booleans())
def test_rates_that_tremble_around_each_other_change_nothing(rate, one, two, ratio, before):
    assert compression_choice(rate * (1 + one), rate * (1 + two), ratio, before).pack == before


@given(st.floats(0.961, 0.979), st.booleans())
def test_a_ratio_that_trembles_around_nothing_gained_changes_nothing(ratio, before):
    assert compression_choice(100 * MB, 900 * MB, ratio, before).pack == before
