"""The entry point of `tierd` and `python -m tierd`: the command line, or one line that says how to install it."""

from __future__ import annotations

import io
import signal
import sys


def main() -> int:
    """Run the command line and return the process's exit code."""
    if sys.argv[1:2] in (["run"], ["watch"]):
        # Held back until `serve` can handle them, because until then they end the daemon without a line.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    try:
        from tierd.cli import run
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("tierd"):
            raise
        from tierd.core.installation import install_command

        print(
            f"tierd: {error.name} is not installed; the command line needs: {install_command('daemon')}",
            file=sys.stderr,
        )
        return 3
    except (MemoryError, ImportError) as error:  # a library that cannot be mapped raises ImportError
        if isinstance(error, ImportError) and "memory" not in str(error) and "map segment" not in str(error):
            raise
        print(
            "tierd: no more memory for this process: raise its limit (ulimit -v, or the container's)", file=sys.stderr
        )
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the locale cannot encode are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    return run()


if __name__ == "__main__":
    sys.exit(main())
