"""A program with habits that no table knows: it saves, removes old saves, rewrites its last one, and is killed.

Files are real; their times are simulated, so that a seed is a history. The program remembers every save that it
finished, and this is all that a judge asks.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support.unknown_layouts import CHECKED, Layout, content

Files = dict[str, bytes]
WHOLE, PARTIAL, GONE = "whole", "partial", "gone"


class UnknownProgram:
    """A directory, the program that writes there, and a clock that both share with the daemon.

    Attributes:
        finished: every save with a step that the program finished, in order.
        versions: of each file without a step, every content that the program finished.
        step_of: of each path of a save with a step, the step.
        begun: temporary paths, under which files lie while they are written, and the paths that they get.
        rested: since when no file was touched, seconds.
    """

    def __init__(self, root: Path, layout: Layout, chance: random.Random) -> None:
        self.root, self.layout, self.chance = root, layout, chance
        self.now_s, self.rested, self.over = 1000.0, 0.0, True
        self.finished: list[tuple[int, Files]] = []
        self.versions: dict[str, list[bytes]] = defaultdict(list)
        self.step_of: dict[str, int] = {}
        self.begun: dict[str, str] = {}
        self.torn: set[str] = set()  # files that were left in the middle of their write
        self.whole = set[tuple[str, bytes]]()  # files that were written to their end
        self.acts = Counter[str]()
        self.lives = self.turns = 0
        self._writer: Iterator[float] = iter(())

    # -- the judge's and the clock's ----------------------------------------------------------------------------------

    def start(self) -> None:
        """The program is launched, and resumes from the newest whole save that it finds."""
        self.lives += 1
        self.over = False
        self._writer = self._life()

    def step(self) -> None:
        """The program does one thing, and some time passes."""
        self.turns += 1
        pause_s = next(self._writer, None)
        if pause_s is None:
            self.over = True
            return
        self.now_s += pause_s

    def there(self) -> Files:
        """Every file and link of the program below the directory."""
        found: Files = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if not name.startswith(".tierd-") and (path.is_symlink() or path.is_file()):
                found[name] = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        return found

    def states(self, there: Mapping[str, bytes] | None = None) -> dict[int, str]:
        """Of each step with files in the directory, whether it is a save that the program finished."""
        by_step: dict[int, Files] = defaultdict(dict)
        for path, data in (self.there() if there is None else there).items():
            if path in self.step_of:
                by_step[self.step_of[path]][path] = data
        return {step: WHOLE if (step, files) in self.finished else PARTIAL for step, files in by_step.items()}

    @property
    def stepless(self) -> set[str]:
        """The names, below the layout's directory, of files without a step that are no pointers."""
        return {*self.layout.aside, *(self.layout.members if self.layout.shape == "stepless" else ())}

    def name_of(self, path: str) -> str:
        """A path below the layout's directory."""
        return path.removeprefix(self.layout.own)

    def is_pointer(self, path: str) -> bool:
        """Whether a file or link names the newest save."""
        return path in self.versions and self.name_of(path) not in self.stepless

    def leads(self, pointer: str, there: Files) -> bool:
        """Whether a pointer names what is there."""
        tops = {
            self.layout.top(step).removeprefix(self.layout.own) for path, step in self.step_of.items() if path in there
        }
        return any(top in there[pointer].decode() for top in tops)

    def points_rightly(self, pointer: str, there: Files) -> bool:
        """Whether a pointer has what the program writes to name a save that is there, also if it was killed before."""
        steps = {step for path, step in self.step_of.items() if path in there}
        return any(there[pointer] == self._pointing(self.name_of(pointer), step) for step in steps)

    # -- the program --------------------------------------------------------------------------------------------------

    def _life(self) -> Iterator[float]:
        """Train and save; perhaps be killed before any of it ends."""
        left = self.chance.choice((10**9, 10**9, self.chance.randint(1, 120)))
        for pause_s in self._whole_life():
            yield pause_s
            left -= 1
            if left < 0:
                self.acts["killed"] += 1
                return

    def _whole_life(self) -> Iterator[float]:
        whole = [step for step, state in self.states().items() if state == WHOLE]
        step = max(whole, default=0)
        for number in range(self.chance.randint(1, 5)):
            if number or self.chance.random() < 0.7:
                yield from self._train()
            step += self.layout.every
            yield from self._save(step)
        yield from self._train()

    def _train(self) -> Iterator[float]:
        for _ in range(self.chance.choice((3, 10, 14))):
            for name in self.layout.noise:
                self._noise(name)
            yield self.chance.choice((2.0, 4.0))

    def _noise(self, name: str) -> None:
        path = self.root / self.layout.own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(b"line\n")
        self._stamp(path)

    def _save(self, step: int) -> Iterator[float]:
        layout, paths = self.layout, self.layout.files(step)
        version = 0 if layout.same_again else self.lives
        files = {path: content(path, step, version) for path in paths}
        if layout.shape == "stepless":
            for path, data in files.items():
                if path.endswith("best.pt") and self.chance.random() < 0.5 and self.versions[path]:
                    continue
                yield from self._put(path, data, self._version(path, data))
            self.acts["saved"] += 1
            return
        slow = WHOLE in self.states().values() and layout.shape in ("directory", "nested") and len(paths) > 1
        slow_at = self.chance.randrange(1, len(paths)) if slow and self.chance.random() < 0.2 else None
        self.step_of |= dict.fromkeys(paths, step)
        if layout.clears:
            yield from self._remove(step)
        if layout.mode == "directory renamed":
            yield from self._save_and_rename(step, files)
        else:
            for number, (path, data) in enumerate(files.items()):
                if number == slow_at:
                    self.acts["slow between two files"] += 1
                    yield self.chance.choice((15.0, 40.0))
                ends = (lambda: self.finished.append((step, files))) if path == paths[-1] else None
                yield from self._put(path, data, ends)
        self.acts["saved"] += 1
        yield from self._after(step, files)

    def _save_and_rename(self, step: int, files: Files) -> Iterator[float]:
        top = self.layout.top(step)
        home, _, name = top.rpartition("/")
        away = f"{home}/{self.layout.temporary.format(name)}".removeprefix("/")
        shutil.rmtree(self.root / away, ignore_errors=True)
        for path, data in files.items():
            self.begun[path.replace(top, away, 1)] = path
            yield from self._put(path.replace(top, away, 1), data)
        shutil.rmtree(self.root / top, ignore_errors=True)
        (self.root / away).rename(self.root / top)
        self.finished.append((step, files))
        self.whole |= files.items()
        yield 0.1

    def _after(self, step: int, files: Files) -> Iterator[float]:
        """Pointers, files without a step, and the removal of old saves, in an order of chance."""
        acts = [self._point, self._aside, self._rotate]
        self.chance.shuffle(acts)
        for act in acts:
            yield from act(step)

    def _pointing(self, name: str, step: int) -> bytes:
        top = self.layout.top(step).removeprefix(self.layout.own)
        if name not in self.layout.pointers:
            return top.encode()  # a link
        return (f'{{"newest": "{top}"}}' if name.endswith(".json") else f"{top}\n").encode()

    def _point(self, step: int) -> Iterator[float]:
        top = self.layout.top(step).removeprefix(self.layout.own)
        for name in self.layout.pointers:
            if not name.startswith("link"):
                text = self._pointing(name, step)
                path = self.layout.own + name
                yield from self._put(path, text, self._version(path, text), renamed=True)
                continue
            path = self.layout.own + name.removeprefix("link ").format(ext=Path(top).suffix)
            there = self.root / (path + ".new")
            there.unlink(missing_ok=True)
            there.symlink_to(top)
            there.rename(self.root / path)
            self.versions[path].append(top.encode())
            yield 0.05

    def _aside(self, step: int) -> Iterator[float]:
        for name in self.layout.aside:
            if self.chance.random() < 0.7:
                path = self.layout.own + name
                data = content(path, step, self.lives)
                yield from self._put(path, data, self._version(path, data))

    def _version(self, path: str, data: bytes) -> Callable[[], None]:
        return lambda: self.versions[path].append(data)

    def _rotate(self, step: int) -> Iterator[float]:
        if self.layout.keep:
            old = sorted(one for one, state in self.states().items() if state == WHOLE and one <= step)
            for one in old[: -self.layout.keep]:
                self.acts["rotated"] += 1
                yield from self._remove(one)

    def _remove(self, step: int) -> Iterator[float]:
        paths = [path for path, one in self.step_of.items() if one == step and (self.root / path).is_file()]
        self.chance.shuffle(paths)
        for path in paths:
            (self.root / path).unlink()
            yield self.chance.choice((0.02, 0.02, 1.0))
        if self.layout.shape in ("directory", "nested", "wordless"):
            shutil.rmtree(self.root / self.layout.top(step), ignore_errors=True)
        elif self.layout.shape == "state beside" and paths:
            shutil.rmtree(self.root / f"{self.layout.own}{self.layout.name.format(step)}-state", ignore_errors=True)

    def _put(
        self, path: str, data: bytes, ends: Callable[[], None] | None = None, renamed: bool = False
    ) -> Iterator[float]:
        """Write a file in pieces, and call `ends` once it is whole."""
        goal, there = self.root / path, self.root / path
        goal.parent.mkdir(parents=True, exist_ok=True)
        if renamed or (self.layout.mode == "file renamed" and path not in self.begun):
            there = goal.with_name(self.layout.temporary.format(goal.name))
            self.begun[str(there.relative_to(self.root))] = path
        name = str(there.relative_to(self.root))
        self.torn.add(name)
        with there.open("wb") as file:
            self._stamp(there)
            yield 0.02
            pieces = self.chance.randint(1, 3)
            for number in range(pieces):
                file.write(data[len(data) * number // pieces : len(data) * (number + 1) // pieces])
                file.flush()
                self._stamp(there)
                if number < pieces - 1:
                    halts = path.endswith(CHECKED) and self.chance.random() < 0.05
                    yield 14.0 if halts else self.chance.choice((0.02, 0.02, 2.0))
        self.torn.discard(name)
        if there != goal:
            yield 0.02
            there.rename(goal)
            self.torn.discard(path)
        self.whole.add((path, data))
        if ends:
            ends()
        yield self.chance.choice((0.02, 0.02, 0.5, 3.0))

    def _stamp(self, path: Path) -> None:
        os.utime(path, ns=(0, int(self.now_s * 1e9)))
        self.rested = self.now_s
