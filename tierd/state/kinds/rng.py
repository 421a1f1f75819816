"""The process's random number generators as one entry of the state.

Invariant: a save creates no generator: it does not import NumPy or initialise CUDA to read their states.
"""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch

from tierd.core.errors import StateMismatch

log = logging.getLogger("tierd")


class RngState:
    """The process's global generators: Python, NumPy, torch CPU, and every CUDA device.

    NumPy is included if it is imported, CUDA if it is in use.
    Put ``tierd.RngState()`` into the state. It holds nothing itself; it reads and sets the process's generators.

    If a process sees as many CUDA devices as the process that saved, the generators of all are restored, by device
    number. In any case its current device receives the state of the device that was current at the save. The reason is
    that a rank's device may have another number, or may be the only one that the process sees. A process without CUDA
    restores no CUDA generator.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' current states."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
            state["cuda_device"] = torch.cuda.current_device()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every saved generator.

        Raises:
            StateMismatch: NumPy's state was saved, but NumPy is not installed. Or the checkpoint has several devices'
                states but no number of the current device, and this process sees only some devices. Nothing was set.
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
            _set_cuda(state_dict["cuda"], state_dict.get("cuda_device"))

    def misfit(self, state_dict: object) -> str | None:
        """Return why `state_dict` cannot be loaded here; None if it can."""
        if not isinstance(state_dict, dict) or not {"python", "torch"} <= state_dict.keys():
            return "not the state of a RngState"
        if "cuda" in state_dict and (reason := _cuda_misfit(state_dict["cuda"], state_dict.get("cuda_device"))):
            return reason
        if "numpy" in state_dict:
            try:
                import numpy  # noqa: F401
            except ImportError:
                return "saved with NumPy, which is not installed here"
        return None


def _cuda_misfit(states: object, current: object) -> str | None:
    if not isinstance(states, list) or not (current is None or (type(current) is int and 0 <= current < len(states))):
        return "the CUDA devices' states are not what RngState gives"
    device_count = torch.cuda.device_count()
    if current is None and len(states) > 1 and device_count not in (0, len(states)):
        return (
            f"saved with {len(states)} CUDA devices, this process sees {device_count}, and the checkpoint does not say "
            "which was in use: show as many to this process (CUDA_VISIBLE_DEVICES), or leave RngState out"
        )
    return None


def _set_cuda(states: list[torch.Tensor], current: int | None) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == len(states):
        torch.cuda.set_rng_state_all(states)
    elif devices == 0:
        log.warning("generators of %d CUDA devices are left out: this process sees none", len(states))
    if devices and states and (devices != len(states) or (current is not None and torch.cuda.is_initialized())):  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states[current or 0])  # of the current device
