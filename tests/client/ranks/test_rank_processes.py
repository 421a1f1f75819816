"""Ranks as processes: under gloo, torchrun and a SLURM step, with one that dies or never begins."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from support.doubles import Double
from support.rank_states import harm, no_puts
from support.ranks import environment, free_port, processes
from support.world import Daemon

from tierd.spool.spool import Spool

_BEGIN = """
import json, sys, time
import torch
from torch import distributed
from support.timed import give_client
from support.training import tensors, same
import tierd
give_client(start_s=0.5)
"""
_SLURM = (
    _BEGIN
    + """
import os
number, spool, room, launch = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
os.environ.update({
    "SLURM_PROCID": str(number), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": launch,
})
def wait(name):
    for _ in range(3000):
        if os.path.exists(f"{room}/{name}"):
            return
        time.sleep(0.01)
    raise SystemExit(f"{name} did not come")
if launch == "1700000000":
    with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
        assert checkpointer.restore(tensors(0)) is None
        for step in (5, 6):
            save = checkpointer.save(step, tensors(step * 100 + number))
            save.wait()
        if number == 1:  # its last part becomes durable between the two ranks' looks
            os.rename(f"{spool}/{save.part.path}", f"{room}/late")
            open(f"{room}/part", "w").write(save.part.path)
    print("{}")
    raise SystemExit
from tierd.client.restoring import part_source
sight = part_source.NodeSource.run_view
def observing(self):
    if number == 1:
        wait("looked")
        if os.path.exists(f"{room}/late"):
            os.rename(f"{room}/late", f"{spool}/{open(f'{room}/part').read()}")
    try:
        return sight(self)
    finally:
        open(f"{room}/looked", "w").close()
part_source.NodeSource.run_view = observing
state = tensors(0)
with tierd.Checkpointer(spool, "run", to=[]) as checkpointer:
    found = checkpointer.restore(state)
    assert same(state, found.step * 100 + number)
    print(json.dumps([found.step, checkpointer.attempt]))
"""
)


def test_ranks_of_a_slurm_step_on_one_node_resume_from_the_same_without_a_group(tmp_path, spool):
    for launch in ("1700000000", "1700000100"):
        own = [[str(number), str(spool.root), str(tmp_path), launch] for number in (0, 1)]
        reported = processes(_SLURM, own)
    first, second = (json.loads(one.splitlines()[-1]) for one in reported)
    assert first == second, "rank 0 would go on from 5, and rank 1 from 6"


_GLOO = (
    _BEGIN
    + """
file, number, world, spool, to, wish = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:7]
distributed.init_process_group("gloo", store=distributed.FileStore(file, world), rank=number, world_size=world)
state = tensors(0)
told = {}
try:
    with tierd.Checkpointer(spool, "run", to=json.loads(to)) as checkpointer:
        found = checkpointer.restore(state)
        if found:
            told = {"step": found.step, "skipped": [[s.step, s.reason] for s in found.skipped]}
            assert same(state, found.step * 100 + number), "what was loaded is not what was saved"
        told["attempt"] = checkpointer.attempt
        for step in json.loads(wish):
            checkpointer.save(step, tensors(step * 100 + number)).wait()
except tierd.core.errors.TierdError as error:
    told = {"error": type(error).__name__, "text": str(error)}
distributed.barrier()
distributed.destroy_process_group()
print(json.dumps(told))
"""
)


def launch(tmp_path, spools, to, *steps: int) -> list[dict]:
    file = tmp_path / f"rendezvous{time.monotonic_ns()}"
    world = str(len(spools))
    own = [
        [str(file), str(number), world, str(spool.root), json.dumps(to), json.dumps(steps)]
        for number, spool in enumerate(spools)
    ]
    return [json.loads(output.splitlines()[-1]) for output in processes(_GLOO, own)]


def test_processes_agree_over_gloo(tmp_path, quick):
    """Each node's spool has its own rank's parts; the tier takes none of them."""
    spools, store = [Spool(tmp_path / name) for name in "ab"], Double()
    store.before = no_puts
    with Daemon(spools[0].root, {"tier": store}), Daemon(spools[1].root, {"tier": store}):
        first = launch(tmp_path, spools, None, 1, 2)
        assert len({one["attempt"] for one in first}) == 1
        harm(spools[1], 2, 1, 2)
        second = launch(tmp_path, spools, None)
    assert [one["step"] for one in second] == [1, 1]
    assert all(step == 2 and reason.startswith("rank 1:") for one in second for step, reason in one["skipped"])
    assert second[0]["attempt"] == second[1]["attempt"] > first[0]["attempt"]


_DYING = (
    _BEGIN
    + """
import os
file, number, spool = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", store=distributed.FileStore(file, 2), rank=number, world_size=2)
checkpointer = tierd.Checkpointer(spool, "run", to=[])
assert checkpointer.restore(tensors(0)) is None
if number == 1:
    os._exit(0)
try:
    checkpointer.restore(tensors(0))
except tierd.core.errors.StoreUnavailable as error:
    print("told:", error)
    checkpointer.save(1, tensors(1)).wait()
    print("saved")
sys.stdout.flush()
os._exit(0)
"""
)


def test_a_rank_that_dies_while_others_restore_is_noticed_at_once_and_holds_up_no_save(tmp_path):
    own = [[str(tmp_path / "rendezvous"), str(number), str(tmp_path / "spool")] for number in (0, 1)]
    first, _ = processes(_DYING, own, timeout=60)
    assert "told: rank 0 of 2: the other ranks cannot be heard: rank 1 (process " in first and "saved" in first


_ABSENT = (
    _BEGIN
    + """
import os, time
file, number, spool = sys.argv[1], int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", store=distributed.FileStore(file, 2), rank=number, world_size=2)
if number == 0:
    try:
        tierd.Checkpointer(spool, "run", to=[], start_timeout=3)
    except tierd.core.errors.ConfigError as error:
        print("told:", error)
    open(file + ".done", "w").close()
for _ in range(600):
    if os.path.exists(file + ".done"):
        break
    time.sleep(0.1)
sys.stdout.flush()
os._exit(0)
"""
)


def test_a_rank_that_makes_no_checkpointer_is_not_waited_for_for_hours(tmp_path):
    own = [[str(tmp_path / "rendezvous"), str(number), str(tmp_path / "spool")] for number in (0, 1)]
    first, _ = processes(_ABSENT, own, timeout=60)
    assert "rank 1 of 2 did not come within 3 s" in first and "Every rank makes a Checkpointer" in first


_RUN = (
    _BEGIN
    + """
spool, way, log = sys.argv[1:]
if way == "group":
    distributed.init_process_group("gloo")
made = [tierd.Checkpointer(spool, run, to=[]) for run in ("run", "second")]
state = tensors(0)
found = made[0].restore(state)
number = int(__import__("os").environ["RANK"])
assert found is None or same(state, found.step * 100 + number)
if way == "later":
    distributed.init_process_group("gloo")
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2
step = found.step + 1 if found else 1
made[0].save(step, tensors(step * 100 + number)).wait()
for one in made:
    one.close()
if distributed.is_initialized():
    distributed.destroy_process_group()
with open(f"{log}.{number}", "a") as file:
    print(found.step if found else None, made[0].attempt, made[1].attempt, file=file)
"""
)
# In one process, because each takes seconds to load torch.
_TORCHRUN_TWICE = """
import sys
from torch.distributed.run import main
for _ in range(2):
    main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("group", ["--standalone"]),
        ("store", ["--standalone"]),
        ("later", ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]),
        ("later", ["--master-addr=127.0.0.1"]),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_ranks_of_torchrun_agree_with_and_without_a_group(tmp_path, way, options):
    if options[0].startswith("--master"):
        options = [*options, f"--master-port={free_port()}"]
    script = tmp_path / "train.py"
    script.write_text(_RUN)
    arguments = ["--nproc-per-node=2", *options, str(script), str(tmp_path / "spool"), way, str(tmp_path / "log")]
    done = subprocess.run(
        [sys.executable, "-c", _TORCHRUN_TWICE, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ((tmp_path / f"log.{number}").read_text().splitlines() for number in (0, 1))
    assert first == second and [line.split()[0] for line in first] == ["None", "1"]
