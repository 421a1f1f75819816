"""`tierd.open`: reads a run's checkpoints from its tiers, without a spool, without a daemon, and without a write.

Law: nothing here puts or deletes an object. Every byte that is loaded was verified on this read.
"""

from __future__ import annotations

from tierd.core.errors import ConfigError

try:
    from tierd.reading.reader import Listed, Loaded, Reader, open
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("tierd"):
        raise
    raise ConfigError(f"tierd.open needs the package {error.name}: pip install 'tierd[torch,daemon]'") from error

__all__ = ["Listed", "Loaded", "Reader", "open"]
