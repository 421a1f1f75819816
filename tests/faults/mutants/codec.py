"""Mutants of `tierd/codec/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "a child of a fork waits for threads that it does not have",
        "tierd/codec/codec.py",
        "    _cores = threading.BoundedSemaphore(_CORES)\n\n\nos.register",
        "    pass\n\n\nos.register",
        "pytest tests/codec/test_codec.py -k child_of_a_fork",
    ),
    Mutant(
        "all of what is noise is compressed in vain",
        "tierd/codec/codec.py",
        "    if found_kind is ChunkKind.NOISE and len(raw) >= _SMALL and not _repeats(raw):\n",
        "    if False:\n",
        "pytest tests/codec/test_codec.py -k told_by_a_sample",
    ),
    Mutant(
        "what looks like noise is not looked at for what comes again",
        "tierd/codec/codec.py",
        "    return len(_zstd(sample)) < len(sample)\n",
        "    return False\n",
        "pytest tests/codec/test_codec.py -k noise_everywhere",
    ),
)
