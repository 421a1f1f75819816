"""List the private names that tests patch, because such a test fails when the code moves and promises nothing.

`make lint` runs it. A test patches a name by `monkeypatch.setattr`, `mock.patch` or an assignment, or it hands the name
to a helper beside `monkeypatch`. A test may instead give a parameter or the fields of timings or limits, replace a
function of a library, or ask through the public API. `ALLOWED` has the rest, each with the reason.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 20  # entries of `ALLOWED`

# The file, and the name that it patches -> why no public way does.
ALLOWED = {
    "tests/client/ranks/test_ranks_on_nodes.py: _decoder": "a daemon of an older version, which knows fewer requests",
    "tests/client/saving/test_failing_save.py: _attach": "attaching takes its time only after the launch was named",
    "tests/client/saving/test_failing_save.py: _to": "so that the launch is named before a daemon is asked",
    "tests/dcp/test_metadata.py: _StorageInfo": "torch's own class, of which an older torch had fewer members",
    "tests/client/saving/test_device_copies.py: _foreach_copy_": "torch's own function, to see how it is called",
    "tests/state/kinds/test_rng.py: _lazy_init": "torch's own function, which nothing may call",
    "tests/state/test_load.py: _load_from_state_dict": "torch's own hook, which modules of libraries replace",
    "tests/faults/corruption/histories.py: _FEW": "a thousand manifests in each history would take minutes",
    "tests/faults/disk/node.py: _SPARE": "a kit's disk has less than the room that a fetch leaves free",
    "tests/faults/disk/node.py: _failed": "a kit notes when a worker failed, which no event says so early",
    "tests/faults/s3/__init__.py: _RELIST": "a kit's life is shorter than the time until a daemon lists chunks again",
    "tests/faults/simulation/life.py: _MARGIN": "a simulated disk has less than the room that a save asks for besides",
    "tests/test_supply.py: _declared": "what is declared is remembered, and other tests ask for what is installed",
    "tests/support/attached.py: _copy_tensors": "a save's copies of single tensors are held up; there is no seam",
    "tests/support/preemption_fixtures.py: _detected": "tests must not ask the metadata server of a machine in a cloud",
    "tests/watching/test_import_bucket.py: _download": "the bucket changes between two requests of one checkpoint",
    "tests/watching/test_other_watches.py: _record": "a spool whose lock another node cannot see",
    "tests/watching/test_watch_ends.py: _END_S": "the wait for a dead mount is no field of DaemonTimings yet",
}
_TORCHS = "_metadata"  # an attribute that torch gives to every `state_dict()`
_FORMS = ("setattr", "delattr", "patch", "object")
_GIVEN = ("monkeypatch", "patch")


_DOTTED = re.compile(r"tierd(\.\w+)*\.(_[A-Za-z]\w*)")


def _is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__") and last.isidentifier() and last != "_"


def _of_call(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = any(isinstance(it, ast.Name) and it.id in _GIVEN for it in call.args)
    if name in _FORMS or given:
        for it in call.args:
            text = it.value if isinstance(it, ast.Constant) and isinstance(it.value, str) else ""
            if _is_private(text) and not _DOTTED.fullmatch(text):
                yield text.rpartition(".")[2]


def _of_assignment(targets: list[ast.expr], own: set[str]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Attribute) and _is_private(target.attr) and target.attr not in {*own, _TORCHS}:
            yield target.attr


def patched(source: str) -> list[tuple[int, str]]:
    """The private names that a module patches, each with its line. The module's own classes' attributes are not."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {
        it.attr
        for it in nodes
        if isinstance(it, ast.Attribute) and isinstance(it.value, ast.Name) and it.value.id == "self"
    }
    found = []
    for node in nodes:
        match node:
            case ast.Call():
                names = _of_call(node)
            case ast.Assign(targets=targets):
                names = _of_assignment(targets, own)
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                names = _of_assignment([target], own)
            case ast.Constant(value=str(text)) if name := _DOTTED.fullmatch(text):
                names = iter([name[2]])
            case _:
                continue
        found += [(node.lineno, name) for name in names]
    return sorted(found)


def findings() -> list[str]:
    """All of every module of tests/ that `ALLOWED` does not have, and its entries that are not needed any more."""
    found = [
        (f"{path.relative_to(ROOT)}", line, name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in patched(path.read_text())
    ]
    known = {f"{path}: {name}" for path, _, name in found}
    return [
        *(
            f"{path}:{line}: {name} is patched, which is private: give a parameter, a timing or a limit, or replace a "
            "function of a library; tools/patches.py says more"
            for path, line, name in found
            if f"{path}: {name}" not in ALLOWED
        ),
        *(f"tools/patches.py: {entry}: is not patched any more" for entry in ALLOWED if entry not in known),
        *([f"tools/patches.py: {len(ALLOWED)} are allowed, {MOST} at most"] if len(ALLOWED) > MOST else []),
    ]


def main() -> None:
    """Print each finding; exit 1 if there is one."""
    sys.exit("\n".join(findings()) or None)


if __name__ == "__main__":
    main()
