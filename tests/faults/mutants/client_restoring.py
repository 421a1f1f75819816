"""Mutants of `tierd/client/restoring/`."""

from __future__ import annotations

from faults.rounds import Mutant

_DEVICE_UPLOADS = "tierd/client/restoring/device_uploads.py"
_SEARCH = "tierd/client/restoring/search.py"
_SOURCE = "tierd/client/restoring/source.py"
_TEST_DEVICE_UPLOADS = "pytest tests/client/restoring/test_device_uploads.py"
_TEST_WRONG_READ = "pytest tests/client/restoring/test_one_wrong_read.py"
_TEST_HEADS = "pytest tests/end_to_end/test_heads.py"

MUTANTS = (
    Mutant(
        "one wrong read of ranges quarantines a part",
        "tierd/client/restoring/ranged_reader.py",
        "        if self._is_right_on_disk(part, wanted or {}):\n",
        "        if False:\n",
        f"{_TEST_WRONG_READ} -k reader_of_ranges",
    ),
    Mutant(
        "one wrong read in a restore quarantines a part",
        _SOURCE,
        "            return *self._read(part), SPOOL  # right on the disk: only the first read was wrong\n",
        "            raise CorruptChunk(str(local))\n",
        f"{_TEST_WRONG_READ} -k restore_without",
    ),
    Mutant(
        "ranks may want different entries",
        "tierd/client/restoring/consensus.py",
        "view.everything, view.only, view.best",
        "view.everything, view.best",
        "pytest tests/client/ranks/test_ranks.py -k different_entries",
    ),
    Mutant(
        "a restore's memory lies on whatever NUMA node the thread is on",
        _DEVICE_UPLOADS,
        "            numa.place(self.arena, self._device)\n",
        "            pass\n",
        "pytest tests/client/saving/test_numa.py -k saves_and_restores",
    ),
    Mutant(
        "a restore waits for each copy before it verifies more",
        _DEVICE_UPLOADS,
        "                    self._events[device] = self._api.record(side)\n",
        "                    self._events[device] = self._api.record(side)\n"
        "                    self._events[device].synchronize()\n",
        f"{_TEST_DEVICE_UPLOADS} -k host_does_not_wait",
    ),
    Mutant(
        "a restore copies when all was read",
        _DEVICE_UPLOADS,
        "        if not self._planned:\n            self._plan(end)\n",
        "        if not self._planned and end == self._size:\n            self._plan(end)\n",
        f"{_TEST_DEVICE_UPLOADS} -k copies_run_while",
    ),
    Mutant(
        "a restore copies what was not read yet",
        _DEVICE_UPLOADS,
        "            upto = min(view.numel(), (end - offset) // view.element_size())\n",
        "            upto = view.numel()\n",
        f"{_TEST_DEVICE_UPLOADS} -k copies_run_while",
    ),
    Mutant(
        "a restore copies into memory that training still writes to",
        _DEVICE_UPLOADS,
        "            side.wait_event(ready)\n",
        "            pass\n",
        f"{_TEST_DEVICE_UPLOADS} -k memory_that_training_let_go",
    ),
    Mutant(
        "a restore gives memory up while a device reads it",
        _DEVICE_UPLOADS,
        "            event.synchronize()\n",
        "            pass\n",
        f"{_TEST_DEVICE_UPLOADS} -k proves_wrong_midway",
    ),
    Mutant(
        "what a restore pinned in slices stays so for copies of others",
        _DEVICE_UPLOADS,
        "            self._pinning.undo()\n",
        "            pass\n",
        f"{_TEST_DEVICE_UPLOADS} -k beside_the_state",
    ),
    Mutant(
        "an error midway loses the copies that have begun",
        _DEVICE_UPLOADS,
        "                finally:\n                    self._events[device] = self._api.record(side)\n",
        "                except ZeroDivisionError:\n                    pass\n"
        "                else:\n                    self._events[device] = self._api.record(side)\n",
        f"{_TEST_DEVICE_UPLOADS} -k error_midway",
    ),
    Mutant(
        "copies are planned by values that are not there yet",
        _DEVICE_UPLOADS,
        "self._size], is_read=False)",
        "self._size])",
        f"{_TEST_DEVICE_UPLOADS} -k packed",
    ),
    Mutant(
        "parameters in a long list are not counted",
        _DEVICE_UPLOADS,
        'numbers = there["params"] or range(first, behind)',
        'numbers = there["params"]',
        f"{_TEST_DEVICE_UPLOADS} -k optimizers_state",
    ),
    Mutant(
        "parameters of the second group are counted from 0",
        _DEVICE_UPLOADS,
        "            first = behind\n",
        "",
        f"{_TEST_DEVICE_UPLOADS} -k optimizers_state",
    ),
    Mutant(
        "some entries of a tree have no budget",
        "tierd/client/restoring/entries.py",
        "json.loads(tree_text(tree))",
        "json.loads(str(tree, 'utf-8'))",
        "pytest tests/state/test_tree_budget.py -k save_takes",
        "DID NOT RAISE",
    ),
    Mutant(
        "every rank draws on the one terminal",
        "tierd/client/restoring/progress.py",
        "if self._part.rank == 0 and self._line",
        "if self._line",
        "pytest tests/client/test_terminal_line.py -k one_rank",
    ),
    Mutant(
        "a checkpoint of another number of ranks is tried",
        "tierd/client/restoring/restorer.py",
        "        if candidate.world != self._ranks.world:\n",
        "        if False:\n",
        "pytest tests/test_writers_on_nodes.py -k rank_world",
    ),
    Mutant(
        "a checkpoint that was removed was never there",
        _SEARCH,
        "        unusable |= dict.fromkeys(resume.gone, GONE)\n",
        "",
        "pytest tests/spool/test_links.py -k removed_is_among",
    ),
    Mutant(
        "a run that is remembered begins anew",
        _SEARCH,
        "any(one.reason != INCOMPLETE for one in skipped):\n",
        "any(one.reason not in (INCOMPLETE, GONE) for one in skipped):\n",
        f"{_TEST_HEADS} -k no_fresh_start",
    ),
    Mutant(
        "what the caller knows is not asked",
        _SEARCH,
        "                if at_least is not None and one.step < at_least:\n",
        "                if False:\n",
        f"{_TEST_HEADS} -k says_so",
    ),
    Mutant(
        "what is too old ends the search",
        _SEARCH,
        "                    old = old or one\n                    continue\n",
        "                    raise self._too_old(at_least, one)\n",
        f"{_TEST_HEADS} -k too_old_hides",
    ),
    Mutant(
        "parts that do not belong together are restored together",
        "tierd/core/timeline/chain.py",
        "    if others != manifest.origin:\n",
        "    if False:\n",
        "pytest tests/test_writers_on_nodes.py -k rank_origin",
    ),
    Mutant(
        "a daemon that falls silent in a look ends the restore",
        _SOURCE,
        "            except DaemonSilent as error:",
        "            except ZeroDivisionError as error:",
        "pytest tests/client/restoring/test_silent_daemon.py -k between_two_questions",
    ),
    Mutant(
        "what was left in memory is believed",
        _SOURCE,
        "                check_bytes(found.files[file.path], file)\n",
        "                pass\n",
        "pytest tests/client/saving/test_handoff.py -k killed_in_a_copy",
    ),
    Mutant(
        "without a daemon heads are not read",
        "tierd/client/restoring/spool_view.py",
        "        remembered = heads(spool.control)\n",
        "        remembered = {}\n",
        f"{_TEST_HEADS} -k without_a_daemon",
    ),
    Mutant(
        "a fresh node's restore says that its spool is damaged",
        _SOURCE,
        "            if self._spool.has(part):\n",
        "            if True:\n",
        "pytest tests/client/restoring/test_progress.py -k not_whole",
    ),
    Mutant(
        "tensors that differ between ranks pass for the same",
        "tierd/client/restoring/tensor_equality.py",
        "if a[2] != b[2]]",
        "if a[0] != b[0]]",
        "pytest tests/reading/test_reader.py -k every_bit",
        "DID NOT RAISE",
    ),
)
