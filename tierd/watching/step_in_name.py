"""Read the training step from the name of a file or directory that another program wrote.

Invariant: a rank, a number of shards, a date, a fraction and a digest are no step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

# The endings of files that hold weights or states; also those whose format is not known to `formats`.
WEIGHT_ENDINGS = (
    *(".pt", ".pth", ".th", ".ckpt", ".bin", ".pkl", ".pickle", ".npz", ".npy", ".safetensors", ".distcp", ".tar"),
    *(".zip", ".keras", ".h5", ".hdf5", ".msgpack", ".pdparams", ".pdopt", ".pdstates", ".gguf", ".ggml", ".nemo"),
    *(".onnx", ".pb", ".params", ".states", ".model", "_model", ".weights", ".joblib", ".ubj", ".cbm", ".mdlus"),
    *(".meta", ".state", ".torch", ".t7", ".pyt", ".caffemodel", ".solverstate"),
)
_ENDING = re.compile(r"(\.weights)?({}|\.gz)+$".format("|".join(map(re.escape, WEIGHT_ENDINGS))))
# The rank, the number of ranks or a shard's number, as the programs in `programs` and others write them.
RANK = re.compile(
    r"(?:[-_.]?(?:mp_|dp_|tp_|pp_|zero_pp_|fsdp_)?(?:global_|local_)?rank|[-_.]?world_size|[-_.]?shard|[-_.]?part"
    r"|[-_.]?(?:data|tensor|pipeline|expert)_parallel|[-_.]?gpu|[-_.]?worker)"
    r"[-_=.]?(?:\d+|\*)(?:[-_]of[-_]\d+)?|[-_.]?\d+-of-\d+",
    re.IGNORECASE,
)
_DATE = re.compile(r"(?<!\d)(?:19|20)\d\d(?:-\d\d-\d\d|_\d\d_\d\d|(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01]))(?!\d)")
_FRACTION = re.compile(r"[-_=]?(?:[A-Za-z][\w/]*=)?-?\d+\.\d+(?:e[+-]?\d+)?(?![\d])")
# The first two also stand before a date.
_WORDS = ("step", r"ba|iter(?:ation)?|e\d+_b", "checkpoint|ckpt|chkpnt|chkpt|snapshot", "epoch|ep")
_WORD_PATTERNS = tuple(
    re.compile(rf"(?<![A-Za-z])(?:[A-Za-z]+[-_])*?(?:{word})s?[-_=.]?(\d+)(?![A-Za-z\d])", re.IGNORECASE)
    for word in _WORDS
)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LAST_NUMBER = re.compile(r"(?:[-_=]|(?<!\d)\.|\.v|^|(?<=[A-Za-z])(?=\d{5}))(\d+)(?:[-_][A-Za-z]+)*$")
_UPDATES = re.compile(
    r"(.*?(?<![A-Za-z])(?:checkpoint|ckpt|chkpnt|chkpt|snapshot|epoch|ep)s?[-_=.]?)(\d{1,8})[-_](\d{1,8})",
    re.IGNORECASE,
)

# A name without such an ending that has the number of a save, as `g_00005000` or `ckpt.7`.
_NUMBERED = re.compile(
    r"(?:^|.*[-_.])(?:ckpt|checkpoint|snapshot|step|iter|epoch|ep)[-_.=]?\d+(?:\.gz)?|[A-Za-z]+_\d{4,}"
)


_LOG = re.compile(r"events\.out\.tfevents\..*|.*\.(log|csv|jsonl|out|err)|(.*[-_.])?logs?([-_.].*)?\.txt")


def is_log(name: str) -> bool:
    """Whether a file's name is one of a log, which changes for as long as its program runs."""
    return _LOG.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    return name.endswith(WEIGHT_ENDINGS) or _NUMBERED.fullmatch(name) is not None


def is_best(path: str) -> bool:
    """Return whether a path says that it is of the best checkpoint, which is not written in each save."""
    return "best" in path.lower()


@lru_cache(1 << 14)  # because each look at a directory asks for the names of all files of weights below a number
def step_in(name: str) -> int | None:
    """Return the step in a name: the number after a word such as "step" or "epoch", else the last number in it."""
    counted = _COUNTED_SAVE.search(bare := _strip_name(name))
    return _number(
        _step_after_word(name) or (counted if counted and counted[1] != "weight" else _LAST_NUMBER.search(bare))
    )


def directory_step(name: str) -> int | None:
    """Return the step in a directory's name, if a word such as "step" says so, or nothing but a number is there.

    Another number may be that of a run, a version or a fold, whose directory holds many checkpoints.
    """
    return _number(
        _step_after_word(name)
        or re.fullmatch(r"(\d+)(?:[-_](?:checkpoint|ckpt))?|.+[-_](\d+)[-_]states?", _strip_name(name))
    )


_COUNTED_SAVE = re.compile(r"(?<![A-Za-z])(weight|update|save|backup|round)s?[-_]?(\d+)(?![A-Za-z\d])", re.IGNORECASE)


def counted_step(name: str) -> int | None:
    """Return the number of a directory that is a save where it lies among others, as `weights_3` and `DATE-backup-100`.

    Within a checkpoint such names are of its parts.
    """
    return _number(_COUNTED_SAVE.search(_strip_name(name)))


_PLACE_OF_SAVES = re.compile(r"(\w+[-_])?(saves|checkpoints|ckpts|chkpts|snapshots)", re.IGNORECASE)


def is_place_of_saves(name: str) -> bool:
    """Return whether a directory's name is a date, or a word for several saves."""
    return _DATE.search(name) is not None or _PLACE_OF_SAVES.fullmatch(name) is not None


def are_saves(names: Iterable[str]) -> bool:
    """Return whether names beside each other are of several saves: alike but for a date or a step.

    Of plain numbers only large ones are certain, or three and more at equal distances: members of an ensemble, layers
    and resolutions have small ones.
    """
    dated, worded, plain = dict[str, set[str]](), dict[str, set[str]](), dict[str, set[str]]()
    for name in names:
        match = _step_after_word(name)
        kind = dated if _DATE.search(name) else plain if match is None or match.re is _WORD_PATTERNS[2] else worded
        match = match or _LAST_NUMBER.search(_strip_name(name))
        value = name if kind is dated else match[match.lastindex or 0] if match else None
        if value is not None:
            kind.setdefault(without_numbers(name), set()).add(value)
    if any(len(values) > 1 for values in (*dated.values(), *worded.values())):
        return True
    return any(_are_steps(sorted(map(int, values))) for values in plain.values())


def _are_steps(numbers: Sequence[int]) -> bool:
    distances = {after - before for before, after in pairwise(numbers)}
    return bool(distances) and (numbers[0] >= 1000 or (numbers[0] >= 100 and len(numbers) > 2 and len(distances) == 1))


def steps_beside(names: Iterable[str]) -> dict[str, int]:
    """Return the steps of names that end with a rank, as `state_00000100_00001` beside `model_00000100` does.

    The step of such a name is a number of four digits or more that is the only one of a name beside it, and the last
    numbers behind that count from 0 or 1.
    """
    numbers = {name: re.findall(r"\d+", _strip_name(name)) for name in names if _step_after_word(name) is None}
    alone = {parts[0] for parts in numbers.values() if len(parts) == 1 and len(parts[0]) > 3}
    ranked: dict[str, dict[str, list[str]]] = {}
    for name, digits in numbers.items():
        if len(digits) > 1 and digits[-1] not in alone and digits[-2] in alone:
            ranked.setdefault(digits[-2], {})[name] = digits
    steps = dict[str, int]()
    for step, of_step in ranked.items():
        ranks = {int(parts[-1]) for parts in of_step.values()}
        if min(ranks) in (0, 1) and max(ranks) - min(ranks) + 1 == len(ranks):
            steps |= dict.fromkeys(of_step, int(step))
    return steps


def updates_beside(names: Iterable[str]) -> dict[str, int]:
    """Return the steps of names that have an epoch and the number of updates, as fairseq's `checkpoint_1_500.pt`.

    The last number is the step if an epoch has several of them, and it grows with the epochs. Ranks do not: several
    steps have the same, and they follow each other without a gap.
    """
    numbers: dict[str, dict[str, tuple[int, int]]] = {}
    for name in names:
        if match := _UPDATES.fullmatch(_strip_name(name)):
            numbers.setdefault(match[1], {})[name] = int(match[2]), int(match[3])
    steps = dict[str, int]()
    for pairs in numbers.values():
        order = sorted({*pairs.values()})
        grows = all(before[1] < after[1] for before, after in pairwise(order))
        has_gap = any(before[0] == after[0] and before[1] + 1 < after[1] for before, after in pairwise(order))
        if grows and has_gap and all(epoch < updates for epoch, updates in order):
            steps |= {name: updates for name, (_, updates) in pairs.items()}
    return steps


def names_beside(names: Mapping[str, int | None]) -> dict[str, int]:
    """Return the steps of names that begin with one that has a step: `net.1000.optim.pt` beside `net.1000.model.pt`."""
    stems = {without_ending(name): step for name, step in names.items() if step is not None}
    steps = dict[str, int]()
    for name in (name for name, step in names.items() if step is None):
        stem = re.sub(r"(\.[A-Za-z_]+)+$", "", without_ending(name))
        step = stems.get(stem)
        if step is not None and stem.endswith(str(step)):
            steps[name] = step
    return steps


def without_step(name: str) -> str:
    """Return a name with a mark in the place of its step: the checkpoints of one series share it."""
    match = _step_after_word(name) or _LAST_NUMBER.search(_strip_name(name))
    ranks = [rank.span() for rank in RANK.finditer(name)]
    for number in re.finditer(rf"(?<!\d){match[1]}(?!\d)", name) if match else ():
        if not any(first <= number.start() < end for first, end in ranks):
            return f"{name[: number.start()]}#{name[number.end() :]}"
    return name


_KEPT_NUMBERS = re.compile(
    rf"{RANK.pattern}|(?:agent|fold|seed|member|expert|stage|node)[-_.=]?\d+|\d+(?:\.\d+)?[bm](?![A-Za-z])",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_STEP_OF_AGENT = re.compile(r"(?:agent|member|expert|stage|node)[-_.=]?(\d{3,})", re.IGNORECASE)
_LAUNCH = re.compile(
    r"(?:19|20)\d\d[-_.]?\d\d[-_.]?\d\d(?:[-_T]\d{4,6})?(?!\d)|(?<!\d)\d\d[-_:]\d\d(?:[-_:]\d\d)?(?!\d)|\d{9,}"
    r"|(?<![A-Za-z])(?:version|run|launch|attempt|try|job|exp|experiment|train)[-_.=]?\d+(?:[-_T]\d{4,6}(?!\d))?",
    re.IGNORECASE,
)


def without_launch(name: str) -> str:
    """Return a directory's name with a mark in the place of each number that a program counts its launches by, or of a
    time. Other numbers may tell runs apart that train beside each other, as seeds do.
    """
    return _LAUNCH.sub(lambda match: _ANY_NUMBER.sub("#", match[0]), name)


_RUN_ENDS = re.compile(r"(?<![A-Za-z])(final|last|latest|best)(?![A-Za-z])", re.IGNORECASE)


def are_ends_of_run(names: Iterable[str], number: str) -> bool:
    """Return whether all files of weights without a step, below a directory of this number, are a run's last or best.

    Then the number is a seed's. From 1000 on it is a step, and so it is if other weights lie there.
    """
    if int(number) >= 1000:
        return False
    ends = [_RUN_ENDS.search(name) is not None for name in names if is_weights(name) and step_in(name) is None]
    return bool(ends) and all(ends)


def is_name_of_run(name: str, number: str) -> bool:
    """Return whether a name says that a directory of this number above it is no step, but of a run with saves."""
    if is_place_of_saves(name) or _step_after_word(name) is not None:
        return True
    step = step_in(name) if is_weights(name) else None
    if step is None:
        return False
    return (step >= 1000 and step != int(number)) or (_strip_name(name).isdecimal() and step > int(number))


def without_numbers(name: str) -> str:
    """Return a name with a mark in the place of each number, but of those that tell ranks, folds or models apart.

    `agent_400.pth` is no 400th agent, but one that was saved at step 400.
    """
    spans = [match.span() for match in _KEPT_NUMBERS.finditer(name)]
    if (match := _STEP_OF_AGENT.fullmatch(without_ending(name))) and is_weights(name):
        spans = [span for span in spans if span[1] <= match.start(1)]

    def marked(match: re.Match[str]) -> str:
        return match[0] if any(first <= match.start() < end for first, end in spans) else "#"

    return _ANY_NUMBER.sub(marked, name)


def without_ending(name: str) -> str:
    return _ENDING.sub("", name)


def _strip_name(name: str) -> str:
    name = RANK.sub("", without_ending(name))
    return _FRACTION.sub("", _DATE.sub("", name)).rstrip("-_.")


def _step_after_word(name: str) -> re.Match[str] | None:
    if _DIGEST.fullmatch(name):  # it may have `ba` before its last digits
        return None
    unranked, bare = RANK.sub("", name), _strip_name(name)
    names = (unranked, unranked, bare, bare)
    return next(
        (match for pattern, text in zip(_WORD_PATTERNS, names, strict=True) if (match := pattern.search(text))), None
    )


def _number(match: re.Match[str] | None) -> int | None:
    digits = match[match.lastindex or 0] if match else ""
    return int(digits) if 0 < len(digits) < 19 else None
