"""Call back before the first forward pass that trains, and before the first backward pass, after a moment.

Invariant: a process that was forked from this one, and code that torch compiles or traces, is left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from tierd.check.imported import once_imported


class Passes:
    """Waits for the passes after a step, and for loads of weights and optimizers.

    A load of weights alone counts until the first backward pass, because later it may be a step's: of a target network.

    Attributes:
        forward: the step after which the next forward pass calls back; None if none does.
        backward: the same for the next backward pass.
    """

    def __init__(
        self, on_forward: Callable[[int], None], on_backward: Callable[[int], None], on_load: Callable[[], None]
    ) -> None:
        self.forward: int | None = None
        self.backward: int | None = None
        self._on_forward, self._on_backward, self._on_load = on_forward, on_backward, on_load
        self._pid = os.getpid()
        self._went_back = False

    def install(self) -> None:
        """Begin to watch torch's passes and loads as soon as it is imported."""
        once_imported(
            {
                "torch.nn.modules.module": self._watch_modules,
                "torch.optim.optimizer": lambda module: self._watch_load(module.Optimizer, True),
                "torch.autograd": self._watch_backward,
            }
        )

    def _watch_modules(self, module: Any) -> None:
        self._watch_load(module.Module, False)
        module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, *_: Any) -> None:
        torch: Any = sys.modules["torch"]
        # A forward pass without gradients is an evaluation, which may come before the step's batch is fetched.
        if torch.compiler.is_compiling() or self.forward is None or not torch.is_grad_enabled():
            return
        if os.getpid() == self._pid and not torch.jit.is_tracing():
            after, self.forward = self.forward, None
            self._on_forward(after)

    def _watch_backward(self, module: Any) -> None:
        backward = module.backward

        @wraps(backward)
        def going_back(*args: Any, **kwargs: Any) -> Any:
            self._went_back = True
            if self.backward is not None and os.getpid() == self._pid:
                after, self.backward = self.backward, None
                self._on_backward(after)
            return backward(*args, **kwargs)

        module.backward = going_back

    def _watch_load(self, kind: Any, always: bool) -> None:
        load = kind.load_state_dict

        @wraps(load)
        def loading(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            if always or not self._went_back:
                self._on_load()
            return result

        kind.load_state_dict = loading
