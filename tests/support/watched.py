"""A program that writes one layout's checkpoints: it is killed, deletes, renames or rewrites at any point.

Files are real; their times are simulated, so that a seed is a history.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from support import layouts
from support.layouts import WRITERS

from tierd.watching.unit import MARKERS, SHARDED_LAYOUT, ListedEntry, Listing, Unit
from tierd.watching.unit_detection import units

SETTLE_S = 10.0
OBSERVE_S = 3.0
LAST = ("trainer_state.json", "random_states_0.pkl", "meta.pt", "metadata.json", "_CHECKPOINT_METADATA", "latest")
LAST += ("latest_checkpointed_iteration.txt",)
Files = dict[str, bytes]


def write_saves(home: Path) -> dict[str, list[Files]]:
    """Two versions of each layout's checkpoint, by path: same names, and mostly the same sizes."""
    found: dict[str, list[Files]] = {}
    for write in WRITERS:
        for version in (0.0, 1.0):
            root = home / f"{write.__name__}-{version:.0f}"
            root.mkdir()
            layouts.version = version
            write(root)
            files = {
                str(path.relative_to(root)): path.read_bytes()
                for path in sorted(root.rglob("*"))
                if path.is_file() and not path.is_symlink() and path.name != "checkpoint"
            }
            found.setdefault(write.__name__, []).append(files)
    layouts.version = 0.0
    return found


def order(path: str, chance: random.Random) -> tuple[int, float]:
    """When a program writes a file: its markers last, by name; the others in any order, as several ranks do."""
    name = path.rpartition("/")[2]
    if name in ("config.json", "model.yaml"):
        return -1, 0
    if path == "checkpoint-500/latest":
        return 1, 0  # by DeepSpeed, before the Trainer goes on
    if name == ".metadata" or name.endswith((".index", ".index.json")):
        return 1, 0
    return (2 + LAST.index(name), 0) if name in LAST else (0, chance.random())


class World:
    """A directory, a writer in it, and a clock that both share."""

    def __init__(self, root: Path, seed: int, save: list[Files]) -> None:
        self.root, self.chance, self.save = root, random.Random(seed), save
        # Where an index names files, a save is told from the next one at once; else once it was due.
        self.hard = len(save[0]) == 1 or any(path.endswith((".metadata", ".index")) for path in save[0])
        self.now_s = 1000.0
        self.whole = False  # since the last save ended, nothing was written, deleted or renamed
        self.finished: list[Files] = []  # each state in which the writer left a whole checkpoint
        self.acts = Counter[str]()  # what the writer did, or what was done to it
        self.writer = self.life()
        self.over = False

    # -- the writer ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The writer does one thing, some time passes."""
        self.now_s += self.chance.choice((0.02, 0.02, 0.02, 0.5, 2.0))
        if not self.over and next(self.writer, None) is None:
            self.over = True

    def stamp(self, path: Path) -> None:
        os.utime(path, ns=(0, int(self.now_s * 1e9)))

    def put(self, path: Path, data: bytes, ended: Callable[[], object] = lambda: None) -> Iterator[str]:
        """Write a file in pieces, in place, or beside and renamed; `ended` is called the moment it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        renamed = path.name == ".metadata" or path.name.endswith(".index")
        there = path.with_name(path.name + ".tmp") if renamed else path
        with there.open("wb") as file:
            self.stamp(there)
            yield "created"
            pieces = self.chance.randint(1, 3)
            for number in range(pieces):
                file.write(data[len(data) * number // pieces : len(data) * (number + 1) // pieces])
                file.flush()
                self.stamp(there)
                if number == pieces - 1 and renamed:
                    yield "written"
                    there.rename(path)
                if number == pieces - 1:
                    ended()
                yield "written"

    def one_save(self, files: Files) -> Iterator[str]:
        """Orbax and torch_checkpointing write under another name and rename; ranks of Composer begin at once."""
        self.whole = False
        [top, *_] = {path.split("/")[0] for path in files}
        marker = self.root / f"{top}-unfinished"
        if "step=30" in top:  # NeMo's own
            marker.touch()
            self.stamp(marker)
            yield "marked"
        away = {"400": "400.orbax-checkpoint-tmp-7", "step_5": "tmp_step_5"}.get(top, top)
        for name in files if any("-rank" in name for name in files) else ():
            (self.root / name).touch()
            self.stamp(self.root / name)
        *names, last = sorted(files, key=lambda path: order(path, self.chance))
        for name in names:
            yield from self.put(self.root / name.replace(top, away, 1), files[name])
        # NeMo's save is finished when its marker is gone; gate, watched, seed 239: it was killed in between.
        ended = self.finish if away == top and not marker.exists() else lambda: None
        yield from self.put(self.root / last.replace(top, away, 1), files[last], ended)
        if away != top:
            yield from self.delete(self.root / top)
            (self.root / away).rename(self.root / top)
            self.finish()
        if marker.exists():
            marker.unlink()
            self.finish()

    def finish(self) -> None:
        self.finished.append(self.there())
        self.whole = True

    def delete(self, directory: Path) -> Iterator[str]:
        paths = sorted(directory.rglob("*"), key=lambda one: (one.name.endswith("-unfinished"), self.chance.random()))
        for path in paths:
            if path.is_file():
                path.unlink()
                yield "deleted"
        shutil.rmtree(directory, ignore_errors=True)

    def there(self) -> Files:
        paths = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in paths}

    def life(self) -> Iterator[str]:
        """Save; then perhaps delete, save again over it, or rename it; and perhaps be killed before any of it ends."""
        steps = self.whole_life()
        for _ in range(self.chance.choice((10**9, 10**9, self.chance.randint(1, 60)))):
            if next(steps, None) is None:
                return
            yield "."
        self.acts["killed"] += 1

    def whole_life(self) -> Iterator[str]:
        yield from self.one_save(self.save[0])
        for _ in range(self.chance.randint(0, 3)):
            self.now_s += 2.0
            for _ in range(self.chance.choice((0, 5, 80)) if self.hard else 80):  # some 40 s of training
                yield "training"
            act = self.chance.choice(("again", "delete", "delete and save", "rename"))
            self.acts[act] += 1
            if act.startswith("delete"):
                self.whole = False
                for path in self.root.glob("*step=30*"):
                    (self.root / f"{path.name}-unfinished").touch()
                yield from self.delete(self.root)
                self.root.mkdir()
                yield "deleted"
            elif act == "rename":
                yield from self.rename()
            if act in ("again", "delete and save"):
                yield from self.one_save(self.save[self.chance.randint(0, 1)])

    def rename(self) -> Iterator[str]:
        """Move what is there away as one directory, and back."""
        self.whole = False
        for path in sorted(self.root.iterdir()):
            away = self.root.parent / f"away-{path.name}"
            path.rename(away)
            yield "away"
            away.rename(path)
            yield "back"
        self.whole = self.there() in self.finished


def unit_of(files: Files, unit: Unit) -> Files | None:
    """The files of a finished save that belong to a unit. A model's shards are one without their config.json, too."""
    directories = {
        str(parent): ListedEntry("directory") for path in files for parent in Path(path).parents if parent.name
    }
    texts = {path: data.decode() for path, data in files.items() if path.rpartition("/")[2] in MARKERS}
    names = {path: ListedEntry("file") for path in files}
    found = [one for one in units(Listing(directories | names, texts)) if one.path == unit.path]
    if unit.layout is SHARDED_LAYOUT:
        return {path: files[path] for path in unit.files if path in files}
    return {path: files[path] for path in found[0].files} if found else None
