"""A program of a layout that no table knows, beside a watch, a tier, `prepare` and `restore --into`.

The judge is written from the words of docs/explanation/watching.md and prepare.md. What is taken, and what comes
back, is byte for byte a save that the program finished, with all its files, of one step; a file without a step is one
that the program finished.
Nothing that the program finished and left alone is passed over without a report. `prepare` moves no file of a save that
is whole. Only `prepare` and `restore --into` write to the watched directory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path
from posixpath import dirname

from support.unknown_layouts import CHECKED, drawn
from support.unknown_program import PARTIAL, WHOLE, Files, UnknownProgram
from support.watched import SETTLE_S
from support.watched_nodes import content
from support.watched_run import RUN, flush, observed

from tierd.cli import run
from tierd.core.ids import CheckpointId, PartId
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool.commit import CommittedPart
from tierd.spool.spool import Spool
from tierd.watching.checkpoint_names import KnownCheckpoints, stepless_run

_OBSERVE_S = 5.0  # of simulated time between two looks
_CALM = 150  # looks at most after the program ended
_NOTHING_TELLS = "killed in a save, and nothing tells"


class Unkept(AssertionError):
    """A promise of the page was broken."""


def play(seed: int, home: Path) -> list[str]:
    """One history of a program; `home` is an empty directory.

    Returns:
        What happened, for the page.

    Raises:
        Unkept: something was lost, torn, a part for the whole, moved while good, or passed over without a word.
    """
    chance = random.Random(f"unknown {seed}")
    layout = drawn(chance)
    root = home / "out"
    root.mkdir()
    program = UnknownProgram(root, layout, chance)
    try:
        _Trial(program, home).play()
    except Unkept as error:
        raise Unkept(*error.args, layout) from None
    return [*program.acts, layout.shape]


class _Killed(BaseException):
    """The daemon was killed: nothing may handle it."""


class _Node:
    """The node that watches; it is killed at a sign of life that it gives while it takes, after `left` of them."""

    def __init__(self, program: UnknownProgram, spool: Spool, reports: _Reports, left: int) -> None:
        self.program, self.spool, self.reports, self.left = program, spool, reports, left
        self.watches = [self._watch(RUN)]
        self._known: dict[str, KnownCheckpoints] = {}
        self._taken = 0

    def observe(self) -> None:
        """List the directory as the daemon does, once for the run and once for all that has no step."""
        self._observe(RUN, self.watches[0])
        if self.watches[0].leaves_stepless or len(self.watches) > 1:
            self.watches = [*self.watches, self._watch(stepless_run(RUN))][:2]
            self._observe(stepless_run(RUN), self.watches[1])

    def _watch(self, run: str) -> UnitWatch:
        stepless = run != RUN
        return UnitWatch(
            self.spool, self.program.root, run, self.reports, settle_s=SETTLE_S, going=self._meddle, stepless=stepless
        )

    def _observe(self, run: str, watch: UnitWatch) -> None:
        if self._taken != len(self.reports.judge.taken):
            self._known, self._taken = {}, len(self.reports.judge.taken)
        if run not in self._known:
            self._known[run] = observed(self.spool, run)
        watch.observe(self._known[run], self.program.now_s)

    def _meddle(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Killed
        if not self.program.over and self.program.chance.random() < 0.03:
            self.program.acts["overtaken while it is taken"] += 1
            self.program.step()


class _Trial:
    def __init__(self, program: UnknownProgram, home: Path) -> None:
        self.program, self.home, self.chance = program, home, program.chance
        self.root, self.tier = program.root, home / "tier"
        self.judge = _Judge(program)
        self.node = self._daemon()

    def play(self) -> None:
        lives = self.chance.randint(1, 3)
        for number in range(lives):
            self.program.start()
            if number and self.chance.random() < 0.3:
                self._note("no daemon for a life")
                while not self.program.over:
                    self.program.step()
                self.node = self._daemon()
            self._watch()
            self.judge.nothing_passed_over()
            flush(self.node.spool, self.tier)
            self._between()

    def _daemon(self) -> _Node:
        spool = Spool(self.home / "spool")
        left = self.chance.choice((10**9, 10**9, self.chance.randint(0, 400)))
        return _Node(self.program, spool, self.judge.on(spool), left)

    def _watch(self) -> None:
        """Look while the program works, and until all has settled after it ended or was killed."""
        calm, look_s = 0, self.program.now_s
        while calm < 5 or (calm < _CALM and (self.judge.passed_over() or self.judge.not_taken())):
            look_s += _OBSERVE_S
            while not self.program.over and self.program.now_s < look_s:
                self.program.step()
            self.program.now_s = look_s = max(look_s, self.program.now_s)
            calm += self.program.over
            before, turn = self._state(), self.program.turns
            try:
                self.node.observe()
            except _Killed:
                self._note("daemon killed")
                self.node = self._daemon()
            if self.judge.broken:
                raise self.judge.broken[0]
            if self.program.turns == turn and self._state() != before:
                raise Unkept("the watch wrote to the directory")

    def _between(self) -> None:
        """What happens until the program is launched again."""
        act = self.chance.choice(("nothing", "prepare", "prepare", "flip", "lose", "lose", "lose and restore"))
        self._note(act)
        if act == "flip":
            act = "prepare" if self._flip() else "nothing"
        if act.startswith("lose"):
            shutil.rmtree(self.root)
            self.root.mkdir()
            self._restored("restore" if act.endswith("restore") else "prepare")
        elif act == "prepare":
            self._prepared()
        if self.chance.random() < 0.4:
            self.node = self._daemon()

    def _flip(self) -> bool:
        """Flip a bit of a file that was taken, as a disk does."""
        there = self.program.there()
        states = self.program.states(there)
        taken = [path for path in there if self.judge.was_taken(path, there[path]) and there[path]]
        taken = [path for path in taken if states.get(self.program.step_of.get(path, -1)) == WHOLE]
        if not taken:
            return False
        path = self.root / self.chance.choice(taken)
        before, data = path.stat(), bytearray(path.read_bytes())
        data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        if self.chance.random() < 0.5:  # else the spool's link shows the same blocks
            path.unlink()
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.judge.flipped = {str(path.relative_to(self.root)): bytes(data)}
        return True

    def _prepared(self) -> None:
        """`prepare` in a directory that was not lost."""
        before, flipped = self.program.there(), self.judge.flipped
        states = self.program.states(before)
        verdicts = self._command("prepare")
        after = self.program.there()
        whole = {path for path in before if states.get(self.program.step_of.get(path, -1)) == WHOLE}
        stepless = {path for path, data in before.items() if data in self.program.versions.get(path, ())}
        pointers = {path for path in stepless if self.program.is_pointer(path)}
        moved = {path for path in whole | (stepless - pointers) if after.get(path) != before[path]}
        if moved:
            raise Unkept("good files moved", sorted(moved), verdicts)
        left = {path for path, data in flipped.items() if after.get(path) == data}
        if left:
            raise Unkept("a flipped bit was left in place", sorted(left), verdicts)
        for path in flipped:
            step = self.program.step_of[path]
            is_apart = self.program.layout.shape != "wordless"  # else the copy may be older than what lies beside it
            if is_apart and self.program.states(after).get(step) != WHOLE:
                raise Unkept("a damaged checkpoint with a verified copy was not put back", path, verdicts)
        for step, state in states.items():
            paths = [path for path in before if self.program.step_of.get(path) == step]
            proven = any(path in self.program.torn and path.endswith(CHECKED) for path in paths)
            proven |= all(path.rpartition("/")[2].startswith(".") for path in paths)  # as a temporary file
            gone = any(path not in after for path in paths)
            was_taken = any(self.judge.was_taken(path, None) for path in paths)
            if state == PARTIAL and gone and not (proven or flipped or was_taken):
                raise Unkept("an unfinished save was moved without proof", sorted(paths), verdicts)
        self.judge.flipped = {}

    def _restored(self, command: str) -> None:
        """The directory was lost: the newest comes back."""
        verdicts = self._command(command) if self.judge.taken else None
        if verdicts is None:
            return
        there = self.program.there()
        derived = {path for path in there if self.program.is_pointer(path) and self.program.points_rightly(path, there)}
        self.judge.right({path: data for path, data in there.items() if path not in derived}, "comes back")
        newest = self.judge.newest
        if newest and not any(files.items() <= there.items() for files in newest):
            raise Unkept("the newest did not come back", sorted(newest[-1]), sorted(there), verdicts)
        stepless = [
            files
            for files in self.judge.taken
            if self.program.stepless & {self.program.name_of(path) for path in files}
        ]
        if stepless and not stepless[-1].items() <= there.items():
            raise Unkept("the newest without a step did not come back", sorted(stepless[-1]), sorted(there), verdicts)
        for path in there.keys() - self.program.step_of.keys():
            if self.program.is_pointer(path) and not self.program.leads(path, there):
                raise Unkept("a pointer came back that names nothing", path, there[path], verdicts)

    def _command(self, command: str) -> object:
        said, failed = io.StringIO(), io.StringIO()
        place = ["--run", RUN]
        arguments = [command, str(self.root), *place, "--to", str(self.tier), "--json"]
        if command == "restore":
            arguments = [command, str(self.tier), *place, "--into", str(self.root), "--json"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
            code = run(arguments)
        if code:
            raise Unkept(f"{command} ended with {code}", failed.getvalue())
        return json.loads(said.getvalue())

    def _state(self) -> dict[str, tuple[int, int, int]]:
        paths = (path for path in self.root.rglob("*"))
        return {
            str(path): (stat.st_size, stat.st_mtime_ns, stat.st_ino)
            for path in paths
            if (stat := path.lstat()) and not path.is_dir()
        }

    def _note(self, act: str) -> None:
        self.program.acts[act] += 1


class _Judge:
    """Compares what is taken, and what comes back, with what the program finished.

    Attributes:
        taken: the files of every part, as they were taken.
        reported: each path that `not taken` named.
        flipped: files with a flipped bit, and their content.
    """

    def __init__(self, program: UnknownProgram) -> None:
        self.program = program
        self.taken: list[Files] = []
        self.reported: dict[str, str] = {}
        self.flipped: Files = {}
        self.excused: list[Files] = []
        self.broken: list[Unkept] = []

    def on(self, spool: Spool) -> _Reports:
        return _Reports(self, spool)

    def was_taken(self, path: str, data: bytes | None) -> bool:
        return any(path in files and data in (None, files[path]) for files in self.taken)

    def right(self, files: Files, how: str) -> None:
        """Whether files are byte for byte whole saves that the program finished."""
        program, by_step = self.program, defaultdict[int, Files](dict)
        for path, data in files.items():
            if path in program.step_of:
                by_step[program.step_of[path]][path] = data
            elif path in program.begun:
                goal = program.begun[path]
                if goal in files and dirname(goal) == dirname(path):  # an earlier save left it beside the file itself
                    continue
                raise Unkept(f"a file under its temporary name {how}", path)
            elif path in program.versions:
                if data not in program.versions[path]:
                    raise Unkept(f"a file without a step {how}, and was never finished", path)
            elif not any(path.endswith("/" + name) or path == name for name in program.layout.noise):
                raise Unkept(f"a file {how} that nobody wrote", path)
        if program.layout.shape == "wordless":  # nothing says which number counts steps, so all of them are one
            files = {path: data for path, data in files.items() if path in program.step_of}
            torn = {path for path, data in files.items() if (path, data) not in program.whole} - program.torn
            if torn:
                raise Unkept(f"a torn file {how}", sorted(torn))
            return
        for step, save in by_step.items():
            if (step, save) not in program.finished and not self._nothing_tells(step, save):
                lacks = sorted({*program.layout.files(step)} - {*save})
                raise Unkept(f"a part for the whole {how}" if lacks else f"a torn save {how}", step, lacks)

    def _nothing_tells(self, step: int, save: Files) -> bool:
        """Whether a killed save looks as a whole one to everybody who does not know the program.

        That is so if no save beside it has a file that it lacks, and only files whose format is not known are cut.
        """
        if save in self.excused:  # before `torn`, which may tell of a later save of these paths
            return True
        if any(path in self.program.torn and path.endswith(CHECKED) for path in save):
            return False
        if {*save} != {*self.program.layout.files(step)} and self.others(step):
            return False
        self.excused.append(save)
        self.program.acts[_NOTHING_TELLS] += 1
        return True

    def others(self, step: int) -> list[int]:
        """The steps of whole saves in the directory."""
        return [one for one, state in self.program.states().items() if state == WHOLE and one != step]

    @property
    def newest(self) -> list[Files]:
        """What may come back: the newest that was taken, and what looked as newer."""
        order = [files for _, files in self.program.finished]
        stepped = [files for files in self.taken if any(path in self.program.step_of for path in files)]
        known = [files for files in order if any(files.items() <= one.items() for one in stepped)]
        return [*self.excused, *known[-1:]] if known or self.excused else self.taken[-1:]

    def passed_over(self) -> list[str]:
        """Files of whole saves, and without a step, that nothing took and nothing named."""
        program, there = self.program, self.program.there()
        states = program.states(there)
        missed = []
        for path, data in there.items():
            whole = states.get(program.step_of.get(path, -1)) == WHOLE
            whole = whole or (program.name_of(path) in program.stepless and data in program.versions[path])
            if whole and not self.was_taken(path, data) and not self._named(path):
                missed.append(path)
        return missed

    def _named(self, path: str) -> bool:
        """Whether a report names a file, its directory, another file of its save, or all that has no step there."""
        step = self.program.step_of.get(path) if self.program.layout.shape != "wordless" else None
        inside = [one for one, other in self.program.step_of.items() if other == step] if step is not None else [path]
        reported = [one for one in self.reported if step is None or not one.endswith("*")]
        heads = [one.removesuffix("*") if one.endswith("*") else f"{one}/" for one in reported]
        return any(one in reported or one.startswith(tuple(heads)) for one in inside)

    def nothing_passed_over(self) -> None:
        if missed := self.passed_over():
            raise Unkept("passed over without a report", missed, self.reported)
        if missed := self.not_taken():
            raise Unkept("a whole save was not taken", missed, self.reported)

    def not_taken(self) -> list[str]:
        """The files of a whole save that was not taken, but for a lone one that may be unfinished."""
        there = self.program.there()
        for step, state in self.program.states(there).items():
            paths = [path for path in there if self.program.step_of.get(path) == step]
            if self.program.layout.shape == "wordless" or (not self.others(step) and self._may_be_begun(paths)):
                continue
            if state == WHOLE and not all(self.was_taken(path, there[path]) for path in paths):
                return paths
        return []

    def _may_be_begun(self, paths: list[str]) -> bool:
        """Whether the report says that Trainer or Accelerate may have begun a lone save, as the page does."""
        return any("Trainer or Accelerate" in why for one, why in self.reported.items() if paths[0].startswith(one))


class _Reports:
    def __init__(self, judge: _Judge, spool: Spool) -> None:
        self.judge, self.spool = judge, spool

    def report_taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        """Whatever is raised here, the watch meets as an error of its own, and tries again."""
        try:
            self._taken(part, outcome)
        except Unkept as error:
            self.judge.broken.append(error)

    def _taken(self, part: PartId, outcome: CommittedPart | Exception) -> None:
        if not isinstance(outcome, CommittedPart):
            raise Unkept("it could not be taken", repr(outcome))
        files = content(self.spool, part)
        program = self.judge.program
        steps = {program.step_of[path] for path in files if path in program.step_of}
        if len(steps) > 1 and program.layout.shape != "wordless":
            raise Unkept("two steps are one checkpoint", part, sorted(files))
        if steps and program.layout.shape != "wordless" and part.checkpoint.step not in steps:
            raise Unkept("a number is the step that is none", part, sorted(files))
        self.judge.right(files, "is taken")
        self.judge.taken.append(files)

    def report_refused(self, path: str, why: str) -> None:
        self.judge.reported[path] = why

    def report_doubt(self, path: str, checkpoint: CheckpointId) -> None:
        self.judge.program.acts["in doubt"] += 1
