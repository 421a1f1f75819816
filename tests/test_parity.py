"""The parity page names every option of Keras and TensorFlow, and nothing of tierd that there is not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs/explanation/parity.md").read_text()

OPTIONS = {  # keras 3.15, which tests/loaders compares; tensorflow 2.21, whose API reference names them
    "ModelCheckpoint": "filepath monitor verbose save_best_only save_weights_only mode save_freq "
    "initial_value_threshold",
    "BackupAndRestore": "backup_dir save_freq double_checkpoint delete_checkpoint",
    "EarlyStopping": "monitor min_delta patience verbose mode baseline restore_best_weights start_from_epoch",
    "RemoteMonitor": "root path field headers send_as_json",
    "CheckpointManager": "checkpoint directory max_to_keep keep_checkpoint_every_n_hours checkpoint_name step_counter "
    "checkpoint_interval init_fn last_checkpoint_step checkpoint_number check_interval options sync",
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_row(name: str):
    section = PAGE.split(f".{name}\n")[1].split("\n## ")[0]
    rows = {option for line in section.splitlines() for option in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert set(OPTIONS[name].split()) <= rows


def test_names_of_tierd_on_the_parity_page_exist():
    pytest.importorskip("torch")
    import tierd

    for name, arguments in re.findall(r"tierd\.([A-Z]\w+)\(([^)`]*)\)?", PAGE):
        parameters = inspect.signature(getattr(tierd, name)).parameters
        assert set(re.findall(r"(\w+)=", arguments)) <= set(parameters), name
    assert "metrics" in inspect.signature(tierd.Checkpointer.save).parameters
