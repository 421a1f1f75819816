"""Layouts that no table knows, drawn by chance: which files a save of a step has, in the order of writing.

Names, words and habits are those of public training code: directories of a step with others in them, ranks, sidecars of
formats that nothing can check, files of one step beside each other, files without a step, pointers and links.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
from dataclasses import dataclass, field

import torch
from safetensors.torch import save

CHECKED = (".pt", ".pth", ".bin", ".tar", ".ckpt", ".safetensors", ".pkl", ".json")  # a cut of these can be proven
_HOMES = ("", "", "checkpoints", "outputs/run1/ckpts", "logs/version_0/checkpoints", "exp-3/models")
_DIRECTORIES = ("step_{}", "step-{:06}", "{:07}", "checkpoint-{}", "ckpt_{}", "epoch_{}", "iter_{:07}", "global_step{}")
_DIRECTORIES += ("model_step_{}", "ckpt-step={}", "snapshot-{}")
_WORDLESS = ("save_{}", "v{}", "round-{}")  # a number, and no word that says what it counts
_FILES = ("{stem}_{step}{ext}", "{stem}-step{step}{ext}", "{stem}.{step:06}{ext}", "{step}_{stem}{ext}")
_FILES += ("ckpt_{step}_{stem}{ext}", "{stem}_checkpoint-{step}{ext}", "{stem}_{step}_steps{ext}")
_FILES += ("{stem}-epoch{step:03}-0.{step}{ext}", "{step:06}-{stem}{ext}")
_RANKS = ("model_rank_{r}.pt", "rank{r}/shard.pt", "shard-{r:05}-of-{w:05}.bin", "optim_world_size_{w}_rank_{r}.pt")
_RANKS += ("states_{r}.pth", "dist/mp_rank_{r:02}_states.pt", "data_parallel_{r}.pkl")
_MEMBERS = ("model.pt", "optimizer.pt", "scheduler.bin", "weights.safetensors", "ema.pth", "trainer.ckpt", "critic.pt")
_BELOW = ("", "", "", "actor/", "unet/", "training_state/", "a/b/")
_SIDECARS = ("rng.dat", "args.state", "notes.md", "config.json", "vocab.txt", ".hidden", "sampler")
_SIDECARS += ("tokenizer/merges.txt",)
_SIDECARS += (".cache/huggingface/download/model.metadata", "log.jsonl", "params.msgpack")
_POINTERS = ("latest", "last_checkpoint", "latest.txt", "newest.json", "link last", "link latest{ext}")
_STEPLESS = ("last.pt", "best.pt", "final/model.pt", "averaged.safetensors")
_NOISE = ("train.log", "log.txt", "events.out.tfevents.17", "samples/0.png", ".lock")


@dataclass(frozen=True)
class Layout:
    """One program's habits.

    Attributes:
        shape: "directory", "nested", "beside", "state beside", "wordless" or "stepless".
        home: the directory of the saves, below the watched one.
        name: of a step's directory, or of a file of it.
        members: the files of one save, below its directory or as stems, in the order in which they are written.
        mode: "in place", "file renamed" or "directory renamed".
        every: steps between two saves.
        keep: saves that are kept; None: all.
        aside: files without a step that are written again beside the saves.
        pointers: small files or links that name the newest save.
        noise: logs and pictures beside the saves.
        clears: whether what a killed save left is removed before the same step is saved again.
    """

    shape: str
    home: str
    name: str
    members: tuple[str, ...]
    mode: str
    temporary: str
    every: int
    keep: int | None
    aside: tuple[str, ...] = ()
    pointers: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    clears: bool = True
    same_again: bool = False
    own: str = field(default="")

    def top(self, step: int) -> str:
        """The directory of a save, or what a pointer to it names."""
        if self.shape == "beside":
            return self.files(step)[0]
        if self.shape == "nested":
            return f"{self.own}epoch_{step // (2 * self.every)}/{self.name.format(step)}"
        return self.own + self.name.format(step)

    def files(self, step: int) -> tuple[str, ...]:
        """The paths of a save, in the order of writing."""
        if self.shape == "stepless":
            return tuple(self.own + name for name in self.members)
        if self.shape == "state beside":
            first, *rest = self.members
            stem = self.name.format(step)
            return (f"{self.own}{stem}{_ending(first)}", *(f"{self.own}{stem}-state/{name}" for name in rest))
        if self.shape == "beside":
            return tuple(
                self.own + self.name.format(stem=name.removesuffix(_ending(name)), step=step, ext=_ending(name))
                for name in self.members
            )
        return tuple(f"{self.top(step)}/{name}" for name in self.members)


def _ending(name: str) -> str:
    last = name.rpartition("/")[2]
    return "." + last.partition(".")[2] if "." in last else ""


def drawn(chance: random.Random) -> Layout:
    """A layout."""
    shapes = (*["directory"] * 3, "nested", "beside", "beside", "state beside", "wordless", "stepless")
    shape = chance.choice(shapes)
    world = chance.choice((1, 1, 2, 3))
    name = chance.choice({"wordless": _WORDLESS, "beside": _FILES}.get(shape, _DIRECTORIES))
    members = _members(chance, shape, world)
    mode = chance.choice(("in place", "file renamed", "directory renamed"))
    if shape in ("beside", "state beside", "stepless") and mode == "directory renamed":
        mode = "in place"
    if shape == "state beside":
        name = chance.choice(("lora-{:06}", "net_step_{}", "adapter-{:08}"))
    home = chance.choice(_HOMES)
    stepped = shape not in ("wordless", "stepless")
    return Layout(
        shape=shape,
        home=home,
        own=home + "/" if home else "",
        name=name,
        members=members,
        mode=mode,
        temporary=chance.choice(("{}.tmp", ".{}.tmp", "tmp_{}", "{}.partial", "{}.incomplete")),
        every=chance.choice((1, 5, 10, 500)),
        keep=None if shape == "stepless" else chance.choice((None, None, 1, 2, 3)),
        aside=tuple(chance.sample(_STEPLESS, chance.choice((0, 0, 1, 2)))) if stepped else (),
        pointers=tuple(chance.sample(_POINTERS, chance.choice((0, 0, 1, 2)))) if stepped else (),
        noise=tuple(chance.sample(_NOISE, chance.choice((0, 1, 2)))),
        clears=chance.random() < 0.5,
        same_again=chance.random() < 0.5,
    )


def _members(chance: random.Random, shape: str, world: int) -> tuple[str, ...]:
    if shape == "beside":
        if world > 1 and chance.random() < 0.5:
            form = chance.choice(("model_rank_{r}.pt", "rank{r}.pth", "net-{r:05}-of-{w:05}.bin"))
            return tuple(form.format(r=rank, w=world) for rank in range(world))
        return tuple(
            chance.sample(
                ("G.pth", "D.pth", "model.pt", "optim.pt", "net.safetensors", "ema.pth.tar"),
                chance.choice((1, 1, 2, 3)),
            )
        )
    if shape == "stepless":
        first = chance.choice(("last.pt", "model.safetensors", "latest/model.pt"))
        return (first, *chance.sample(("best.pt", "optimizer.pt", "latest/ema.pt"), chance.choice((0, 1, 2))))
    members = [chance.choice(_BELOW) + name for name in chance.sample(_MEMBERS, chance.randint(1, 3))]
    if world > 1:
        # Without any word, a number at a name's end is a step.
        form = chance.choice([form for form in _RANKS if shape != "wordless" or not form.startswith("states")])
        members += [form.format(r=rank, w=world) for rank in range(world)]
    members += chance.sample(_SIDECARS, chance.choice((0, 1, 2, 3)))
    if shape == "wordless":  # a directory with a log is one of results, and not of a checkpoint
        members = [name for name in members if not name.endswith(".jsonl")]
    chance.shuffle(members)
    if shape == "state beside":  # the weights come first, and are a file of their own
        members.insert(0, chance.choice(("w.safetensors", "w.pt")))
    return tuple(members)


@functools.lru_cache(4096)
def content(path: str, step: int, version: int) -> bytes:
    """A file's bytes: of its format, and no two saves' are the same."""
    noise = random.Random(f"{path} {step} {version}")
    numbers = torch.full((noise.randint(5, 60),), float(step))
    numbers[0] = float(noise.randint(0, 1 << 20))
    if path.endswith((".pt", ".pth", ".bin", ".tar", ".ckpt")):
        file = io.BytesIO()
        torch.save({"weight": numbers, "step": step}, file)
        return file.getvalue()
    if path.endswith(".safetensors"):
        return save({"weight": numbers})
    if path.endswith(".json"):
        return json.dumps({"step": step, "version": version, "numbers": numbers.tolist()}).encode()
    if path.endswith(".pkl"):
        return pickle.dumps({"step": step, "numbers": numbers.tolist()})
    if path.endswith((".md", ".txt", ".jsonl", ".log", ".metadata")):
        return b"".join(b"%d line %d\n" % (step, noise.randint(0, 999)) for _ in range(noise.randint(1, 9)))
    return bytes([0xC7, step % 251]) + noise.randbytes(noise.randint(10, 3000))
