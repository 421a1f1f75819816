"""torchtitan's checkpoint manager over tierd: its trainer saves and resumes through a `Checkpointer`.

    config.checkpoint = tierd.adapters.torchtitan.TierdCheckpointManager.Config(
        enable=True, interval=500, spool="/nvme/tierd", run="llama-8b", to=["s3://bucket/checkpoints"]
    )

`Trainer` builds the manager from this configuration, as it builds its own. Each rank saves its shards of the model and
of the optimizers, and the states of the schedules, the data loader and the trainer. Training continues meanwhile.

torchtitan's own manager, which this one extends, still loads what a run begins with (`folder`, `initial_load_path`,
Hugging Face weights), and writes seed checkpoints and the model of `last_save_in_hf`.

Invariant: torchtitan's own manager loads only if the run has no checkpoint in any place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tierd.adapters import framework
from tierd.client.checkpointer import Checkpointer
from tierd.core.errors import StateMismatch
from tierd.dcp import load as load_resharded

_checkpointer = framework("torchtitan.components.checkpointer", "torchtitan")


class TierdCheckpointManager(_checkpointer.CheckpointManager):  # type: ignore[misc,name-defined]
    """A checkpoint manager of torchtitan 0.3, which `Trainer` makes from its `Config`.

    Args:
        config: torchtitan's options, and `spool`, `run` and `to` as for `Checkpointer`. `Config` raises `ValueError` if
            one of them cannot be used, such as a `keep_latest_k`, because the run's retention decides.
        parts: what `Trainer` gives to each manager: the model's parts, the optimizers, the schedules and the loader.

    Raises:
        As `Checkpointer`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_checkpointer.CheckpointManager.Config):  # type: ignore[misc,name-defined]
        """torchtitan's options, and the first arguments of a `Checkpointer`."""

        spool: str = ""
        run: str = ""
        to: list[str] | None = None
        keep_latest_k: int = 0

        def __post_init__(self) -> None:
            _checkpointer.CheckpointManager.Config.__post_init__(self)
            if self.enable and not (self.spool and self.run):
                raise ValueError("checkpoint.spool and checkpoint.run have to be set")
            if self.keep_latest_k:
                raise ValueError("checkpoint.keep_latest_k has to be 0, because tierd's retention decides")

    checkpointer: Checkpointer | None = None  # None if checkpoints are disabled

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable:
            self.checkpointer = Checkpointer(config.spool, config.run, to=config.to)
            self.checkpointer.attach(*parts["optimizers"])

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if torchtitan's options say so. The last step's checkpoint is a whole one, so training may go on."""
        if curr_step == 0:  # a seed, which holds the model alone and is loaded on any number of ranks
            return bool(super()._save(curr_step, last_step))
        if not self._should_save(curr_step, last_step):
            return False
        assert self.checkpointer is not None
        self.checkpointer.save(curr_step, self._entries())
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
        return True

    def _load(self, step: int = -1) -> bool:
        """Load the newest verified checkpoint, or this step; on another mesh or number of ranks, its shards anew."""
        assert self.checkpointer is not None
        entries = self._entries()
        for name in self.exclude_from_loading:
            entries.pop(name, None)
        wanted = None if step == -1 else step
        try:
            restored = self.checkpointer.restore(entries, wanted, only=tuple(entries))
        except StateMismatch:
            restored = load_resharded(entries, self.checkpointer, wanted)
        return restored is not None or bool(super()._load(step))

    def _entries(self) -> dict[str, Any]:
        return {name: _Entry(part) for name, part in self.states.items() if part is not None}

    def _close(self) -> None:
        super()._close()
        if self.checkpointer is not None:
            self.checkpointer.close()


class _Entry:
    """A part of the state without its class, because `OptimizersContainer` is a torch optimizer with a flat state."""

    def __init__(self, part: Any) -> None:
        self.state_dict, self.load_state_dict = part.state_dict, part.load_state_dict
