"""Mutants of `tierd/dcp/`."""

from __future__ import annotations

from faults.rounds import Mutant

_NATIVE_CHECKPOINT = "tierd/dcp/native_checkpoint.py"
_RANK_CLAIMS = "tierd/dcp/rank_claims.py"
_TEST_DTENSORS = "pytest tests/state/kinds/test_dtensors.py"
_TEST_STAGING = "pytest tests/dcp/test_staging.py"

MUTANTS = (
    Mutant(
        "a watched directory of DCP is looked for at the root",
        "tierd/dcp/entries.py",
        "        part, rest = first, base + path\n",
        "        part, rest = first, path\n",
        "pytest tests/reading/test_export_units.py -k 'directories_of_dcp and torchtitan'",
    ),
    Mutant(
        "parts of two histories are loaded for DCP",
        "tierd/client/restoring/ranged_reader.py",
        "            check_origin(found, self._origins)\n",
        "            pass\n",
        "pytest tests/dcp/test_dcp.py -k two_histories",
    ),
    Mutant(
        "keys in metadata may share a hash",
        "tierd/dcp/metadata.py",
        "            if any(one == other for one, other in zip(hashes, hashes[_SAME:], strict=False)):\n",
        "            if False:\n",
        "pytest tests/dcp/test_metadata.py -k hang_or_kill",
    ),
    Mutant(
        "metadata with Megatron's plans is refused",
        "tierd/dcp/metadata.py",
        '_OF_MEGATRON = ("all_local_plans", "mcore_data")\n',
        "_OF_MEGATRON = ()\n",
        "pytest tests/dcp/test_metadata.py -k megatron_keeps",
    ),
    Mutant(
        "what only a newer torch knows of an entry is dropped",
        "tierd/dcp/metadata.py",
        '        if len(fitting) < len(members) and members["transform_descriptors"]:\n',
        "        if False:\n",
        "pytest tests/dcp/test_metadata.py -k each_torch",
        "DID NOT RAISE",
    ),
    Mutant(
        "stages that have one coordinate are mixed up",
        _RANK_CLAIMS,
        "or self._collision(claims)",
        "",
        f"{_TEST_DTENSORS} -k mixed_up",
    ),
    Mutant(
        "what differs between ranks is taken from any",
        _RANK_CLAIMS,
        "return None if all(self._is_same(claims[0], claim) for claim in mine) else self._differs()",
        "return None",
        f"{_TEST_DTENSORS} -k not_resharded",
    ),
    Mutant(
        "a value that differs between ranks is taken from any",
        _RANK_CLAIMS,
        "if not isinstance(own, NativeLeaf) and any(not alike(own, value) for _, value in others):",
        "if False:",
        f"{_TEST_DTENSORS} -k not_resharded",
    ),
    Mutant(
        "a block is read from the beginning of its shard",
        _NATIVE_CHECKPOINT,
        "first = block.box.local[0] + item.storage_offsets[0]",
        "first = 0",
        f"{_TEST_DTENSORS} -k others_load",
    ),
    Mutant(
        "long bytes of every rank are read for DCP",
        "tierd/dcp/native_leaves.py",
        "        if kind in BYTES:",
        "        if False:",
        "pytest tests/state/kinds/test_packed_tensors.py -k for_dcp",
    ),
    Mutant(
        "tensors that DCP does not enter are not read",
        "tierd/dcp/native_leaves.py",
        "    if isinstance(value, tuple | deque):",
        "    if False:",
        "pytest tests/dcp/test_dcp.py -k in_one_value",
    ),
    Mutant(
        "one tensor becomes any number of runs for DCP",
        "tierd/dcp/native_leaves.py",
        "        copies.claim(entry)\n        check_form",
        "        check_form",
        "pytest tests/state/kinds/test_packed_tensors.py -k for_dcp",
        "DID NOT RAISE",
    ),
    Mutant(
        "an optimizer without a state is loaded without one",
        "tierd/dcp/optimizers.py",
        '        if own["state"] and list(parameters)',
        "        if True or list(parameters)",
        f"{_TEST_DTENSORS} -k others_load",
    ),
    Mutant(
        "a launch saves before anything is loaded through its reader",
        "tierd/client/ranks/launch.py",
        "self._refused, self._begun = self._later, True",
        'self._refused, self._begun = "", True',
        "pytest tests/dcp/test_dcp.py -k replaces_nothing",
    ),
    Mutant(
        "staged tensors are pickled before they are there",
        "tierd/dcp/stager.py",
        "            self.staged.wait()\n",
        "",
        f"{_TEST_STAGING} -k waits_for_the_copy",
    ),
    Mutant(
        "what another process was sent is written over",
        "tierd/dcp/stager.py",
        "            self.staged.room = None",
        "            pass",
        f"{_TEST_STAGING} -k waits_for_the_copy",
    ),
    Mutant(
        "DCP writes before the copy is complete, or known to be whole",
        "tierd/dcp/writer.py",
        "                    self._copies.wait()\n",
        "                    pass\n",
        f"{_TEST_STAGING} -k fails_it",
    ),
)
