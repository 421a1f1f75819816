"""Mutants of `tierd/daemon/scrub/`."""

from __future__ import annotations

from faults.rounds import Mutant

_PRUNE = "tierd/daemon/tiers/prune.py"
_REPAIRER = "tierd/daemon/scrub/repairer.py"
_TEST_OLD_PROOFS = "pytest tests/daemon/scrub/test_old_proofs.py"

MUTANTS = (
    Mutant(
        "a daemon keeps a lock of every part that it fetched",
        _REPAIRER,
        "PartId, asyncio.Lock] = WeakValueDictionary()\n",
        "PartId, asyncio.Lock] = {}  # type: ignore[assignment]\n",
        "pytest tests/daemon/scrub/test_repairer.py -k no_lock",
    ),
    Mutant(
        "a manifest is quarantined on the proof against another",
        _PRUNE,
        "            if judged is not None and data != judged:\n",
        "            if False:\n",
        f"{_TEST_OLD_PROOFS} -k was_judged",
    ),
    Mutant(
        "a quarantine deletes the manifest that came meanwhile",
        _PRUNE,
        "            if await manifest_bytes(store, part) != data:\n",
        "            if False:\n",
        f"{_TEST_OLD_PROOFS} -k while_it_was_quarantined",
    ),
    Mutant(
        "a process that was stopped goes on with its deletion",
        _PRUNE,
        "            if time.monotonic() > ends_s:  #",
        "            if False:  #",
        f"{_TEST_OLD_PROOFS} -k was_stopped",
    ),
    Mutant(
        "a copy is quarantined that was repaired during the search for its chunk",
        _REPAIRER,
        "work.lost and not await work.are_repaired()",
        "work.lost",
        f"{_TEST_OLD_PROOFS} -k 'during_the_search and chunk'",
    ),
    Mutant(
        "a manifest that another node replaced is quarantined by the node with the part",
        _REPAIRER,
        "        if now is not None and (local is None or now.same_content(local)):\n",
        "        if False:\n",
        f"{_TEST_OLD_PROOFS} -k before_its_repair",
    ),
    Mutant(
        "a fetch quarantines the manifest that replaced the one it read",
        _REPAIRER,
        "await _quarantine_as_read(stores[name], part, progress.manifests.get(name))",
        "await quarantine(stores[name], part)",
        f"{_TEST_OLD_PROOFS} -k during_a_fetch",
    ),
    Mutant(
        "a fetch calls a copy corrupt that was pruned meanwhile",
        _REPAIRER,
        "            except ObjectNotFound:  # pruned there while it was fetched, so the missing chunks prove nothing\n"
        "                continue\n",
        "            except ObjectNotFound:\n                pass\n",
        f"{_TEST_OLD_PROOFS} -k pruned_during_a_fetch",
    ),
    Mutant(
        "a fetch that finds no right copy quarantines the one that came since",
        _REPAIRER,
        "await _quarantine_as_read(store, part, progress.manifests.get(name))",
        "await quarantine(store, part)",
        f"{_TEST_OLD_PROOFS} -k found_no_right_one",
    ),
    Mutant(
        "a restore fails over what cannot be set aside",
        "tierd/daemon/scrub/repairer.py",
        "                with suppress(DeleteRefused):\n",
        "                with suppress():\n",
        "pytest tests/daemon/tiers/test_append_only.py -k restore_goes_on",
    ),
    Mutant(
        "a copy that a scrub has just quarantined is suspected",
        "tierd/daemon/scrub/scrubber.py",
        "        if await to_the_end(self._spool.has, part):  #",
        "        if True:  #",
        "pytest tests/daemon/scrub/test_scrubber.py -k holds_up",
    ),
    Mutant(
        "what was found rotten is only read again in its own time",
        "tierd/daemon/scrub/scrubber.py",
        "        self._suspected.add(ScrubbedCopy(place, part))\n",
        "",
        "pytest tests/daemon/scrub/test_scrubber.py -k in_doubt",
    ),
    Mutant(
        "a damaged manifest keeps another from its place",
        "tierd/daemon/scrub/tier_repair.py",
        "                await manifest_bytes(self._store, self._part)  # also",
        "                await self._store.get(self._part.manifest_key)  # also",
        "pytest tests/daemon/test_encrypted.py::test_a_damaged_manifest_is_rebuilt_after_another_tiers",
    ),
    Mutant(
        "a repair puts the same bytes under another codec's name",
        "tierd/daemon/scrub/tier_repair.py",
        "    return alike and (first.size",
        "    return (first.size",
        "pytest tests/daemon/scrub/test_scrubber.py -k wrong_codec",
    ),
    Mutant(
        "a relay puts what it read without a look",
        "tierd/daemon/tiers/objects.py",
        "    await to_the_end(check_stored, stored, data, run)",
        "    pass",
        "pytest tests/daemon/transfer/test_relay.py -k takes_what_is_wrong",
    ),
)
