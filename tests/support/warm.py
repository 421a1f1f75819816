"""Scripts in processes that are forked from an interpreter that has imported what they import, because importing torch
or a framework takes longer than what most of them do.

A fork is as fresh as an interpreter but for the order of hashes, which all of one interpreter share: loops of
`tests/loaders` that are launched without forks would show a resume that hangs on it.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

_HEAVY = {
    *("accelerate", "deepspeed", "jax", "keras", "lightning", "megatron", "numpy", "orbax", "peft", "tierd", "torch"),
    *("torch_checkpointing", "torchdata", "torchtitan", "transformers"),
}


class WarmInterpreter:
    """An interpreter that has imported what scripts need, and forks for each script.

    Args:
        imports: the statements, such as `heavy_imports` of a script.
        environment: of the interpreter and of its forks.
    """

    def __init__(self, imports: str, environment: Mapping[str, str]) -> None:
        here = str(Path(__file__).parents[1])
        path = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), here])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.warm"],
            env={**environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ask(imports=imports)

    def __enter__(self) -> WarmInterpreter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, script: str, arguments: Sequence[str], output: Path) -> int:
        """Run a script as `__main__` in a session of its own; its output goes to `output`, and errors to `output`.err.

        Returns:
            The process id, which is also that of its group.
        """
        return int(self._ask(script=script, arguments=list(arguments), output=str(output)))

    def wait(self, process: int, timeout_s: float) -> int:
        """Wait for the end of a process, and kill its group after `timeout_s`.

        Returns:
            The exit status, as `Popen.returncode`.
        """
        descriptor = os.pidfd_open(process)
        try:
            select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # also what it started and left
        return int(self._ask(wait=process))

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def heavy_imports(script: str) -> str:
    """The imports of large packages in a script, also those in its functions, and what its first optimizer loads."""
    statements = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Import | ast.ImportFrom)]
    packages = {
        node: node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in statements
    }
    heavy = [ast.unparse(node) for node in statements if packages[node].split(".")[0] in _HEAVY]
    return "\n".join([*heavy, *(["import torch._dynamo"] if "optim" in script else [])])


def make_imports(statements: str) -> None:
    """Import these, and what the first `Checkpointer` loads."""
    with suppress(ImportError):  # the script says so
        exec(statements, {})
    if "tierd" in sys.modules:
        importlib.import_module("tierd.client.checkpointer")


def _run(script: str, arguments: list[str], output: str) -> NoReturn:
    """Run a script in this process, which was forked for it; what it raises ends the interpreter as usual."""
    os.setsid()
    for descriptor, name in ((1, output), (2, f"{output}.err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    faulthandler.enable()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as an interpreter that begins; `random` does so by itself
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(script, "<script of a test>", "exec"), vars(sys.modules["__main__"]))
    sys.exit()


def main() -> None:
    answers, running = os.fdopen(os.dup(1), "w"), set[int]()
    os.dup2(2, 1)  # what an import prints is no answer
    while line := sys.stdin.readline():
        request = json.loads(line)
        answer = 0
        if "imports" in request:
            make_imports(request["imports"])
            gc.collect()
            gc.freeze()
        elif "script" in request:
            answer = os.fork()
            if not answer:
                answers.close()
                _run(**request)
            running.add(answer)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            running.discard(request["wait"])
        answers.write(f"{answer}\n")
        answers.flush()
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
