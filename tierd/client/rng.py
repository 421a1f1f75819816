"""Random number generators as one entry of the state.

Law: saving never creates what was not there: NumPy is not imported and CUDA is not initialised by asking for their
state.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from tierd.core.errors import StateMismatch


class RngState:
    """The process's global generators: Python, NumPy (if imported), torch CPU, and every CUDA device (if CUDA is in
    use).

    Put ``tierd.RngState()`` into the state. It holds nothing itself; it reads and sets the process's generators.
    """

    def state_dict(self) -> dict[str, Any]:
        """The generators' states now."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator that was saved.

        Raises:
            StateMismatch: another number of CUDA devices than when saved, or NumPy's state is there and NumPy is not.
                Nothing was set.
        """
        misfit = self.misfit(state_dict)
        if misfit:
            raise StateMismatch(f"random number generators: {misfit}")
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            np.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict:
            torch.cuda.set_rng_state_all(state_dict["cuda"])

    def misfit(self, state_dict: object) -> str | None:
        """Why `state_dict` cannot be loaded here; None if it can."""
        if not isinstance(state_dict, dict) or not {"python", "torch"} <= state_dict.keys():
            return "not the state of a RngState"
        if "cuda" in state_dict and len(state_dict["cuda"]) != torch.cuda.device_count():
            return f"saved with {len(state_dict['cuda'])} CUDA devices, this process sees {torch.cuda.device_count()}"
        if "numpy" in state_dict:
            try:
                import numpy  # noqa: F401
            except ImportError:
                return "saved with NumPy, which is not installed here"
        return None
