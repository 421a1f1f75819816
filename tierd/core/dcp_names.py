"""The names that the pickle of DCP's metadata may contain, as data, so that interpreting the pickle needs no torch.

`client/dcp` makes DCP's objects from the interpreted pickle. `formats/dcp` reads from it the file and the byte range of
each entry.
"""

from __future__ import annotations

from tierd.core.pickled import DICT, PickledGlobal

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"  # the former module of some of DCP's classes
PLACES = (
    *(
        (f"{_DCP}.metadata", name, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta"),
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo", "_StorageInfo"),
    # Megatron keeps the plan of each rank's save in its metadata for its next save. Nothing here reads it.
    *(
        (f"{_DCP}.planner", name, "save plan")
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    # Megatron-core 0.15 and before.
    (_MEGATRON, "MCoreMetadata", "Metadata"),
    (_MEGATRON, "MCoreSavePlan", "save plan"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", "memory format"),
    (_FORMER, "TensorProperties", "TensorProperties"),
    (_FORMER, "MEM_FORMAT_ENCODING", "memory format"),
    ("torch", "Size", "Size"),
    ("torch.serialization", "_get_layout", "layout"),
    ("collections", "OrderedDict", DICT),
    # The directory to which torch's own writer wrote.
    *((module, name, "path") for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    # The first releases of Python 3.11 pickle a member of an enumeration with `getattr`.
    *((module, "getattr", "getattr") for module in ("builtins", "__builtin__")),
)
# The dtypes of torch 2.6 to 2.13, by the names that torch pickles.
DTYPES = (
    *("bfloat16", "bit", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bool", "cdouble"),
    *("cfloat", "chalf", "complex128", "complex32", "complex64", "double", "float", "float16"),
    *("float32", "float4_e2m1fn_x2", "float64", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "half", "int", "int1", "int16"),
    *("int2", "int3", "int32", "int4", "int5", "int6", "int64", "int7", "int8", "long", "qint32", "qint8"),
    *("quint2x4", "quint4x2", "quint8", "short", "uint1", "uint16", "uint2", "uint3", "uint32"),
    *("uint4", "uint5", "uint6", "uint64", "uint7", "uint8"),
)
NAMES = {(module, name): PickledGlobal(kind, f"{module}.{name}") for module, name, kind in PLACES}
NAMES |= {("torch", name): PickledGlobal("dtype", name) for name in DTYPES}
