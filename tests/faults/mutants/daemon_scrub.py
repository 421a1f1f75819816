"""Mutants of `tierd/daemon/scrub/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "a restore fails over what cannot be set aside",
        "tierd/daemon/scrub/repairer.py",
        "            with suppress(DeleteRefused):\n                await quarantine(stores[name], part)",
        "            await quarantine(stores[name], part)",
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
        "            except (CorruptChunk, ManifestError):\n                pass  # the manifest exists, damaged\n",
        "",
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
