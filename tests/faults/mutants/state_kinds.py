"""Mutants of `tierd/state/kinds/`."""

from __future__ import annotations

from faults.rounds import Mutant

_DTENSORS = "tierd/state/kinds/dtensors.py"
_PACKED_TENSORS = "tierd/state/kinds/packed_tensors.py"
_WRAPPED_NAMES = "tierd/state/kinds/wrapped_names.py"
_TEST_DTENSORS = "pytest tests/state/kinds/test_dtensors.py"
_TEST_PACKED_TENSORS = "pytest tests/state/kinds/test_packed_tensors.py"
_TEST_WRAPPED_NAMES = "pytest tests/state/kinds/test_wrapped_names.py"

MUTANTS = (
    Mutant(
        "a mesh of other names will do",
        "tierd/state/kinds/device_meshes.py",
        "if here == (wanted.mesh, wanted.names, wanted.coordinate):",
        "if True:",
        f"{_TEST_DTENSORS} -k in_place",
    ),
    Mutant(
        "a shard is restored onto another placement",
        _DTENSORS,
        "if saved.placement != here or saved.local.dtype != target.dtype or not is_whole(saved):",
        "if saved.local.dtype != target.dtype or not is_whole(saved):",
        f"{_TEST_DTENSORS} -k in_place",
    ),
    Mutant(
        "a sum that is pending is saved as if it were whole",
        _DTENSORS,
        "    if isinstance(placement, kinds.Partial):",
        "    if isinstance(placement, kinds.Partial):\n        return (REPLICATE,)\n    if False:",
        f"{_TEST_DTENSORS} -k no_whole_shard",
    ),
    Mutant(
        "a shard of another shape than its placement says is saved",
        _DTENSORS,
        "if coordinate is not None and found.local_shape != local:",
        "if False:",
        f"{_TEST_DTENSORS} -k no_whole_shard",
    ),
    Mutant(
        "a strided placement is taken for the plain one that older torch calls equal",
        _DTENSORS,
        "    return bool(spec == other) and kinds[0] == kinds[1]",
        "    return bool(spec == other)",
        f"{_TEST_DTENSORS} -k older_versions",
    ),
    Mutant(
        "FSDP over tensor parallelism is refused where torch derives an order of its own",
        _DTENSORS,
        " for one in order if one.tensor_dim not in said)",
        " for one in order)",
        f"{_TEST_DTENSORS} -k other_versions",
    ),
    Mutant(
        "a seed that a dataset's state names and does not restore need not fit",
        "tierd/state/kinds/loader_arguments.py",
        "return found | {where: found.get(where, {}) | facts for where, facts in kept.items()}",
        "return found",
        "pytest tests/state/kinds/test_shard_datasets.py -k is_named_before",
    ),
    Mutant(
        "True counts as 1 in a run",
        _PACKED_TENSORS,
        "        if set(map(type, window)) != {kind}:\n",
        "        if not set(map(type, window)) <= {kind, bool}:\n",
        f"{_TEST_PACKED_TENSORS} -k json",
    ),
    Mutant(
        "a string with a NUL in it is packed",
        _PACKED_TENSORS,
        "if text.count(_BETWEEN) >= len(parts):",
        "if text.count(_BETWEEN) > len(parts):",
        f"{_TEST_PACKED_TENSORS} -k json",
    ),
    Mutant(
        "a run says more than its tensor has",
        _PACKED_TENSORS,
        "not 0 <= size <= shape[0]",
        "not 0 <= size",
        f"{_TEST_PACKED_TENSORS} -k fit",
    ),
    Mutant(
        "a run has no room to grow",
        _PACKED_TENSORS,
        "step = max(_LINE, 1 << max(0, size.bit_length() - 6))",
        "step = _LINE",
        f"{_TEST_PACKED_TENSORS} -k grows",
    ),
    Mutant(
        "a rank gets the generators of the device with its number",
        "tierd/state/kinds/rng.py",
        "        torch.cuda.set_rng_state(states[current or 0])",
        "        pass",
        "pytest tests/state/kinds/test_rng.py -k devices",
    ),
    Mutant(
        "generators of more devices than are to be seen refuse a restore",
        "tierd/state/kinds/rng.py",
        "    if current is None and len(states) > 1 and here not in (0, len(states)):",
        "    if len(states) > 1 and here != len(states):",
        "pytest tests/state/kinds/test_rng.py -k devices",
    ),
    Mutant(
        "a submodule called module is taken for DDP's",
        _WRAPPED_NAMES,
        '    return all(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)\n',
        '    return any(_bare(name, False).startswith(f"{_IN_FRONT}.") for name in names)\n',
        f"{_TEST_WRAPPED_NAMES} -k differs_by_more",
    ),
    Mutant(
        "two names that become one are renamed",
        _WRAPPED_NAMES,
        "    if len(here) != len(mine) or here.keys() != there.keys():\n",
        "    if here.keys() != there.keys():\n",
        f"{_TEST_WRAPPED_NAMES} -k differs_by_more",
    ),
    Mutant(
        "a renamed state forgets its modules' versions",
        _WRAPPED_NAMES,
        "    if isinstance(metadata, dict) and isinstance(wanted, dict):\n",
        "    if False:\n",
        f"{_TEST_WRAPPED_NAMES} -k those_of_the_target",
    ),
    Mutant(
        "the saved mapping itself is renamed",
        _WRAPPED_NAMES,
        "            found = copy.copy(found) if found is saved else found\n",
        "",
        f"{_TEST_WRAPPED_NAMES} -k any_depth",
    ),
)
