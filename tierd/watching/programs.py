"""The known programs: the form of one checkpoint of each, and when it is complete.

Each layout names the source code that was read for it, at the named version or commit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The layout of a program's checkpoints.

    Attributes:
        program: its name.
        unit: the form of one checkpoint, for people.
        complete: when it is complete, for people.
        source: the code from which this was read.
    """

    program: str
    unit: str
    complete: str
    source: str


TRAINER = UnitLayout(
    "HF Trainer",
    "`checkpoint-N/`",
    "`trainer_state.json` is there (rank 0 writes it last, not atomically; no other program writes it), "
    "`checkpoint-is-incomplete.txt` is not",
    "transformers 5.23, trainer.py `_save_checkpoint`, `_save_rng_state`; trainer_jit_checkpoint.py",
)
ACCELERATE = UnitLayout(
    "Accelerate",
    "a directory with `random_states_R.pkl`",
    "`random_states_R.pkl` of every rank, and as many `custom_checkpoint_N.pkl` as in the checkpoint before it; "
    "there is no marker, and these are written last",
    "accelerate 1.15, checkpointing.py `save_accelerator_state`; custom objects follow in accelerator.py `save_state`",
)
LIGHTNING = UnitLayout(
    "Lightning, Fabric",
    "`*.ckpt`, a file or a directory",
    "the file is whole; of a directory `.metadata` and, written after it, `meta.pt`",
    "lightning 2.6, fabric/utilities/cloud_io.py `_atomic_save` (moved across file systems, it is no rename); "
    "pytorch/strategies/fsdp.py `save_checkpoint`",
)
DCP = UnitLayout(
    "DCP",
    "a directory with `.metadata` (Composer's sharded ones as well)",
    "`.metadata` was renamed into place; without collectives, `__R.metadata` of every rank",
    "torch 2.13, distributed/checkpoint/filesystem.py `finish`",
)
TORCHTITAN = UnitLayout(
    "torchtitan",
    "`step-N/`",
    "`.metadata` or `model.safetensors.index.json`",
    "torchtitan b5bcd76, components/checkpointer/dcp.py `_find_load_step`",
)
TORCH_CHECKPOINTING = UnitLayout(
    "torch_checkpointing",
    "a directory with `metadata.pkl` and `<item>_<rank>.pt`; of one rank, of `<item>_0.pt` alone",
    "it was renamed from its temporary name, after a barrier",
    "torch_checkpointing 0.1, checkpoint_writer.py `_temp_dir_path`, `write`; metadata_serialization.py",
)
DEEPSPEED = UnitLayout(
    "DeepSpeed",
    "`global_stepN/`",
    "`latest` beside it names it or a later one, and no rank's file is left out; rank 0 writes `latest` before the "
    "last barrier, so it proves rank 0 only",
    "DeepSpeed edaa722, runtime/engine.py `save_checkpoint`, `_get_rank_zero_ckpt_name`, `_get_ckpt_name`",
)
MEGATRON = UnitLayout(
    "Megatron-LM",
    "`iter_NNNNNNN/`",
    "`latest_checkpointed_iteration.txt` beside it names it or a later one; `.metadata` and `metadata.json`, or "
    "`model_optim_rng.pt` of every model-parallel rank",
    "Megatron-LM d98e8a6, training/checkpointing.py `save_checkpoint`, `get_checkpoint_name`; "
    "core/dist_checkpointing/serialization.py `save`",
)
NEMO = UnitLayout(
    "NeMo",
    "a directory with `weights/` and `context/`",
    "`<name>-unfinished` is not beside it, and `weights/.metadata` is there",
    "NeMo d73511f, lightning/pytorch/callbacks/model_checkpoint.py `UNFINISHED_CHECKPOINT_SUFFIX`",
)
ORBAX = UnitLayout(
    "Orbax",
    "a directory with `_CHECKPOINT_METADATA` or an item with `manifest.ocdbt`",
    "its name has no `.orbax-checkpoint-tmp`, and `_CHECKPOINT_METADATA` names when it was committed",
    "orbax 3ff7b24, _src/path/atomicity.py `finalize`, atomicity_types.py `TMP_DIR_SUFFIX`",
)
TENSORFLOW = UnitLayout(
    "TensorFlow",
    "`<prefix>.index` and `<prefix>.data-R-of-N`",
    "the index, which is renamed into place last, and all N shards",
    "tensorflow/core/util/tensor_bundle/tensor_bundle.cc `BundleWriter::Finish`, `MergeBundles`",
)
SAVED_MODEL = UnitLayout(
    "TensorFlow SavedModel",
    "a directory with `saved_model.pb`",
    "`saved_model.pb` is there, which is written last",
    "tensorflow/python/saved_model/save.py `save_and_return_nodes`",
)
KERAS = UnitLayout(
    "Keras",
    "`*.keras`, `*.h5`",
    "the file is whole and closed; it is written in place",
    "keras 3.15, src/saving/saving_lib.py `_save_model_to_fileobj`",
)
SHARDED = UnitLayout(
    "HF model",
    "a directory with `config.json` and weights; `*.index.json` and its shards",
    "every shard that the index names; there is no marker",
    "transformers 5.23, modeling_utils.py `save_pretrained`",
)
HUB = UnitLayout(
    "Hugging Face Hub",
    "a snapshot in the Hub's cache, `models--ORG--NAME/snapshots/COMMIT/`",
    "each of its links leads to a file; a file is renamed into place before its link is made",
    "huggingface_hub 1.0, file_download.py `_get_pointer_path`, `_create_symlink`",
)
COMPOSER = UnitLayout(
    "Composer",
    "`*-rankR.pt`, one file a rank",
    "every rank's file, in place of `latest-rankR.pt` links",
    "composer 6405188, callbacks/checkpoint_saver.py `CheckpointSaver`; utils/checkpoint.py `torch.save`",
)
FILE = UnitLayout(
    "torch.save, safetensors",
    "`*.pt`, `*.pth`, `*.bin`, `*.pkl`, `*.npz`, `*.safetensors` and other endings of weights; all of one step in one "
    "directory; without a step, all of one directory",
    "each file is whole; it is written in place",
    "torch 2.13, serialization.py `save`; safetensors 0.5 `serialize_file`",
)
DIRECTORY = UnitLayout(
    "directory",
    "a directory of no program above, with weights below it and a step in its name, or without checkpoints of several "
    "steps in it",
    "each file with a known format is whole, and no file is missing that all others of its series have",
    "-",
)
OWN = UnitLayout(
    "own layout",
    "a path that a `--unit` or `[[watch]] unit` matches",
    "the file of `complete_when` is there, if that is given, and each file with a known format is whole",
    "-",
)
LAYOUTS = (
    *(TRAINER, ACCELERATE, LIGHTNING, DCP, TORCHTITAN, TORCH_CHECKPOINTING, DEEPSPEED, MEGATRON, NEMO),
    *(ORBAX, KERAS, TENSORFLOW, SAVED_MODEL, HUB, COMPOSER, SHARDED, FILE, DIRECTORY),
)
