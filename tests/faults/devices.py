"""Mutants of what keeps a GPU's copies apart from training, from each other, and from memory that is gone. They are
found on a device that is none (`support/fakecuda.py`)."""

from __future__ import annotations

from faults.rounds import Mutant

_COPIES, _PINNING = "tierd/client/saving/device_copies.py", "tierd/client/saving/pinning.py"
_SNAPSHOT, _CUDA = "tierd/client/saving/snapshot.py", "tierd/state/cuda.py"
_UPLOADS, _RESTORE = "tierd/client/restoring/device_uploads.py", "pytest tests/client/restoring/test_device_uploads.py"
_NUMA = "pytest tests/client/saving/test_numa.py"
_TEST, _RNG = "pytest tests/client/saving/test_device_copies.py", "pytest tests/state/kinds/test_rng.py"

DEVICES = (
    Mutant(
        "the thread that copies stays on device 0",
        _COPIES,
        "            self._api.enter(self.devices[0])\n",
        "            pass\n",
        f"{_TEST} -k no_context",
    ),
    Mutant(
        "memory is pinned for one device alone",
        _CUDA,
        "_PORTABLE = 1 ",
        "_PORTABLE = 0 ",
        f"{_TEST} -k registered_for_all",
    ),
    Mutant(
        "memory is unmapped while a device may write there",
        _PINNING,
        "        arena.before_unmapping = self.undo\n",
        "",
        f"{_TEST} -k before_it_is_unmapped",
    ),
    Mutant(
        "an arena says that it goes when it has gone",
        "tierd/spool/arena.py",
        "            self._memory = _Mapping(self.fd, self.size)\n",
        "            self._memory = mmap.mmap(self.fd, self.size)\n",
        f"{_TEST} -k keeps_it_pinned",
    ),
    Mutant(
        "only the first optimizer's stream waits",
        "tierd/client/saving/step_gate.py",
        "            self._hold()\n",
        "",
        f"{_TEST} -k each_optimizers_stream",
    ),
    Mutant(
        "tensors are kept until a save is durable",
        _SNAPSHOT,
        "        self.capture = dataclasses.replace(self.capture, tensors={}, dtensors=())\n",
        "",
        f"{_TEST} -k let_go",
    ),
    Mutant(
        "late tensors are kept by their witness",
        _SNAPSHOT,
        "        self._witness = None\n",
        "",
        f"{_TEST} -k let_go_as_well",
    ),
    Mutant(
        "tensors are let go while they are copied",
        _SNAPSHOT,
        "        finally:  # refused or not, a device may still write into the slot\n"
        "            self.copies.synchronize()\n",
        "        finally:\n            pass\n",
        f"{_TEST} -k not_before",
    ),
    Mutant(
        "copies that were begun before an error are forgotten",
        _COPIES,
        "                finally:\n                    self._events",
        "                except ZeroDivisionError:\n                    pass\n                else:\n"
        "                    self._events",
        f"{_TEST} -k slot_is_free",
    ),
    Mutant(
        "only the caller's stream is awaited",
        _COPIES,
        "if stream != current and not stream.query():",
        "if False:",
        f"{_TEST} -k another_stream",
    ),
    Mutant(
        "only the caller's stream waits for what save copies",
        _COPIES,
        "            for stream in self._api.streams(device):\n                self._hold(event, stream)\n",
        "",
        f"{_TEST} -k another_stream",
    ),
    Mutant(
        "all streams wait for what is copied late",
        _COPIES,
        "        if self._first is None:\n",
        "        if not self._first:\n",
        f"{_TEST} -k training_does_not_wait_on_the_device",
    ),
    Mutant(
        "a copy does not wait for what was enqueued before it",
        _COPIES,
        "                side.wait_event(mark)\n",
        "                pass\n",
        f"{_TEST} -k state_at_the_call",
    ),
    Mutant(
        "a refused pin is tried again",
        _PINNING,
        "            self._next = self._end\n            self._api.say_once",
        "            self._api.say_once",
        f"{_TEST} -k refused_pin",
    ),
    Mutant(
        "a refused pin is told each time",
        _CUDA,
        "        if not self._said:\n",
        "        if True:\n",
        f"{_TEST} -k refused_pin",
    ),
    Mutant(
        "CUDA's last error is left for the next kernel",
        _CUDA,
        "            torch.ones(1, device=device)\n",
        "            pass\n",
        f"{_TEST} -k takes_cudas_error_back",
    ),
    Mutant(
        "memory is pinned at one go",
        "tierd/client/saving/pipeline.py",
        "                left = slot.pin(device)\n",
        "                while left := slot.pin(device):\n                    pass\n",
        f"{_TEST} -k does_not_wait_for_pinning",
    ),
    Mutant(
        "an arena lies on whatever NUMA node the thread is on",
        "tierd/client/saving/slots.py",
        "            numa.place(arena, self._device)\n",
        "            pass\n",
        f"{_NUMA} -k before_its_pages",
    ),
    Mutant(
        "an arena is moved away from where its user wants all memory",
        "tierd/client/saving/numa.py",
        "if node is not None and not kernel.has_policy():",
        "if node is not None:",
        f"{_NUMA} -k keeps_it",
    ),
    Mutant(
        "an arena must lie on one NUMA node, and kills the job where that is full",
        "tierd/client/saving/numa.py",
        "_PREFERRED = 1 ",
        "_PREFERRED = 2 ",
        f"{_NUMA} -k for_a_preference",
    ),
    Mutant(
        "a restore's memory lies on whatever NUMA node the thread is on",
        _UPLOADS,
        "            numa.place(self.arena, self._device)\n",
        "            pass\n",
        f"{_NUMA} -k saves_and_restores",
    ),
    Mutant(
        "a device's own memory is taken for the host's",
        "tierd/core/numa.py",
        "_numbers(with_memory) & _numbers(with_cpu)",
        "_numbers(with_memory)",
        "pytest tests/core/test_numa.py",
    ),
    Mutant(
        "memory that was made ready is not pinned",
        "tierd/client/saving/pipeline.py",
        "            self._copier.give(lambda: self._pin(device))\n\n    def take",
        "            pass\n\n    def take",
        f"{_TEST} -k made_ready",
    ),
    Mutant(
        "a copy lies in two slices",
        _COPIES,
        "    if into.nbytes <= room:\n",
        "    if True:\n",
        f"{_TEST} -k 'slices or pieces'",
    ),
    Mutant(
        "an arena that grows keeps what was pinned",
        "tierd/client/saving/slots.py",
        "        self._unpin()  # a copy",
        "        pass  # a copy",
        f"{_TEST} -k not_backed",
    ),
    Mutant(
        "small tensors are joined that do not lie side by side",
        _COPIES,
        "is_next = bool(run) and begin == end and",
        "is_next = bool(run) and",
        f"{_TEST} -k small_tensors",
    ),
    Mutant(
        "small tensors are joined over the end of a slice",
        _COPIES,
        "if joins and is_next and (end - 1)",
        "if joins and is_next or False and (end - 1)",
        f"{_TEST} -k small_tensors",
    ),
    Mutant(
        "each small tensor is a copy of its own",
        _COPIES,
        "            if len(run) <= _FEW:\n",
        "            if True:\n",
        f"{_TEST} -k small_tensors",
    ),
    Mutant(
        "a late copy takes the bus at one go",
        _COPIES,
        "len(ahead) == _UNDER_WAY:",
        "False:",
        f"{_TEST} -k leaves_gaps",
    ),
    Mutant(
        "a late copy makes training wait for the device",
        _SNAPSHOT,
        "        self.copies.hurry()\n",
        "",
        f"{_TEST} -k leaves_gaps",
    ),
    Mutant(
        "a rank gets the generators of the device with its number",
        "tierd/state/kinds/rng.py",
        "        torch.cuda.set_rng_state(states[current or 0])",
        "        pass",
        f"{_RNG} -k devices",
    ),
    Mutant(
        "generators of more devices than are to be seen refuse a restore",
        "tierd/state/kinds/rng.py",
        "    if current is None and len(states) > 1 and here not in (0, len(states)):",
        "    if len(states) > 1 and here != len(states):",
        f"{_RNG} -k devices",
    ),
    Mutant(
        "each tensor is a call of its own",
        _COPIES,
        "        if size >= GRAIN:\n",
        "        if True:\n",
        f"{_TEST} -k many_at_a_call",
    ),
    Mutant(
        "CUDA is asked for one tensor at a time",
        _CUDA,
        "            torch._foreach_copy_(into, sources, non_blocking=True)\n",
        "            for one, other in zip(into, sources, strict=True):\n"
        "                one.copy_(other, non_blocking=True)\n",
        f"{_TEST} -k many_at_a_call",
    ),
    Mutant(
        "a restore waits for each copy before it verifies more",
        _UPLOADS,
        "                    self._events[device] = self._api.record(side)\n",
        "                    self._events[device] = self._api.record(side)\n"
        "                    self._events[device].synchronize()\n",
        f"{_RESTORE} -k host_does_not_wait",
    ),
    Mutant(
        "a restore copies when all was read",
        _UPLOADS,
        "        if not self._planned:\n            self._plan(end)\n",
        "        if not self._planned and end == self._size:\n            self._plan(end)\n",
        f"{_RESTORE} -k copies_run_while",
    ),
    Mutant(
        "a restore copies what was not read yet",
        _UPLOADS,
        "            upto = min(view.numel(), (end - offset) // view.element_size())\n",
        "            upto = view.numel()\n",
        f"{_RESTORE} -k copies_run_while",
    ),
    Mutant(
        "a restore copies into memory that training still writes to",
        _UPLOADS,
        "            side.wait_event(ready)\n",
        "            pass\n",
        f"{_RESTORE} -k memory_that_training_let_go",
    ),
    Mutant(
        "a restore gives memory up while a device reads it",
        _UPLOADS,
        "            event.synchronize()\n",
        "            pass\n",
        f"{_RESTORE} -k proves_wrong_midway",
    ),
    Mutant(
        "what a restore pinned in slices stays so for copies of others",
        _UPLOADS,
        "            self._pinning.undo()\n",
        "            pass\n",
        f"{_RESTORE} -k beside_the_state",
    ),
    Mutant(
        "an error midway loses the copies that have begun",
        _UPLOADS,
        "                finally:\n                    self._events[device] = self._api.record(side)\n",
        "                except ZeroDivisionError:\n                    pass\n"
        "                else:\n                    self._events[device] = self._api.record(side)\n",
        f"{_RESTORE} -k error_midway",
    ),
)
