"""Each recipe of docs/howto that needs only torch: what is wrong or laborious before, and right after."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchdata")

import torch
from support.recipes import execute, recipes
from support.world import Daemon

import tierd
from tierd.cli import run
from tierd.stores.file_store import FileStore

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")
RECIPES = recipes()
Side = Callable[..., Any]


def sides(heading: str, at: Path, monkeypatch: pytest.MonkeyPatch, number: int = 0, **names: Any) -> list[Side]:
    """The code before and the code after, each as `begin(launch="")` that executes it in a directory of its own."""

    def side(name: str, code: str) -> Side:
        def begin(again: str = "", tier: Path | None = None) -> Any:
            home = at / (name + again)
            home.mkdir(exist_ok=True)
            monkeypatch.chdir(home)
            return execute(code, home, tier, **names)

        return begin

    before, after = RECIPES[heading][number]
    return [side("before", before), side("after", after)]


def resumed(begin: Side, first: int, last: int, *arguments: Any) -> tuple[list[int], list[int], list[int]]:
    """What a launch that ends at step `first` read, what the next one read, and what an uninterrupted one reads."""
    torch.manual_seed(0)
    one = begin().train(first, *arguments)
    torch.manual_seed(1)
    two = begin().train(last, *arguments)
    torch.manual_seed(0)
    return one, two, begin(" uninterrupted").train(last, *arguments)


def test_a_shuffled_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after = sides("A shuffled loader", tmp_path, monkeypatch)
    one, two, _ = resumed(before, 8, 12)
    assert set(one[:48]) & set(two), "samples of steps 1 to 6, which were saved, come again"
    one, two, whole = resumed(after, 8, 20)  # an epoch has 12 steps
    assert one[:48] + two == whole and sorted(whole[:96]) == list(range(96)) and whole[96:] != whole[:64]


AT_THE_END = (
    (
        '            state["epoch"] += 1\n',
        '            state["epoch"] += 1\n            ckpt.save(state["step"], state)\n',
    ),
    ("% 3 == 0", "% 100 == 0"),
)


def test_a_shuffled_loader_that_is_saved_after_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    [(_, code)] = recipes()["A shuffled loader"]
    for within, after in AT_THE_END:
        assert within in code
        code = code.replace(within, after)
    one, two, whole = resumed(lambda name="": execute(code, tmp_path / f"home{name}"), 14, 30)  # an epoch has 12 steps
    assert one[:96] + two == whole and whole[:96] != whole[96:192]


def test_a_dataset_draws_nothing_from_torchs_global_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, after = sides("A dataset with a state", tmp_path, monkeypatch)
    loader, before = after().loader, torch.get_rng_state()
    assert len(list(loader)) == 12 and (torch.get_rng_state() == before).all()
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        ckpt.save(12, {"data": loader})  # after the epoch's loop
        again = after().loader
        ckpt.restore({"data": again})
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_a_dataset_with_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after = sides("A dataset with a state", tmp_path, monkeypatch)
    first = before().loader
    iterator = iter(first)
    read = [next(iterator).tolist() for _ in range(5)]
    again = before().loader
    again.dataset.load_state(first.dataset.get_state())
    assert [next(iter(again)).tolist()] == read[:1], "its position never moved"
    loader = after().loader
    whole = [batch.tolist() for _ in range(2) for batch in loader]
    one, two = after().loader, after().loader
    iterator = iter(one)
    assert [next(iterator).tolist() for _ in range(5)] == whole[:5]
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        ckpt.save(5, {"data": one})
        ckpt.restore({"data": two})
    assert [batch.tolist() for _ in range(2) for batch in two] == whole[5:]


def test_a_dataset_whose_state_is_an_entry_of_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, _ = sides("A dataset with a state", tmp_path, monkeypatch)
    one, two = before().loader.dataset, before().loader.dataset
    one.epoch, one.position = 3, 40
    with tierd.Checkpointer(tmp_path / "spool", "run", to=[]) as ckpt:
        ckpt.save(5, {"data": one.get_state()})
        state = {"data": two.get_state()}
        ckpt.restore(state)
    two.load_state(state["data"])
    assert [*two] == [*one] and len([*two]) == 56


class Numbers:
    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_queue_that_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = []
    for begin in sides("A queue that reads ahead", tmp_path, monkeypatch):
        one, two = (begin().Prefetch(Numbers(), 4) for _ in range(2))
        assert [next(one) for _ in range(10)] == list(range(10))
        with tierd.Checkpointer(tmp_path / begin().Prefetch.__name__ / str(len(found)), "run", to=[]) as ckpt:
            ckpt.save(10, {"data": one})
            ckpt.restore({"data": two})
        found.append(next(two))
    assert found == [13, 10], "three items that were in the queue are skipped, or none"


# A program for each of two ranks: both sides, each resumed from step 3.
RANKS = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from support.recipes import execute, recipes
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
read = []
for name, code in zip(("before", "after"), recipes()["Each rank its own state"][0]):
    train = execute(code, Path(name).resolve()).train
    read.append([train(5), train(8)])
print(json.dumps(read))
"""


def test_each_rank_its_own_state(tmp_path: Path):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    (tmp_path / "corpus.txt").write_text("".join(f"{number}\n" for number in range(20)))
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANKS]
    running = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank, one in enumerate(running):
        out, _ = one.communicate(timeout=250)
        mine = [str(number) for number in range(rank, 20, 2)]
        assert one.returncode == 0 and json.loads(out.splitlines()[-1]) == [[mine[:5], mine[3:8]]] * 2


def test_recipe_of_when_to_save_keeps_the_same_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after = sides("When to save, and what to keep", tmp_path, monkeypatch)
    (tmp_path / "before" / "checkpoints").mkdir(parents=True)
    before().train(9)
    before().train(13)
    kept = sorted((tmp_path / "before" / "checkpoints").iterdir())
    assert [one.name for one in kept] == ["000008.pt", "000010.pt", "000012.pt"]
    tier = tmp_path / "tier"
    tier.mkdir()
    (tmp_path / "after").mkdir()
    with Daemon(tmp_path / "after" / "spool", lambda: {"tier": FileStore(tier)}, keep=None) as daemon:
        after(tier=tier).train(9)
        after(tier=tier).train(13)
        daemon.settle()
    with tierd.open(tier.as_uri(), run="managed") as reader:
        assert sorted(one.step for one in reader.checkpoints()) == [8, 10, 12]
    kept[-1].write_bytes(kept[-1].read_bytes()[:100])
    with pytest.raises(Exception, match=r"(?i)zip|archive|unpickl|magic|EOF"):
        before().train(14)


def test_the_cost_of_an_interval(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parent.parent / "docs" / "howto" / "recipes-rules.md"
    (command,) = re.findall(r"^    (tierd advise .*)$", page.read_text(), re.M)
    assert run([*shlex.split(command)[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert run(shlex.split(command)[1:]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| network |" in line]
    assert [row[1] for row in rows] == ["100", "500", "1000", "5000"] and found
    assert rows[-1][-1].rstrip(" |") == "99.6%", "the page says 0.4 %"
    assert float(rows[0][-1].rstrip(" |%")) < 5


def test_repeated_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = []
    for begin in sides("Repeated samples", tmp_path, monkeypatch):
        assert begin().train(7, lambda step: range(8 * step, 8 * step + 8)) == 0
        found.append(begin().train(12, lambda step: range(8 * (step - 2), 8 * (step - 1))))
    assert found == [0, 16], "two batches came again after the resume"


def test_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after = sides("The best weights", tmp_path, monkeypatch)
    for begin, then in ((before, [3, 4]), (after, [4])):
        assert begin().train(0, [5, 3, 4]) == [0, 1]
        assert begin().train(3, [4, 2]) == then, "4 is not better than 3"
    with tierd.Checkpointer(tmp_path / "after" / "spool", "best", to=[]) as ckpt:
        assert ckpt.restore({"weights": torch.ones(3)}, best="val_loss").step == 4


def test_early_stopping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, after = sides("Early stopping", tmp_path, monkeypatch)
    for begin, stopped in ((before, 6), (after, 3)):
        assert begin().train(0, [1, 2, 2]) == 2
        assert begin().train(3, [2, 2, 2, 2, 2]) == stopped


def test_use_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretrained on one node, used for another task, and continued on a node with a spool of its own."""
    tier = tmp_path / "tier"
    tier.mkdir()
    body, model = torch.nn.Linear(4, 8), torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    model(torch.ones(3)).backward()
    optimizer.step()
    stores = lambda: {"tier": FileStore(tier)}  # noqa: E731
    state = {"body": body, "head": torch.nn.Linear(8, 5), "model": model, "optimizer": optimizer}
    with Daemon(tmp_path / "first", stores), tierd.Checkpointer(tmp_path / "first", "pretrained") as ckpt:
        ckpt.save(1, state).wait("tier", timeout=60)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    torch.save({name: one.state_dict() for name, one in state.items()}, tmp_path / "before" / "last.pt")

    for begin in sides("Use a checkpoint", tmp_path, monkeypatch):
        got, head = begin(tier=tier).transferred()
        assert torch.equal(got.weight, body.weight) and head.out_features == 2

    with Daemon(tmp_path / "after" / "spool", stores):
        for begin in sides("Use a checkpoint", tmp_path, monkeypatch, number=1):
            other = torch.nn.Linear(3, 1)
            slower = torch.optim.Adam(other.parameters(), lr=1.0)
            begin(tier=tier).resumed(other, slower)
            assert torch.equal(other.weight, model.weight) and slower.param_groups[0]["lr"] == 0.1
            assert slower.state_dict()["state"][0]["step"] == 1


def test_every_block_of_the_pages_is_executed():
    here = Path(__file__).read_text() + (Path(__file__).parent / "loaders" / "test_recipes.py").read_text()
    assert [heading for heading, blocks in RECIPES.items() if blocks and f'"{heading}"' not in here] == []
    for blocks in RECIPES.values():
        for before, after in blocks:
            assert before != after
            compile(before, "before", "exec")
            compile(after, "after", "exec")
