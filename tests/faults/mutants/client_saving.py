"""Mutants of `tierd/client/saving/`."""

from __future__ import annotations

from faults.rounds import Mutant

_HANDOFF = "tierd/client/saving/handoff.py"
_PIPELINE = "tierd/client/saving/pipeline.py"
_SLOTS = "tierd/client/saving/slots.py"
_SNAPSHOT = "tierd/client/saving/snapshot.py"
_TEST_STOPPED_DAEMON = "pytest tests/client/saving/test_stopped_daemon.py"
_TEST_CALL = "pytest tests/client/saving/test_call.py"
_TEST_STREAMED = "pytest tests/client/test_hard_use.py -k while_it_streams"
_TEST_DEVICE_COPIES = "pytest tests/client/saving/test_device_copies.py"

MUTANTS = (
    Mutant(
        "a job that is given while its worker is closed is never run",
        "tierd/client/saving/worker.py",
        "        self._jobs.put(given)\n",
        "        if self._thread not in _working:\n            raise ConfigError\n"
        "        self._jobs.put(given)\n        return\n",
        "pytest tests/client/saving/test_worker.py -k runs_a_job_or_refuses_it",
    ),
    Mutant(
        "a second close of a worker does not wait for its jobs",
        "tierd/client/saving/worker.py",
        "    running = _running.get(thread)\n",
        "    running = _running.pop(thread, None)\n",
        "pytest tests/client/saving/test_worker.py -k second_close",
    ),
    Mutant(
        "descriptors that a client did not ask for stay open",
        "tierd/client/saving/packets.py",
        "            finally:\n                close_fds(fds)",
        "            finally:\n                pass",
        "pytest tests/client/saving/test_handoff.py -k keeps_no_descriptor",
    ),
    Mutant(
        "memory that a recall cannot use stays open",
        _HANDOFF,
        "                close_fds(fds)",
        "                pass",
        "pytest tests/client/saving/test_handoff.py -k wrong_memory",
    ),
    Mutant(
        "an arena is used again while DCP writes from it",
        "tierd/client/saving/arena_staging.py",
        "room = self._idle.pop() if self._idle else _Room()",
        "room = self._idle[-1] if self._idle else _Room()\n            self._idle.append(room)",
        "pytest tests/dcp/test_staging.py -k only_when",
    ),
    Mutant(
        "a copy for DCP is kept though something tore it",
        "tierd/client/saving/arena_staging.py",
        "            snapshot.await_confirmation()\n",
        "",
        "pytest tests/dcp/test_staging.py -k fails_it",
    ),
    Mutant(
        "a daemon of before 1.1 is held to the beat of today",
        _HANDOFF,
        "self.timings.silence_s if beats else _LONG_SILENCE",
        "self.timings.silence_s",
        "pytest tests/wire/test_apart.py -k has_its_time",
    ),
    Mutant(
        "a stopped daemon is waited for as long as ever",
        _HANDOFF,
        "self.timings.silence_s if beats else _LONG_SILENCE",
        "_LONG_SILENCE",
        f"{_TEST_STOPPED_DAEMON} -k met_once_and_nothing",
    ),
    Mutant(
        "memory is lent to a daemon that has not greeted",
        _HANDOFF,
        "        except Silent:\n            return False\n",
        "        except Silent:\n            daemon = THIS\n",
        f"{_TEST_STOPPED_DAEMON} -k before_its_first",
    ),
    Mutant(
        "who falls silent again and again is tried again and again",
        _HANDOFF,
        " * 2 ** min(self.silences, _MOST_DOUBLED)",
        "",
        f"{_TEST_STOPPED_DAEMON} -k again_and_again",
    ),
    Mutant(
        "a daemon that wakes keeps what a living trainer lent it",
        _HANDOFF,
        "                self._let_go(given.connection)\n",
        "",
        f"{_TEST_STOPPED_DAEMON} -k commits_first",
    ),
    Mutant(
        "a snapshot is handed to a daemon that is too far apart",
        _HANDOFF,
        "if why := explain(THIS, daemon):",
        'if why := "":',
        "pytest tests/wire/test_apart.py -k saves_and_restores_beside",
    ),
    Mutant(
        "a trainer says nothing of a refusal",
        _HANDOFF,
        "            if isinstance(error, TierdError) and str(error) != self._warned:",
        "            if isinstance(error, VersionMismatch) and str(error) != self._warned:",
        "pytest tests/client/saving/test_many_connections.py -k beside_a_crowd",
    ),
    Mutant(
        "a slot is free again before its snapshot is durable",
        _PIPELINE,
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return True",
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return False",
        "pytest tests/client/saving/test_slots.py -k waits_for_the_one_before",
    ),
    Mutant(
        "what a daemon did not answer before it died counts as durable",
        _PIPELINE,
        '            log.warning("%s: %s; it is persisted here", manifest.part, error)',
        "            return CommittedPart(size=given.size, direct=False, recycled=False)",
        "pytest tests/client/saving/test_handoff.py -k dies_over_it",
    ),
    Mutant(
        "a part that the daemon may take back counts as durable",
        _PIPELINE,
        "                if is_settled(self._spool.path(manifest.part), settled_s):\n",
        "                if is_settled(self._spool.path(manifest.part), settled_s) or True:\n",
        f"{_TEST_STOPPED_DAEMON} -k takes_back",
    ),
    Mutant(
        "what changes is streamed behind training",
        _PIPELINE,
        "            if snapshot.returned:  # the daemon",
        "            if False:  # the daemon",
        f"{_TEST_CALL} -k gone_meanwhile",
    ),
    Mutant(
        "an interrupted save is streamed to its end",
        _PIPELINE,
        "            self._refuse_changes()  # soon",
        "            pass  # soon",
        _TEST_STREAMED,
    ),
    Mutant(
        "an interrupted save that was streamed is committed",
        _PIPELINE,
        "        self.snapshot.claim()\n        self._refuse_changes()\n",
        "",
        _TEST_STREAMED,
    ),
    Mutant(
        "an interrupted save is streamed again after EIO",
        _SNAPSHOT,
        "        self.interrupted = True\n",
        "        self.interrupted = not self._fate\n",
        _TEST_STREAMED,
    ),
    Mutant(
        "a save that was given up fails, too",
        _PIPELINE,
        "            elif snapshot.claim():  #",
        "            else:  #",
        _TEST_STREAMED,
    ),
    Mutant(
        "nobody decodes what was encoded",
        _PIPELINE,
        "        snapshot.capture.check(snapshot.tree)\n        given",
        "        given",
        "pytest tests/state/test_decodable.py -k would_not_come_back",
        "DID NOT RAISE",
    ),
    Mutant(
        "memory is pinned at one go",
        _PIPELINE,
        "                left = slot.pin(device)\n",
        "                while left := slot.pin(device):\n                    pass\n",
        f"{_TEST_DEVICE_COPIES} -k does_not_wait_for_pinning",
    ),
    Mutant(
        "memory that was made ready is not pinned",
        _PIPELINE,
        "            self._copier.give(lambda: self._pin(device))\n\n    def take",
        "            pass\n\n    def take",
        f"{_TEST_DEVICE_COPIES} -k made_ready",
    ),
    Mutant(
        "metrics are taken for a dict",
        "tierd/client/saving/save.py",
        "if not isinstance(metrics, Mapping):",
        "if False:",
        "pytest tests/client/test_checkpointer.py -k metrics_that_are_no_dict",
    ),
    Mutant(
        "a state that grows gets new memory at each save",
        _SLOTS,
        "roomy = size + size // _GROWTH",
        "roomy = size",
        "pytest tests/state/test_added.py -k grows",
    ),
    Mutant(
        "an arena lies on whatever NUMA node the thread is on",
        _SLOTS,
        "            numa.place(arena, self._device)\n",
        "            pass\n",
        "pytest tests/client/saving/test_numa.py -k before_its_pages",
    ),
    Mutant(
        "a state is streamed through an arena larger than itself",
        _SLOTS,
        "self._small(min(size, spare // 4))",
        "self._small(_BOUND)",
        "pytest tests/client/saving/test_slots.py -k small_arena_is_no_larger",
    ),
    Mutant(
        "a small arena that the system refuses ends a save",
        _SLOTS,
        "size <= _SMALLEST",
        "size",
        "pytest tests/client/saving/test_slots.py -k smaller_arena_is_tried",
    ),
    Mutant(
        "an arena that grows keeps what was pinned",
        _SLOTS,
        "        self._unpin()  # a copy",
        "        pass  # a copy",
        f"{_TEST_DEVICE_COPIES} -k not_backed",
    ),
    Mutant(
        "the tree is encoded by two threads",
        _SNAPSHOT,
        "            if self._encoder.setdefault(None, me) is me:",
        "            if self._encoder.setdefault(None, me):",
        f"{_TEST_CALL} -k encoded_once",
    ),
    Mutant(
        "a step waits until a long list is encoded",
        _SNAPSHOT,
        "        if not self.copies and self._is_soon:",
        "        if not self._events:",
        f"{_TEST_CALL} -k long_list",
    ),
    Mutant(
        "buffers are copied late",
        _SNAPSHOT,
        "            tensors[name] = tensors[name].clone()\n",
        "            pass\n",
        f"{_TEST_CALL} -k no_other_thread",
    ),
    Mutant(
        "tensors are kept until a save is durable",
        _SNAPSHOT,
        "        self.capture = dataclasses.replace(self.capture, tensors={}, dtensors=())\n",
        "",
        f"{_TEST_DEVICE_COPIES} -k let_go",
    ),
    Mutant(
        "late tensors are kept by their witness",
        _SNAPSHOT,
        "        self._witness = None\n",
        "",
        f"{_TEST_DEVICE_COPIES} -k let_go_as_well",
    ),
    Mutant(
        "tensors are let go while they are copied",
        _SNAPSHOT,
        "        finally:  # refused or not, a device may still write into the slot\n"
        "            self.copies.synchronize()\n",
        "        finally:\n            pass\n",
        f"{_TEST_DEVICE_COPIES} -k not_before",
    ),
    Mutant(
        "a late copy makes training wait for the device",
        _SNAPSHOT,
        "        self.copies.hurry()\n",
        "",
        f"{_TEST_DEVICE_COPIES} -k leaves_gaps",
    ),
    Mutant(
        "a write to a DTensor goes unnoticed",
        _SNAPSHOT,
        "moved += [name for (name, _), before, after in theirs if before != after]",
        "pass",
        "pytest tests/state/kinds/test_dtensors.py -k is_noticed",
    ),
    Mutant(
        "only the first optimizer's stream waits",
        "tierd/client/saving/step_gate.py",
        "                self._hold()\n            except",
        "                    self._hold()\n            except",
        f"{_TEST_DEVICE_COPIES} -k each_optimizers_stream",
    ),
    Mutant(
        "a save after an interrupted step warns of nothing",
        "tierd/client/saving/state_saver.py",
        "        self._gate.report_interrupted(save.part)\n",
        "",
        "pytest tests/client/saving/test_interrupted_step.py -k after_an_interrupted_step",
    ),
    Mutant(
        "a save in an optimizer's hook counts as one after an interrupted step",
        "tierd/client/saving/step_gate.py",
        "[optimizer for optimizer in mine if not _is_at_work(optimizer)]",
        "mine",
        "pytest tests/client/saving/test_interrupted_step.py -k beside_one_does_not_warn",
    ),
    Mutant(
        "a slot is still taken when its save has ended",
        _PIPELINE,
        """            try:
                written = self._answer(snapshot.manifest, slot, given, files)
            finally:
                self._free_again(snapshot, slot)  # before the save ends, so that the next one finds it free
        except Exception as error:
            self._failed(snapshot.save, error)
        else:
            self._committed(snapshot.save, written)
""",
        """            written = self._answer(snapshot.manifest, slot, given, files)
            self._committed(snapshot.save, written)
        except Exception as error:
            self._failed(snapshot.save, error)
        finally:
            self._free_again(snapshot, slot)
""",
        "pytest tests/client/saving/test_slots.py -k free_once",
    ),
)
