"""A checkpoint's tensors in the formats of other programs, streamed. `reading` and `filesystem.py` import this package.

Invariant: memory is bounded by `SLAB_BYTES` and `CACHED_BYTES`, whatever the size of a tensor. Only verified bytes are
written. Nothing of the checkpoint is executed.
"""
