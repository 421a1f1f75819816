"""The table of the docs has each type that the encoder knows."""

from __future__ import annotations

import random

from tierd.state import encode
from tierd.state.json_tree import SCALARS
from tierd.state.kinds import plain_objects
from tierd.state.reference import KINDS


def test_each_type_that_is_encoded_is_in_one_row_of_the_table():
    listed = [kind for row in KINDS for kind in row.types]
    assert len(listed) == len(set(listed))
    known = {*SCALARS, *plain_objects.ENCODERS, *encode.NODES}
    assert set(listed) - known == {random.Random}
    assert known <= set(listed)
