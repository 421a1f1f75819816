"""Mutants of how checkpoints get to tiers: one pass for all of them, what is not compressed in vain, and when a
flush pauses."""

from __future__ import annotations

from faults.rounds import Mutant

_ENCODING, _ENCODED = "tierd/daemon/transfer/shared_encoding.py", "pytest tests/daemon/transfer/test_shared_encoding.py"
_CODEC, _SPREAD = "pytest tests/codec/test_codec.py", "pytest tests/daemon/transfer/test_flush_pacing.py"

TRANSFER = (
    Mutant(
        "each tier reads and encodes for itself",
        _ENCODING,
        "        entry = entry or self._encoding._begin(",
        "        entry = self._encoding._begin(",
        f"{_ENCODED} -k cost_one_read",
    ),
    Mutant(
        "what a slower tier lacks holds up the others",
        _ENCODING,
        "        while self._window and not self._budget.has(size):\n",
        "        while False:\n",
        f"{_ENCODED} -k stands_still",
    ),
    Mutant(
        "what a slower tier lacks is not kept",
        _ENCODING,
        "        entry.kept = self._budget.take_at_once(size)\n",
        "        entry.kept = None\n",
        f"{_ENCODED} -k what_fits_there",
    ),
    Mutant(
        "two tiers get a chunk in two forms",
        _ENCODING,
        "        if content(chunk) not in shared.packed:\n",
        "        if True:\n",
        f"{_ENCODED} -k decided_once",
    ),
    Mutant(
        "a late tier begins at the first chunk",
        _ENCODING,
        "        return next(ready, None) or next(filter(fits, todo), None)\n",
        "        return next(filter(fits, todo), None)\n",
        f"{_ENCODED} -k behind_joins",
    ),
    Mutant(
        "a flush that was cancelled leaves a thread that reads",
        _ENCODING,
        "            await _at_rest(entry.work)\n",
        "            pass\n",
        "pytest tests/daemon/transfer/test_flush.py -k cancelled_is_at_rest",
    ),
    Mutant(
        "all of what is noise is compressed in vain",
        "tierd/codec/codec.py",
        "    if found_kind is ChunkKind.NOISE and len(raw) >= _SMALL and not _repeats(raw):\n",
        "    if False:\n",
        f"{_CODEC} -k told_by_a_sample",
    ),
    Mutant(
        "what looks like noise is not looked at for what comes again",
        "tierd/codec/codec.py",
        "    return len(_zstd(sample)) < len(sample)\n",
        "    return False\n",
        f"{_CODEC} -k noise_everywhere",
    ),
    Mutant(
        "a flush is spread although a newer save waits",
        "tierd/daemon/reconciling/flusher.py",
        "            return newer or bool(asked) or ends",
        "            return bool(asked) or ends",
        f"{_SPREAD} -k newer",
    ),
    Mutant(
        "a flush is spread although somebody waits for it",
        "tierd/daemon/reconciling/requests.py",
        "        self.awaited[part] += 1\n",
        "",
        "pytest tests/daemon/test_control.py -k is_not_spread",
    ),
    Mutant(
        "a backlog is sent with pauses",
        "tierd/daemon/reconciling/flusher.py",
        "if lacking <= 1 else 0.0, hurries)",
        "if True else 0.0, hurries)",
        f"{_SPREAD} -k backlog",
    ),
    Mutant(
        "all that wait for their turn begin at once",
        "tierd/daemon/transfer/flush_pacing.py",
        "            self._chunks += 1\n",
        "            self._chunks += self._chunks % 8 == 7\n",
        f"{_SPREAD} -k one_after",
    ),
    Mutant(
        "an hour's flush for an hour's interval",
        "tierd/core/planning/flush_window.py",
        "    return min(max(saved_at[-1] + _SHARE * interval - now, 0.0), LONGEST_S)\n",
        "    return max(saved_at[-1] + _SHARE * interval - now, 0.0)\n",
        "pytest tests/core/planning/test_flush_window.py -k lost_node",
    ),
)
