"""`tierd` and `python -m tierd`: the command line, or one line on how to install it."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; the process's exit code."""
    try:
        from tierd.cli import run
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("tierd"):
            raise
        print(
            f"tierd: {error.name} is not installed; the command line needs: pip install 'tierd[daemon]'",
            file=sys.stderr,
        )
        return 3
    return run()


if __name__ == "__main__":
    sys.exit(main())
