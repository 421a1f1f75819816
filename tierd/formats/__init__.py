"""Check the structure of files that other programs write.

The formats are zip (torch.save, .ckpt, .keras), safetensors, HDF5, pickles, JSON, DCP's metadata, and TensorFlow's
index and data shards.

Invariant: this package loads, unpickles and executes nothing, and makes no decision about a checkpoint. Each module
reads ranges of a `ByteSource`. It raises `DamagedFile`, with the offset, if no writer can have written these bytes, and
`UncheckedFile` if it cannot decide. Each module bounds the memory of a check independently of the bytes' content, and
names its bound.

This package performs no I/O of its own, and imports `core` alone. `watching`, `daemon` and `exporting` import
it.
"""
