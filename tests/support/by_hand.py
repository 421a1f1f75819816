"""FORMAT.md's own program as a judge: it reads with nothing of tierd's, and exits at what is wrong."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

_FORMAT = Path(__file__).parents[2] / "tierd" / "FORMAT.md"


def program() -> Any:
    """Its functions `read_sealed(path)` and `read_chunk(home, chunk)`: an error says what is wrong."""
    restoring = re.findall(r"```python\n(.*?)```", _FORMAT.read_text(), re.DOTALL)[0]
    found: Any = types.ModuleType("by_hand")
    functions, _, work = restoring.partition("\ndef read_origins(")
    assert work, "FORMAT.md's first program is no longer the one that restores"
    exec(functions, found.__dict__)
    return found
