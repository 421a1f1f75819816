"""Mutants of `tierd/client/saving/`: copies from a GPU, pinned memory and NUMA nodes."""

from __future__ import annotations

from faults.rounds import Mutant

_DEVICE_COPIES = "tierd/client/saving/device_copies.py"
_TEST_DEVICE_COPIES = "pytest tests/client/saving/test_device_copies.py"

MUTANTS = (
    Mutant(
        "the thread that copies stays on device 0",
        _DEVICE_COPIES,
        "            self._api.enter(self.devices[0])\n",
        "            pass\n",
        f"{_TEST_DEVICE_COPIES} -k no_context",
    ),
    Mutant(
        "copies that were begun before an error are forgotten",
        _DEVICE_COPIES,
        "                finally:\n                    self._events",
        "                except ZeroDivisionError:\n                    pass\n                else:\n"
        "                    self._events",
        f"{_TEST_DEVICE_COPIES} -k slot_is_free",
    ),
    Mutant(
        "only the caller's stream is awaited",
        _DEVICE_COPIES,
        "if stream != current and not stream.query():",
        "if False:",
        f"{_TEST_DEVICE_COPIES} -k another_stream",
    ),
    Mutant(
        "only the caller's stream waits for what save copies",
        _DEVICE_COPIES,
        "            for stream in self._api.streams(device):\n                self._hold(event, stream)\n",
        "",
        f"{_TEST_DEVICE_COPIES} -k another_stream",
    ),
    Mutant(
        "all streams wait for what is copied late",
        _DEVICE_COPIES,
        "        if self._first is None:\n",
        "        if not self._first:\n",
        f"{_TEST_DEVICE_COPIES} -k training_does_not_wait_on_the_device",
    ),
    Mutant(
        "a copy does not wait for what was enqueued before it",
        _DEVICE_COPIES,
        "                side.wait_event(mark)\n",
        "                pass\n",
        f"{_TEST_DEVICE_COPIES} -k state_at_the_call",
    ),
    Mutant(
        "a copy lies in two slices",
        _DEVICE_COPIES,
        "    if into.nbytes <= room:\n",
        "    if True:\n",
        f"{_TEST_DEVICE_COPIES} -k 'slices or pieces'",
    ),
    Mutant(
        "small tensors are joined that do not lie side by side",
        _DEVICE_COPIES,
        "is_next = bool(run) and begin == end and",
        "is_next = bool(run) and",
        f"{_TEST_DEVICE_COPIES} -k small_tensors",
    ),
    Mutant(
        "small tensors are joined over the end of a slice",
        _DEVICE_COPIES,
        "if joins and is_next and (end - 1)",
        "if joins and is_next or False and (end - 1)",
        f"{_TEST_DEVICE_COPIES} -k small_tensors",
    ),
    Mutant(
        "each small tensor is a copy of its own",
        _DEVICE_COPIES,
        "            if len(run) <= _FEW:\n",
        "            if True:\n",
        f"{_TEST_DEVICE_COPIES} -k small_tensors",
    ),
    Mutant(
        "a late copy takes the bus at one go",
        _DEVICE_COPIES,
        "len(ahead) == _UNDER_WAY:",
        "False:",
        f"{_TEST_DEVICE_COPIES} -k leaves_gaps",
    ),
    Mutant(
        "each tensor is a call of its own",
        _DEVICE_COPIES,
        "        if size >= GRAIN:\n",
        "        if True:\n",
        f"{_TEST_DEVICE_COPIES} -k many_at_a_call",
    ),
    Mutant(
        "an arena is moved away from where its user wants all memory",
        "tierd/client/saving/numa.py",
        "if node is not None and not kernel.has_policy():",
        "if node is not None:",
        "pytest tests/client/saving/test_numa.py -k keeps_it",
    ),
    Mutant(
        "an arena must lie on one NUMA node, and kills the job where that is full",
        "tierd/client/saving/numa.py",
        "_PREFERRED = 1 ",
        "_PREFERRED = 2 ",
        "pytest tests/client/saving/test_numa.py -k for_a_preference",
    ),
    Mutant(
        "memory is unmapped while a device may write there",
        "tierd/client/saving/pinning.py",
        "        arena.before_unmapping = self.undo\n",
        "",
        f"{_TEST_DEVICE_COPIES} -k before_it_is_unmapped",
    ),
    Mutant(
        "a refused pin is tried again",
        "tierd/client/saving/pinning.py",
        "            self._next = self._end\n            self._api.say_once",
        "            self._api.say_once",
        f"{_TEST_DEVICE_COPIES} -k refused_pin",
    ),
)
