"""A script of a test, in a process that is forked from one that has loaded torch, which takes 1.5 CPU seconds."""

from __future__ import annotations

from support.nursery import context


def run_script(script: str, timeout_s: float = 150.0) -> int:
    """Run a script as `__main__` to its end.

    Args:
        script: Python. Unlike an interpreter that ends, it calls nothing that `atexit` registered.
        timeout_s: how long to wait for its end.

    Returns:
        The exit code: negative for a signal that killed it, 1 after an exception, whose traceback is on stderr.
    """
    process = context.Process(target=_run, args=(script,))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the script did not end in {timeout_s:g} s:\n{script}")
    return process.exitcode


def _run(script: str) -> None:
    exec(compile(script, "<script of a test>", "exec"), {"__name__": "__main__"})
