"""Mutants of `tierd/daemon/tiers/`."""

from __future__ import annotations

from faults.rounds import Mutant

_AWAKE = "tierd/daemon/tiers/awake.py"
_HEADS = "tierd/daemon/tiers/heads.py"
_HOLDERS = "tierd/daemon/tiers/holders.py"
_TIERS = "tierd/daemon/tiers/tiers.py"
_TEST_AWAKE = "pytest tests/daemon/tiers/test_awake.py"
_TEST_APPEND_ONLY = "pytest tests/daemon/tiers/test_append_only.py"

MUTANTS = (
    Mutant(
        "an answer that came while the daemon was stopped is dropped",
        _AWAKE,
        "_PARTS = 8 ",
        "_PARTS = 1 ",
        f"{_TEST_AWAKE} -k stopped",
    ),
    Mutant(
        "an observation whose answers keep coming ends by the time of the first",
        _AWAKE,
        "        nonlocal left\n        left = _PARTS\n",
        "        pass\n",
        f"{_TEST_AWAKE} -k anew",
    ),
    Mutant(
        "a timeout goes on after its block",
        _AWAKE,
        "            timer.cancel()\n",
        "            pass\n",
        f"{_TEST_AWAKE} -k has_ended",
    ),
    Mutant(
        "a restore leaves out a tier that answered while the node was stopped",
        "tierd/daemon/request_handler.py",
        "awake_timeout(patience_s)",
        "asyncio.timeout(patience_s)",
        "pytest tests/client/restoring/test_patience.py -k stopped",
    ),
    Mutant(
        "heads of nodes that write no more stay on a tier",
        _HEADS,
        "        await clear(store, stale)\n",
        "        pass\n",
        "pytest tests/end_to_end/test_heads.py -k goes_on_elsewhere",
    ),
    Mutant(
        "a head that is just being replaced is a rollback",
        _HEADS,
        "    return rollback(last_of(now), seen, ",
        "    return rollback(last_of(heads), seen, ",
        "pytest tests/end_to_end/test_heads.py -k replaced_while",
    ),
    Mutant(
        "a head that anybody could have written stops the daemon's looks",
        _HEADS,
        "        except (CorruptChunk, ManifestError, FormatTooNew) as error:\n",
        "        except (CorruptChunk, ManifestError) as error:\n",
        "pytest tests/test_writers_of_tiers.py -k no_key_head",
    ),
    Mutant(
        "a tier that fails hides that another holds what a full disk asks for",
        _HOLDERS,
        "                    failure = error\n                    continue\n",
        "                    raise error\n",
        "pytest tests/daemon/test_spool_space.py -k 'first_of and fails'",
    ),
    Mutant(
        "a tier that stalls hides that another holds what a full disk asks for",
        _HOLDERS,
        "timeout=_NEXT if later else None",
        "timeout=None",
        "pytest tests/daemon/test_spool_space.py -k 'first_of and stalls'",
    ),
    Mutant(
        "a spool's copy goes for another content on the tier",
        _HOLDERS,
        "        if local is None or manifest.same_content(local):\n",
        "        if True:\n",
        "pytest tests/test_writers_on_nodes.py -k another_node",
    ),
    Mutant(
        "a pass of prunes reads its survivors again",
        "tierd/daemon/tiers/manifests.py",
        "        return read.shared.get(_mark(info)) if read else None",
        "        return None",
        "pytest tests/daemon/test_request_counts.py -k survivor_however",
        "a pass of prunes costs",
    ),
    Mutant(
        "runs reads the manifests of every checkpoint",
        "tierd/daemon/tiers/overview.py",
        "            if manifests:\n                return",
        "            if manifests and number == len(newest) - 1:\n                return",
        "pytest tests/daemon/tiers/test_overview.py -k newest_verified",
    ),
    Mutant(
        "runs calls a damaged checkpoint verified",
        "tierd/daemon/tiers/overview.py",
        "    except (ObjectNotFound, ManifestError, FormatTooNew):\n        return ()",
        "    except (ObjectNotFound, ManifestError, FormatTooNew):\n"
        "        return (await read_manifest(store, PartId(checkpoint, 0, world)),)",
        "pytest tests/daemon/tiers/test_overview.py -k damaged",
    ),
    Mutant(
        "status is silent while a Retry-After is waited out",
        _TIERS,
        "        return asked_s(self._stores[tier]) if tier in self._stores else 0.0\n",
        "        return 0.0\n",
        "pytest tests/stores/test_window.py -k until_when",
    ),
    Mutant(
        "intents that a place once refused to delete stand until a restart",
        _TIERS,
        "        if guard.has_left:  # intents",
        "        if False:  # intents",
        f"{_TEST_APPEND_ONLY} -k intents_that_could_not",
    ),
    Mutant(
        "time in which nobody asked a tier ends what is held for it",
        "tierd/daemon/tiers/observations.py",
        "self._failed_at.get(tier, now)",
        "self._failed_at.get(tier, self._since[tier])",
        "pytest tests/daemon/transfer/test_relay.py -k asked_in_vain",
    ),
    Mutant(
        "time in which a daemon was frozen ends what is held for a tier",
        "tierd/daemon/tiers/observations.py",
        "min(now - self._failed_at.get(tier, now), _GAP)",
        "now - self._failed_at.get(tier, now)",
        "pytest tests/daemon/transfer/test_relay.py -k asked_in_vain",
    ),
    Mutant(
        "a daemon that starts sweeps no notes",
        _TIERS,
        "            await sweep_rank_notes(store, run)\n",
        "",
        "pytest tests/client/ranks/test_ranks_on_nodes.py -k starts_sweeps",
    ),
    Mutant(
        "a filled tier has no head of what it got",
        _TIERS,
        "unwritten(inventory, place, run, fills=fills(inventory, self._config, run, tier))",
        "unwritten(inventory, place, run)",
        "pytest tests/daemon/transfer/test_backfill.py -k nobody_saves_here",
    ),
    Mutant(
        "a mark is put that nobody can delete",
        _TIERS,
        'await self._guards[tier].check(f"{pruning_prefix(run)}none")',
        "pass",
        f"{_TEST_APPEND_ONLY} -k nobody_asks",
    ),
    Mutant(
        "a policy that cannot be replaced stops all flushes",
        _TIERS,
        "            if not self.refusal(tier):\n                raise",
        "            if True:\n                raise",
        f"{_TEST_APPEND_ONLY} -k replaced",
    ),
    Mutant(
        "what a refused deletion left is forgotten when another one succeeds",
        _TIERS,
        "        if guard.has_left:  #",
        "        if guard.refused:  #",
        f"{_TEST_APPEND_ONLY} -k a_refusal_left",
    ),
    Mutant(
        "a head is written again and again because others' cannot go",
        _TIERS,
        "if self.refusal(tier) and said == [head.launches]:",
        "if False:",
        f"{_TEST_APPEND_ONLY} -k head",
    ),
    Mutant(
        "another key's manifests hold nothing up",
        "tierd/daemon/tiers/flushes.py",
        "            if alien or (isinstance(why, FormatTooNew) and other == part):\n",
        "            if False:\n",
        "pytest tests/test_writers_of_tiers.py -k no_key_foreign",
    ),
    Mutant(
        "a daemon without a key_file begins a run in plain text on an encrypted tier",
        "tierd/daemon/tiers/flushes.py",
        "                if isinstance(error.__cause__, WrongKey):\n",
        "                if False:\n",
        "pytest tests/daemon/test_encrypted.py -k begins_no_run",
    ),
    Mutant(
        "the check for a key reads every manifest that nobody can read",
        "tierd/daemon/tiers/overview.py",
        "                if (tried := tried + 1) > _MOST_TRIED:\n",
        "                if False:\n",
        "pytest tests/daemon/test_encrypted.py -k check_for_a_key_ends",
    ),
    Mutant(
        "a head that another key encrypted was rolled back",
        _HEADS,
        "            self.unreadable = str(error)\n",
        "            pass\n",
        "pytest tests/end_to_end/test_heads.py -k another_key",
    ),
    Mutant(
        "an object that was repaired since its read is a refusal of its tier",
        "tierd/daemon/tiers/objects.py",
        "            if info.key == key:\n                try",
        "            if False:\n                try",
        "pytest tests/daemon/tiers/test_oversized.py -k read_again",
    ),
    Mutant(
        "a tier that answers slowly is taken for one that hangs",
        "tierd/daemon/tiers/tiers.py",
        "holds(store, part, None, begin_anew)",
        "holds(store, part, None)",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k answers_slowly",
    ),
    Mutant(
        "a chunk that a listing does not show is taken for lost",
        _HOLDERS,
        " and await _are_there(store, manifest, missing, going):",
        " and not missing:",
        "pytest tests/daemon/tiers/test_late_listings.py -k not_list_yet",
    ),
    Mutant(
        "a manifest that another node has just put counts as the damaged one",
        _HOLDERS,
        "    return judged if now == manifest else False\n",
        "    return judged\n",
        "pytest tests/daemon/scrub/test_old_proofs.py -k proves_nothing",
    ),
    Mutant(
        "a manifest that a listing does not show outlives its chunks",
        "tierd/daemon/tiers/prune.py",
        "        there = seen.checkpoints if seen else {}\n",
        "        there = {}\n",
        "pytest tests/daemon/tiers/test_late_listings.py -k was_not_listed",
    ),
)
