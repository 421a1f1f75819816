"""Mutants of `tierd/daemon/reconciling/`."""

from __future__ import annotations

from faults.rounds import Mutant

_AGENDA = "tierd/daemon/reconciling/agenda.py"
_FLUSHER = "tierd/daemon/reconciling/flusher.py"
_PRUNER = "tierd/daemon/reconciling/pruner.py"
_TEST_SLOW_TIER = "pytest tests/daemon/transfer/test_slow_tier.py"

MUTANTS = (
    Mutant(
        "the only copy is deleted by what a tier showed long ago",
        "tierd/daemon/reconciling/pruner.py",
        "if setup.timings.aged_s < observed.age_s(name) < math.inf]",
        "if False]",
        "pytest tests/daemon/test_finished.py -k long_ago",
    ),
    Mutant(
        "a tier that is slower than the saves is never pruned",
        _AGENDA,
        "if isinstance(action, Prune)] if worker.sent else []\n",
        "if isinstance(action, Prune)] if False else []\n",
        f"{_TEST_SLOW_TIER} -k pruned_all_the_while",
    ),
    Mutant(
        "a node does not ask what others send",
        _AGENDA,
        "            await self._setup.tiers.flushes.hear(worker.name, action.part.checkpoint.run)\n",
        "",
        "pytest tests/daemon/test_nodes.py -k another_one_is_sending",
    ),
    Mutant(
        "a copy is deleted because of one that a sparing look did not ask about",
        _AGENDA,
        "            if self._next(worker) is None:\n                return None\n",
        "            return self._next(worker)\n",
        "pytest tests/daemon/test_sparing.py -k took_away_since",
    ),
    Mutant(
        "a daemon at rest forgets what is too young to be removed",
        _AGENDA,
        "        if tiers.has_leftovers(worker.name):",
        "        if False:",
        "pytest tests/daemon/test_idle.py -k not_forgotten",
    ),
    Mutant(
        "runs are observed for ever after they were copied",
        "tierd/daemon/reconciling/backfill.py",
        "            self.runs -= seen - set(flushes)\n",
        "            pass\n",
        "pytest tests/daemon/transfer/test_backfill.py -k nobody_saves_here",
    ),
    Mutant(
        "a node does not say which checkpoint it sends",
        _FLUSHER,
        "flushes.flush_aloud if aloud else",
        "flushes.flush_aloud if False else",
        "pytest tests/daemon/test_nodes.py -k another_one_is_sending",
    ),
    Mutant(
        "preemption: an older flush that is under way is finished first",
        _FLUSHER,
        "                task.cancel()",
        "                pass",
        "pytest tests/client/preemption/test_notices.py -k gives_way",
    ),
    Mutant(
        "a flush is spread although a newer save waits",
        _FLUSHER,
        "            return newer or bool(asked) or ends",
        "            return bool(asked) or ends",
        "pytest tests/daemon/transfer/test_flush_pacing.py -k newer",
    ),
    Mutant(
        "a backlog is sent with pauses",
        _FLUSHER,
        "if lacking <= 1 else 0.0, hurries)",
        "if True else 0.0, hurries)",
        "pytest tests/daemon/transfer/test_flush_pacing.py -k backlog",
    ),
    Mutant(
        "a copy goes because of a newer one that is rotten",
        _PRUNER,
        "            is_past = await self._all_right(checkpoint, [part for seen in others for part in seen.parts()])\n",
        "            is_past = bool(others)\n",
        f"{_TEST_SLOW_TIER} -k rotten",
    ),
    Mutant(
        "the only copy goes although it became wanted while newer ones were read",
        _PRUNER,
        "is_wanted = checkpoint not in superseded(demand) if is_late else",
        "is_wanted = False if is_late else",
        f"{_TEST_SLOW_TIER} -k only_copy_wanted",
    ),
    Mutant(
        "an incomplete copy goes although it became wanted while the tiers were read",
        _PRUNER,
        "else checkpoint in inventory.pins | inventory.needed\n",
        "else False\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k incomplete_copy",
    ),
    Mutant(
        "a tier deletes what another tier was once seen to have",
        _PRUNER,
        "                        if other not in stale and not await self._holds(other, seen):\n",
        "                        if False:\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'asked_before and gone'",
    ),
    Mutant(
        "a tier deletes what another tier has a corrupt copy of",
        _PRUNER,
        "        return corrupt == []\n",
        "        return corrupt is not None\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'asked_before and corrupt'",
    ),
    Mutant(
        "a tier deletes what another tier has that does not answer",
        _PRUNER,
        "        except (TierdError, OSError):\n            return False\n",
        "        except (TierdError, OSError):\n            return True\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k 'asked_before and no_answer'",
    ),
    Mutant(
        "a local copy goes without another look at the tiers",
        _PRUNER,
        "            is_past = await tiers.are_past(checkpoint, demand.inventory)\n",
        "            is_past = True\n",
        "pytest tests/daemon/test_reconcile.py -k whole_by_its_names_alone",
    ),
    Mutant(
        "what waits for a copy that cannot be read is asked for again and again",
        _PRUNER,
        "                self._rest_on[checkpoint] = part\n",
        "",
        f"{_TEST_SLOW_TIER} -k each_second",
    ),
    Mutant(
        "a prune goes on although another node has begun a launch",
        _PRUNER,
        "            if not {one.attempt for one in shown} <= known:\n",
        "            if {one.attempt for one in shown} < set():\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k another_node",
    ),
    Mutant(
        "what was lost is asked by the world after the deletion alone",
        _PRUNER,
        "        if names := lost_to(live.inventory(), before, self._setup.config, tier, seen):\n",
        "        if names := lost_to(live.inventory(), live.inventory(), self._setup.config, tier, seen):\n",
        "pytest tests/daemon/transfer/test_relay.py -k comes_while",
    ),
    Mutant(
        "what a rank commits while other parts are freed is out of sight",
        _PRUNER,
        "live.place = live.place.without_parts(parts)",
        "live.place = live.place.without(checkpoint)",
        "pytest tests/daemon/test_reconcile.py -k stays_in_sight",
    ),
    Mutant(
        "a local copy goes on the word of an old look",
        _PRUNER,
        "parts = await self._covered(checkpoint)\n        if parts is None or checkpoint",
        "parts = tuple(live.place.checkpoints[checkpoint].parts())\n        if parts is None or checkpoint",
        "pytest tests/daemon/test_finished.py -k lost_a_chunk",
    ),
    Mutant(
        "a reader tidies up on a tier",
        "tierd/daemon/reconciling/records.py",
        "        saved = sorted((live.runs() - live.place.restored) | live.place.launches.keys())\n",
        "        saved = sorted(live.runs())\n",
        "pytest tests/daemon/tiers/test_run_policies.py -k not_a_readers_to_delete",
    ),
    Mutant(
        "a filled tier has no policy for what it got",
        "tierd/daemon/reconciling/records.py",
        "[*saved, *sorted(setup.backfill.runs)]",
        "saved",
        "pytest tests/daemon/transfer/test_backfill.py -k 'outlive or nobody_saves_here'",
    ),
    Mutant(
        "a flush is spread although somebody waits for it",
        "tierd/daemon/reconciling/requests.py",
        "        self.awaited[part] += 1\n",
        "",
        "pytest tests/daemon/test_control.py -k is_not_spread",
    ),
)
