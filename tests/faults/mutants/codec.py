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
    Mutant(
        "a code and its base run into the neighbouring number",
        "tierd/codec/byte_planes.py",
        "_HIGHEST = 255 - 15",
        "_HIGHEST = 255 - 14",
        "pytest tests/codec/test_byte_planes.py -k any_base",
    ),
    Mutant(
        "a block is stored unread",
        "tierd/codec/byte_planes.py",
        "        if not _block_reads_back(out.view[at : out.at], block):\n            log",
        "        if False:\n            log",
        "pytest tests/codec/test_byte_planes.py -k does_not_come_back",
    ),
    Mutant(
        "a frame is stored unread",
        "tierd/codec/codec.py",
        "    if codec == ZSTD and not _decodes_to(",
        "    if False and not _decodes_to(",
        "pytest tests/codec/test_codec.py -k frame_that_does_not",
    ),
    Mutant(
        "a patch is stored unread",
        "tierd/codec/codec.py",
        "    if data is None or not _decodes_to(",
        "    if data is None or False and not _decodes_to(",
        "pytest tests/codec/test_codec.py -k patch_that_does_not",
    ),
    Mutant(
        "only the header of an empty frame is read",
        "tierd/codec/frames.py",
        "    if not size:\n        _check_empty(memoryview(frame), expander)\n",
        "    if not size:\n",
        "pytest tests/codec/test_frames.py",
        "DID NOT RAISE",
    ),
)
