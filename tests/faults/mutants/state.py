"""Mutants of `tierd/state/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ALIASING = "tierd/state/aliasing.py"
_CAPTURE = "tierd/state/capture.py"
_CUDA = "tierd/state/cuda.py"
_ENCODE = "tierd/state/encode.py"
_FIT = "tierd/state/fit.py"
_LOAD = "tierd/state/load.py"
_TEST_ALIASING = "pytest tests/state/test_aliasing.py"
_TEST_ADDED = "pytest tests/state/test_added.py"
_TEST_DEVICE_COPIES = "pytest tests/client/saving/test_device_copies.py"
_TEST_PACKED_TENSORS = "pytest tests/state/kinds/test_packed_tensors.py"
_TEST_LOAD = "pytest tests/state/test_load.py"

MUTANTS = (
    Mutant(
        "views of other strides are not looked at",
        _ALIASING,
        "        yield from _painted(rest)\n",
        "        return\n",
        f"{_TEST_ALIASING} -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "a view is compared only with the one before it",
        _ALIASING,
        "            if write.end > farthest.end:\n",
        "            if True:\n",
        f"{_TEST_ALIASING} -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "one list in two places takes what comes last",
        _ALIASING,
        "if first is not saved and not alike(first, saved):",
        "if False:",
        f"{_TEST_ALIASING} -k one_container",
        "DID NOT RAISE",
    ),
    Mutant(
        "memory that was freed after the first save is read",
        "tierd/state/capture_plan.py",
        "        if not self._extents.fit(tensors, others):",
        "        if False:",
        "pytest tests/state/test_capture.py -k freed_or_shrunk",
        "DID NOT RAISE",
    ),
    Mutant(
        "an added tensor takes the name of another",
        "tierd/state/capture_plan.py",
        "if not stands_so or name_of(path) in names or tensor.data_ptr() in known:",
        "if not stands_so or tensor.data_ptr() in known:",
        f"{_TEST_ADDED} -k special",
    ),
    Mutant(
        "an added tensor that is tied is stored twice",
        "tierd/state/capture_plan.py",
        "name_of(path) in names or tensor.data_ptr() in known:",
        "name_of(path) in names:",
        f"{_TEST_ADDED} -k tied",
    ),
    Mutant(
        "an added complex tensor is named as a plain one",
        "tierd/state/capture_plan.py",
        "stands_so = tensor.dtype not in STORED_AS and",
        "stands_so =",
        f"{_TEST_ADDED} -k special",
    ),
    Mutant(
        "an added key may be a tag",
        "tierd/state/capture_plan.py",
        "simple = parent.end >= 0 and is_name(key) and",
        "simple = parent.end >= 0 and",
        f"{_TEST_ADDED} -k special",
    ),
    Mutant(
        "names behind an added one keep their numbers",
        "tierd/state/capture_plan.py",
        "                one.index += 1\n",
        "                one.index += 0\n",
        f"{_TEST_ADDED} -k additions",
    ),
    Mutant(
        "the next added tensor stands before the last",
        "tierd/state/capture_plan.py",
        "if one.end >= end:",
        "if one.end > end:",
        f"{_TEST_ADDED} -k one_more",
    ),
    Mutant(
        "an added tensor never moves",
        "tierd/state/capturer.py",
        "moved = moving(optimizers, added)",
        "moved = moving([], added)",
        f"{_TEST_ADDED} -k optimizer",
    ),
    Mutant(
        "saves at once share one capturer",
        "tierd/state/capturer.py",
        "            capturer = self._idle.pop()  # the one that was used last\n",
        "            capturer = self._idle[-1]\n",
        f"{_TEST_ADDED} -k interrupts",
    ),
    Mutant(
        "a state that grew has no DTensors",
        "tierd/state/capturer.py",
        "capture.dtensors, capture._holes",
        "(), capture._holes",
        "pytest tests/state/kinds/test_dtensors.py -k grows",
    ),
    Mutant(
        "memory is pinned for one device alone",
        _CUDA,
        "_PORTABLE = 1 ",
        "_PORTABLE = 0 ",
        f"{_TEST_DEVICE_COPIES} -k registered_for_all",
    ),
    Mutant(
        "a refused pin is told each time",
        _CUDA,
        "        if not self._said:\n",
        "        if True:\n",
        f"{_TEST_DEVICE_COPIES} -k refused_pin",
    ),
    Mutant(
        "CUDA's last error is left for the next kernel",
        _CUDA,
        "            torch.ones(1, device=device)\n",
        "            pass\n",
        f"{_TEST_DEVICE_COPIES} -k takes_cudas_error_back",
    ),
    Mutant(
        "CUDA is asked for one tensor at a time",
        _CUDA,
        "            torch._foreach_copy_(into, sources, non_blocking=True)\n",
        "            for one, other in zip(into, sources, strict=True):\n"
        "                one.copy_(other, non_blocking=True)\n",
        f"{_TEST_DEVICE_COPIES} -k many_at_a_call",
    ),
    Mutant(
        "the state itself is packed",
        _ENCODE,
        "return self.members(dict(state), ())",
        "return self.mapping(dict(state), ())",
        f"{_TEST_PACKED_TENSORS} -k itself",
    ),
    Mutant(
        "a packed dict of colliding keys is saved",
        _ENCODE,
        'if keys.kind != "str":',
        'if keys.kind == "none":',
        f"{_TEST_PACKED_TENSORS} -k one_hash",
    ),
    Mutant(
        "keys that no restore takes are saved",
        _ENCODE,
        "            check_alike([key for key, _ in pairs], path)\n",
        "",
        "pytest tests/state/test_tree_budget.py -k one_hash",
    ),
    Mutant(
        "targets that share memory are filled with whatever comes last",
        _FIT,
        "        found += shared.conflicts()\n",
        "",
        f"{_TEST_ALIASING} -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "a generator is replaced, not set",
        _LOAD,
        "        saved.set(target)\n        return target",
        "        return copy.deepcopy(saved, memo)",
        f"{_TEST_LOAD} -k generator",
    ),
    Mutant(
        "objects in a deque are replaced by their states",
        "tierd/state/classify.py",
        "    **dict.fromkeys(SEQUENCES, Kind.SEQUENCE),",
        "    **dict.fromkeys(SEQUENCES, Kind.SEQUENCE),\n    SEQUENCES[2]: Kind.OTHER,",
        f"{_TEST_LOAD} -k a_deque_holds",
    ),
    Mutant(
        "the walk over a state that contains itself does not end",
        "tierd/state/containers.py",
        "        elif id(inner) not in entered:",
        "        elif len(at) < 9:",
        "pytest tests/state/test_containers.py -k entered_once",
    ),
    Mutant(
        "a generator that nobody has is made",
        _FIT,
        "        if target is not None:\n            yield",
        "        if False:\n            yield",
        f"{_TEST_LOAD} -k generator_that_does_not_fit",
        "DID NOT RAISE",
    ),
    Mutant(
        "a list that an object is given is the checkpoint's",
        _LOAD,
        "memo[id(values)] = values if type(values) is tuple else values.copy()",
        "memo[id(values)] = values",
        f"{_TEST_PACKED_TENSORS} -k its_own",
    ),
    Mutant(
        "a library's own error is not caught as what its documents say",
        "tierd/core/errors.py",
        'if kind.__module__ == "builtins" or issubclass(StateMismatch, kind):',
        "if True:",
        f"{_TEST_LOAD} -k own_error",
    ),
    Mutant(
        "a model is loaded before a dataset refuses its state",
        _LOAD,
        "0 if loader_arguments.gives_samples(target) else 1",
        "1",
        "pytest tests/state/kinds/test_shard_datasets.py -k refused_before_a_model",
    ),
    Mutant(
        "an added tensor lies last in its file",
        "tierd/state/tensor_file.py",
        "bisect.insort(self._described, _describe(name, tensor, moving), key=_place_of)",
        "self._described.append(_describe(name, tensor, moving))",
        f"{_TEST_ADDED} -k grew",
    ),
)
