"""The table of the docs has each type that the encoder knows."""

from __future__ import annotations

import random

from tierd.state import encoder, value_kinds
from tierd.state.kinds.supported_values import KINDS
from tierd.state.state_tree import SCALARS


def test_each_type_that_is_encoded_is_in_one_row_of_the_table():
    listed = [kind for row in KINDS for kind in row.types]
    assert len(listed) == len(set(listed))
    known = {*SCALARS, *value_kinds.ENCODERS, *encoder.NODES}
    assert set(listed) - known == {random.Random}
    assert known <= set(listed)
