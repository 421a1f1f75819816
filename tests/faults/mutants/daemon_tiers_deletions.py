"""Mutants of `tierd/daemon/tiers/`: what is deleted on a tier, and under whose policy."""

from __future__ import annotations

from faults.rounds import Mutant

_DELETIONS = "tierd/daemon/tiers/deletions.py"
_INTENTS = "tierd/daemon/tiers/intents.py"
_REACH = "tierd/daemon/tiers/reach.py"
_RUN_POLICIES = "tierd/daemon/tiers/run_policies.py"
_TEST_DISOWN = "pytest tests/cli/test_disown.py"
_TEST_INTENTS = "pytest tests/daemon/tiers/test_intents.py"
_TEST_LATE_LISTINGS = "pytest tests/daemon/tiers/test_late_listings.py"
_TEST_REACH = "pytest tests/daemon/tiers/test_reach.py"
_TEST_RUN_POLICIES = "pytest tests/daemon/tiers/test_run_policies.py"

MUTANTS = (
    Mutant(
        "a node shares its id with another one, and says nothing",
        "tierd/daemon/tiers/node_identity.py",
        "            if strange:\n",
        "            if False:\n",
        "pytest tests/daemon/tiers/test_node_identity.py -k clone_that_prunes",
    ),
    Mutant(
        "a copied spool's daemon replaces the other's record at once",
        "tierd/daemon/tiers/node_identity.py",
        "if self._elsewhere and key not in self._own:",
        "if False:",
        "pytest tests/daemon/tiers/test_node_identity.py -k clone_that_prunes",
    ),
    Mutant(
        "a prune reports nothing of a checkpoint that no listing shows yet",
        "tierd/daemon/tiers/prune.py",
        "        await _add_unlisted(store, own, parts)\n",
        "",
        f"{_TEST_LATE_LISTINGS} -k no_listing_shows",
    ),
    Mutant(
        "a prune reports a checkpoint that another process deleted",
        "tierd/daemon/tiers/prune.py",
        "            own.setdefault(part.checkpoint, []).append(part.manifest_key)\n",
        "        own.setdefault(part.checkpoint, []).append(part.manifest_key)\n",
        f"{_TEST_LATE_LISTINGS} -k no_listing_shows",
    ),
    Mutant(
        "a prune that fails half-way reports nothing",
        "tierd/daemon/tiers/prune.py",
        "        deleted(own)\n",
        "",
        "pytest tests/daemon/transfer/test_relay.py -k chunks_cannot",
    ),
    Mutant(
        "a manifest that is listed and not found names no chunk",
        _DELETIONS,
        "                await self._check_gone(info.key)\n",
        "                pass\n",
        f"{_TEST_INTENTS} -k listed_and_not_found",
    ),
    Mutant(
        "an intent that is listed and not found names no chunk",
        _DELETIONS,
        "                await self._check_gone(intent[0])\n",
        "                pass\n",
        f"{_TEST_INTENTS} -k listed_and_not_found",
    ),
    Mutant(
        "prune does not say what holds it back",
        _DELETIONS,
        "                held |= found.grown\n",
        "",
        "pytest tests/cli/test_cli.py -k holds_it_back",
    ),
    Mutant(
        "what was decided before the marks is deleted without asking again",
        _DELETIONS,
        "        if self.confirm is None or not self.to_delete:\n",
        "        if True:\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py",
    ),
    Mutant(
        "a pin that another node put beside the marks keeps nothing",
        _DELETIONS,
        "        if pinned := self.to_delete.intersection(pins):\n",
        "        if pinned := set[CheckpointId]():\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k pin_by_another_node",
    ),
    Mutant(
        "a checkpoint goes for the sake of others that went meanwhile",
        _DELETIONS,
        "            elif lost := await self._lost(found.shown):\n",
        "            elif lost := None:\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'went_meanwhile and whole'",
    ),
    Mutant(
        "a checkpoint goes for the sake of others of which one rank's part went meanwhile",
        _DELETIONS,
        "for rank in ranks.difference(shown.get(seen.id, {}).get(world, ()))\n",
        "for rank in (() if seen.id in shown else ranks)\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'went_meanwhile and one_rank'",
    ),
    Mutant(
        "a pass reads each lost part under its marks",
        _DELETIONS,
        "            if lost:\n                return\n",
        "",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k one_loss",
    ),
    Mutant(
        "a pin reports success while the prune goes on",
        "tierd/daemon/tiers/pins.py",
        "        else:\n            raise StoreUnavailable(",
        "        else:\n            print(",
        "pytest tests/daemon/tiers/test_pins.py -k does_not_end",
    ),
    Mutant(
        "a prune that is cut off before it deletes leaves its marks",
        _INTENTS,
        "        except (TierdError, asyncio.CancelledError):\n            if not marks.begun:\n",
        "        except TierdError:\n            if not marks.begun:\n",
        "pytest tests/daemon/tiers/test_pins.py -k takes_its_marks_back",
    ),
    Mutant(
        "a pin does not wait for the prune that may not have seen it",
        "tierd/daemon/tiers/pins.py",
        "            if checkpoint not in await being_deleted(",
        "            if True or checkpoint not in await being_deleted(",
        "pytest tests/daemon/tiers/test_pins.py -k may_not_see",
    ),
    Mutant(
        "a pin does not wait for a prune by a node whose clock is behind",
        _INTENTS,
        "age_ms(mark[2], timings) > older and",
        "600_000 > age_ms(mark[2], timings) > older and",
        "pytest tests/daemon/tiers/test_pins.py -k clock_is_behind",
    ),
    Mutant(
        "a tier that fails keeps the others from getting a pin",
        "tierd/daemon/tiers/pins.py",
        "    for answer in await asyncio.gather(*puts, return_exceptions=True):\n",
        "    for answer in [await put for put in puts]:\n",
        "pytest tests/daemon/tiers/test_pins.py -k gets_its_pin",
    ),
    Mutant(
        "a pass of prunes looks before it marks",
        _DELETIONS,
        "        await self.marks.put(self.to_delete | remembered)\n",
        "        await self.marks.put(set())\n",
        "pytest tests/daemon/tiers/test_pending_prunes.py -k marks_all",
    ),
    Mutant(
        "what a newer tierd reads is garbage",
        "tierd/daemon/tiers/disown.py",
        "except (ObjectNotFound, ManifestError):",
        "except (ObjectNotFound, ManifestError, FormatTooNew):",
        f"{_TEST_DISOWN} -k might_read",
    ),
    Mutant(
        "another launch's names are disowned as well",
        "tierd/daemon/tiers/disown.py",
        "if owner is None or owner.attempt != attempt:",
        "if owner is None:",
        f"{_TEST_DISOWN} -k no_other",
    ),
    Mutant(
        "what a long flush says that it sends is swept away",
        _INTENTS,
        "        if is_standing(key):\n",
        "        if False:\n",
        f"{_TEST_INTENTS} -k said_that_it_sends",
    ),
    Mutant(
        "an intent that a listing does not show yet is left",
        _INTENTS,
        "sorted({intent, *earlier})",
        "sorted(earlier)",
        f"{_TEST_INTENTS} -k listing_does_not_show",
    ),
    Mutant(
        "disown takes the mark of a deletion that goes on",
        _INTENTS,
        "    if match is None or 0 <= age_ms(match[2], USUAL) <= 1000 * DEADLINE_S:\n",
        "    if match is None:\n",
        f"{_TEST_DISOWN} -k marks_of_the_launch",
    ),
    Mutant(
        "a flush waits for the marks of a prune that an outage has cut off",
        _INTENTS,
        "older=_LEFT_OVER_S * 1000",
        "older=DEADLINE_S * 1000",
        f"{_TEST_INTENTS} -k cut_off_by_an_outage",
    ),
    Mutant(
        "a mark stays where checkpoints cannot be deleted",
        "tierd/daemon/tiers/prune.py",
        "marks.begun = False  #",
        "#",
        "pytest tests/daemon/tiers/test_append_only.py -k nobody_asks",
    ),
    Mutant(
        "a tier is read-write where only some kinds of objects may be deleted",
        _REACH,
        " or await _keeps_some(store)",
        "",
        f"{_TEST_REACH} -k some_kinds",
    ),
    Mutant(
        "two nodes that try a tier at once call it broken",
        _REACH,
        "_TRIES, _APART_S = 5, 0.2",
        "_TRIES, _APART_S = 1, 0.2",
        f"{_TEST_REACH} -k same_moment",
    ),
    Mutant(
        "what was put to try a tier out is left there",
        _REACH,
        "            await clear(store, [key])",
        "            pass",
        f"{_TEST_REACH} -k leaves_nothing",
    ),
    Mutant(
        "a tier that gives back something else is read-write",
        _REACH,
        " and octets(found) == octets(data):",
        ":",
        f"{_TEST_REACH} -k comes_back",
    ),
    Mutant(
        "a lock on objects is not noticed",
        _REACH,
        "        if not any([info.key == key async for info in store.scan(key)]):",
        "        if True:",
        f"{_TEST_REACH} -k lock",
    ),
    Mutant(
        "a policy is put beside manifests of another key",
        _RUN_POLICIES,
        "isinstance(why, WrongKey) for other",
        "False for other",
        f"{_TEST_RUN_POLICIES} -k cannot_be_read_here",
    ),
    Mutant(
        "a damaged policy waits for the run's janitor, who is another node now",
        _RUN_POLICIES,
        "(janitor or given in damaged)",
        "janitor",
        f"{_TEST_RUN_POLICIES} -k repairs_its_own_damaged",
    ),
    Mutant(
        "a node that does not prune a run any more records its policy",
        _RUN_POLICIES,
        "(janitor or given in damaged)",
        "True",
        f"{_TEST_RUN_POLICIES} -k records_no_policy",
    ),
    Mutant(
        "a damaged default that nobody needs any more stays",
        _RUN_POLICIES,
        'if "default" in damaged or (not wanted',
        "if (not wanted",
        f"{_TEST_RUN_POLICIES} -k repairs_the_default",
    ),
)
