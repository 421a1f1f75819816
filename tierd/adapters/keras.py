"""Keras 3 on the torch backend saves and resumes through tierd.

    saving = tierd.adapters.keras.TierdCallback(ckpt, every_batches=100, data=loader)
    model.fit(loader, epochs=10, callbacks=[saving])

Weights, optimizer, metrics, seed generators and the process's generators are saved at the end of every epoch, and of
every `every_batches`-th batch; `fit` called again in another process goes on there (it needs no `initial_epoch`).

What is exact: after an epoch's end, always. In the middle of one `fit` cannot skip, so:

- with `data`, the torchdata `StatefulDataLoader` that `fit` reads, it goes on with the very next batch. Its order may
  hang on the epoch alone (a sampler's `set_epoch` is called): `fit` iterates a loader more often than it reads it;
- without, the epoch begins again, with what was learned so far: its samples up to there are seen twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tierd.adapters import framework
from tierd.client.rng import RngState
from tierd.core.errors import ConfigError, StateMismatch

if TYPE_CHECKING:
    from tierd.client.checkpointer import Checkpointer

_keras = framework("keras", "keras")
_seeds = framework("keras.src.random.seed_generator", "keras")


class TierdCallback(_keras.callbacks.Callback):  # type: ignore[misc,name-defined]
    """Restores when training begins and saves while it runs; a step is a batch.

    Args:
        every_batches: between saves inside an epoch; None: at its end only.
        data: the `StatefulDataLoader` that `fit` reads, if it is one.

    Raises:
        ConfigError: another backend than torch; `every_batches` is no positive number.
    """

    def __init__(self, checkpointer: Checkpointer, every_batches: int | None = None, data: Any = None) -> None:
        super().__init__()
        if _keras.backend.backend() != "torch":
            raise ConfigError(
                f"Keras runs on {_keras.backend.backend()}: set KERAS_BACKEND=torch before it is imported"
            )
        if every_batches is not None and (type(every_batches) is not int or every_batches < 1):
            raise ConfigError(f"every_batches={every_batches!r}: a number from 1")
        self._checkpointer = checkpointer
        self._every = every_batches
        self._data = data
        self._epoch = self._done = self._last = 0
        self._metrics: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest verified checkpoint, if there is one.

        Raises:
            As `Checkpointer.restore`; StateMismatch: the model was built otherwise.
        """
        state = self._state(epoch=0, within=False)
        state["metrics"] = None  # taken as they are: Keras resets them when the epoch begins
        found = self._checkpointer.restore(state)
        if found is None:
            return
        self._epoch, self._done, self._last = state["epoch"], state["done"], found.step
        self._metrics = state["metrics"] if state["within"] else None
        self.model._initial_epoch = self._epoch  # as keras.callbacks.BackupAndRestore does

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        sampler: Any = getattr(self._data, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if self._metrics is not None:
            saved, self._metrics = self._metrics, None
            _Variables(lambda: self.model.metrics_variables).load_state_dict(saved)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done += 1
        if self._every is not None and self._done % self._every == 0:
            self._save(self._epoch, within=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._save(epoch + 1, within=False)

    def _save(self, epoch: int, within: bool) -> None:
        if self._done > self._last:
            self._checkpointer.save(self._done, self._state(epoch, within))
            self._last = self._done

    def _state(self, epoch: int, within: bool) -> dict[str, Any]:
        model = self.model
        seeds = _seeds.global_seed_generator()
        return {
            "model": _Variables(lambda: model.variables),
            "optimizer": _Variables(lambda: model.optimizer.variables),
            "metrics": _Variables(lambda: model.metrics_variables),
            "seeds": _Variables(lambda: [seeds.state]),
            "rng": RngState(),
            "data": self._data,
            "epoch": epoch,
            "within": within,
            "done": self._done,
        }


class _Variables:
    """Keras variables, in their order: their paths count up with the models that a process makes."""

    def __init__(self, variables: Any) -> None:
        self._variables = variables

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.value.detach() for number, one in enumerate(self._variables())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Assign them all, or none.

        Raises:
            StateMismatch: another number of them, or another shape; names the first.
        """
        variables = list(self._variables())
        if len(variables) != len(state_dict):
            raise StateMismatch(f"{len(state_dict)} variables in the checkpoint, {len(variables)} in the model")
        for number, one in enumerate(variables):
            saved = tuple(state_dict[str(number)].shape)
            if saved != tuple(one.shape):
                raise StateMismatch(f"{one.path}: {saved} in the checkpoint, {tuple(one.shape)} in the model")
        for number, one in enumerate(variables):
            one.assign(state_dict[str(number)])
