"""The example for Ray Train: two of its workers save through tierd, one fails, and all resume where tierd was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.ranks import processes

from tierd.spool.spool import Spool

SCRIPT = """
import json, os, sys, tempfile
from pathlib import Path
home, = sys.argv[1:]
os.environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def train(config):
    from examples import ray_train
    report = ray_train.report
    def report_or_fail(ckpt, save, metrics):
        report(ckpt, save, metrics)
        failed = Path(home, "failed")
        if metrics["step"] == 6 and ray.train.get_context().get_world_rank() == 1 and not failed.exists():
            save.wait()
            failed.touch()
            raise RuntimeError("a worker fails")
    ray_train.report = report_or_fail
    try:
        ray_train.train(config)
    finally:
        ray_train.report = report

with tempfile.TemporaryDirectory(prefix="ray-") as directory:  # a short path: Ray has sockets in there
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False,
        _temp_dir=directory, _node_ip_address="127.0.0.1")
    result = TorchTrainer(
        train,
        train_loop_config={"spool": home + "/spool", "to": [], "steps": 9, "every": 3},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=home + "/ray", name="ray", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(Path(result.checkpoint.path, "tierd.json").read_text())
    print(json.dumps(result.metrics))
    ray.shutdown()
"""


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_ray_train_gets_a_text_for_each_durable_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    (output,) = processes(SCRIPT, [[str(tmp_path)]], timeout=400)
    text, metrics = (json.loads(line) for line in output.splitlines()[-2:])
    parts = Spool(tmp_path / "spool").parts("ray")
    attempts = sorted({part.checkpoint.attempt for part in parts})
    assert len(attempts) == 2 and (tmp_path / "failed").exists()
    assert text == {"run": "ray", "step": 9, "attempt": attempts[1]} and metrics["step"] == 9
    saved = {
        attempt: {part.checkpoint.step for part in parts if part.checkpoint.attempt == attempt} for attempt in attempts
    }
    assert saved[attempts[0]] == {3, 6} and saved[attempts[1]] in ({9}, {6, 9}), saved
