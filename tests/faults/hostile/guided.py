"""Inputs found by coverage (atheris): `python -m faults.hostile.guided WHAT RUNS SEED CORPUS`, each a process.

Invariant: seeds from `FIRST` on are these processes', and say which reader it is: `faults hostile --only` repeats one.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys

from faults.rounds import Round

WHAT = ("manifest", "config", "header", "tree", "planes", "delta", "wire")
FIRST = 10**9
_RUNS = 2500  # inputs of a process: starting one takes longer
_STARTED = 10_000  # inputs of a round for each process that is started
_MODULES = [
    "tierd.core.manifest",
    "tierd.core.manifest_codec",
    "tierd.core.config",
    "tierd.state.tensor_file",
    "tierd.state.state_tree",
    "tierd.state.tree_parser",
    "tierd.state.value_kinds",
    "tierd.codec.byte_planes",
    "tierd.codec.element_deltas",
]


def missing() -> str | None:
    return None if importlib.util.find_spec("atheris") else "it is not installed: pip install atheris"


def run(work: Round) -> None:
    """Some processes, each with another reader; in a full round, all readers."""
    count = min(len(WHAT), max(1, work.trials // _STARTED))
    seeds = [FIRST + work.first + number for number in range(count)] if work.only is None else [work.only]
    for seed in seeds:
        what = WHAT[seed % len(WHAT)]
        corpus = work.room / f"guided-{what}"
        corpus.mkdir()
        command = [sys.executable, "-m", "faults.hostile.guided", what, str(_RUNS), str(seed - FIRST), str(corpus)]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=900)
        if ended.returncode or f"Done {_RUNS} runs" not in ended.stderr:
            work.lost(seed, f"atheris, {what}: {ended.stderr[-3000:]}", _RUNS)
        else:
            work.passed(_RUNS, *[f"input: atheris, {what}"] * _RUNS)


def main() -> None:
    import atheris

    what, runs, seed, corpus = sys.argv[1:]
    with atheris.instrument_imports(include=_MODULES, enable_loader_override=False):
        from tierd.codec import byte_planes, element_deltas
        from tierd.core.config import from_toml
        from tierd.core.manifest_codec import decode
        from tierd.ipc import message_codec, messages
        from tierd.state.tensor_header import parse_layout
        from tierd.state.tree_parser import parse_tree
    import msgspec
    from faults.hostile import readers
    from support.by_hand import seal

    from tierd.core.errors import ConfigError, FormatTooNew, ManifestError, StateMismatch

    def config(data: bytes) -> object:
        return from_toml(data.decode("utf-8", "replace"), "x")

    given: dict[str, tuple[object, bytes]] = {
        "manifest": (
            lambda data: decode(seal(data or b"}")),
            json.dumps(readers.MANIFEST).encode(),
        ),
        "config": (config, readers.CONFIG.encode()),
        "header": (lambda data: parse_layout(bytearray(data)), readers.LAYOUT.header + bytes(8)),
        "tree": (
            lambda data: parse_tree(data, readers.STORED.__getitem__),
            json.dumps(readers.TREE).encode(),
        ),
        "delta": (lambda data: element_deltas.apply_delta(data, readers.RAW), readers.DELTA),
        "planes": (lambda data: byte_planes.unpack(data, len(readers.RAW)), readers.PACKED),
        "wire": (message_codec.decode_request, messages.encode_line(readers.REQUESTS[4])),
    }
    read, first = given[what]
    with open(f"{corpus}/first", "wb") as file:
        file.write(first)
    allowed = (ConfigError, FormatTooNew, ManifestError, StateMismatch, ValueError, msgspec.DecodeError)

    def one(data: bytes) -> None:
        readers.only(lambda: read(data), *allowed)  # type: ignore[operator]

    random.seed(int(seed))
    options = [f"-runs={runs}", f"-seed={int(seed) + 1}", "-timeout=120", "-rss_limit_mb=2048", "-max_len=8192"]
    options.append(f"-artifact_prefix={corpus}/")  # what it found is in what it says, too
    atheris.Setup([sys.argv[0], *options, corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
