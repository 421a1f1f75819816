"""The command that installs tierd's optional packages, as messages and pages show it.

On a release set `SOURCE`, and run `make reference`.
"""

from __future__ import annotations

SOURCE = "."  # where pip takes tierd from: a checkout; "tierd" once the package is on the package index


def install_command(extras: str) -> str:
    """The pip command that installs `extras`, such as `"s3,crypt"`, and where to type it."""
    return f"pip install '{SOURCE}[{extras}]'" + (" in a checkout of tierd" if SOURCE == "." else "")
