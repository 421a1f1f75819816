"""What to install for a part of tierd whose packages are optional."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needing(feature: str, extras: str) -> Iterator[None]:
    """Run imports of which some are of optional packages.

    Args:
        feature: the part of tierd that needs them.
        extras: tierd's extras that install them.

    Raises:
        ImportError: a package is not installed; the message names it and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tierd"):
            raise
        raise ImportError(
            f"{feature} needs the package {error.name}: pip install 'tierd[{extras}]'", name=error.name
        ) from error
