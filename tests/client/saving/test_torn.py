"""Overlap: a checkpoint is what the state was when `save` was called, bit for bit, whatever training does meanwhile."""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.training import fresh, train
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tierd
from tierd.client.saving.snapshot import Snapshot
from tierd.core.errors import ConfigError, SaveFailed, SaveSkipped, TornSnapshot
from tierd.spool.spool import Spool
from tierd.state.capture import Capture

SEEDS = int(os.environ.get("TIERD_SEEDS", "16"))  # `make gate` takes a hundred

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*weights_only.*")


class Pace:
    """Holds every late copy until it is told to go on, and lets it crawl then: what can tear, tears."""

    def __init__(self, monkeypatch) -> None:
        self.crawl = 0.0003
        self._changed = threading.Condition()
        self._free = -1  # up to which step they may go on
        self.begun: set[int] = set()  # steps of which something was copied late
        real = Snapshot._begin

        def begin(snapshot, into, names):
            names = list(names)
            if not snapshot.late.issuperset(names) or not names:
                real(snapshot, into, names)
                return
            step = snapshot.save.step
            with self._changed:
                self.begun.add(step)
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: step <= self._free, 20), f"nobody let the copy of {step} go on"
            for name in names:
                time.sleep(self.crawl)
                real(snapshot, into, [name])

        monkeypatch.setattr(Snapshot, "_begin", begin)

    def free(self, step: int) -> None:
        with self._changed:
            self._free = max(self._free, step)
            self._changed.notify_all()

    def reached(self, step: int) -> None:
        """Return when the late copy of `step` is at its begin: all else of it is copied."""
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.begun, 20), f"the copy of {step} did not begin"


class FullSpeed:
    """As `Pace`, and holds nothing."""

    def free(self, step: int) -> None:
        pass


@pytest.fixture
def pace(monkeypatch):
    pace = Pace(monkeypatch)
    yield pace
    pace.free(10**9)


# -- what is compared -------------------------------------------------------------------------------------------------


def frozen(value: Any) -> Any:
    """A synchronous copy of a state: every entry asked for its own, every tensor and array cloned."""
    if hasattr(value, "load_state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(frozen(inner) for inner in value)
    return copy.deepcopy(value)


def differences(expected: Any, found: Any, path: str = "state") -> list[str]:
    """Where two states are not the same to the last bit."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
            return [f"{path}: another form"]
        mine, other = (tensor.detach().cpu().resolve_conj().contiguous().flatten() for tensor in (expected, found))
        wrong = (mine.view(torch.uint8) != other.view(torch.uint8)).sum().item() if mine.numel() else 0
        return [f"{path}: {wrong} bytes of {mine.nbytes}"] if wrong else []
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and expected.shape == found.shape and expected.tobytes() == found.tobytes()
        return [] if same else [f"{path}: another array"]
    if isinstance(expected, dict):
        if list(expected) != list(found):
            return [f"{path}: keys {list(expected)} and {list(found)}"]
        return [line for key in expected for line in differences(expected[key], found[key], f"{path}[{key!r}]")]
    if type(expected) in (list, tuple):
        if type(expected) is not type(found) or len(expected) != len(found):
            return [f"{path}: {expected!r:.60} and {found!r:.60}"]
        pairs = zip(expected, found, strict=True)
        return [line for at, pair in enumerate(pairs) for line in differences(*pair, f"{path}[{at}]")]
    return [] if repr(expected) == repr(found) else [f"{path}: {expected!r:.60} and {found!r:.60}"]


def loaded(spool, steps, keys) -> Iterator[tuple[int, dict[str, Any]]]:
    """The checkpoints of these steps, verified, as plain values."""
    with tierd.Checkpointer(spool.root, "run", to=[]) as checkpointer:
        for step in steps:
            found = dict.fromkeys(keys)
            assert checkpointer.restore(found, step=step).step == step
            yield step, found


def committed(spool) -> list[int]:
    return [part.checkpoint.step for part in spool.parts()]


# -- trainings made of dice -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Every kind of parameter and of buffer that a model may have; which of them, the dice say."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.width = width = dice.choice([4, 6, 8])
        self.embed = nn.Embedding(11, width)
        kinds = {
            "linear": lambda: nn.Linear(width, width, bias=dice.random() < 0.7),
            "norm": lambda: nn.BatchNorm1d(width, momentum=dice.choice([0.1, None])),
            "conv": lambda: nn.Sequential(nn.Unflatten(1, (1, width)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()),
            "dropout": lambda: nn.Dropout(0.2),
            "layer norm": lambda: nn.LayerNorm(width),
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(width, width)),
        }
        self.body = nn.Sequential(*(kinds[dice.choice(list(kinds))]() for _ in range(dice.randint(1, 4))))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        if dice.random() < 0.4:
            self.head.weight = self.embed.weight
        self.coarse = nn.Linear(width, width).bfloat16() if dice.random() < 0.5 else None
        self.turned = nn.Parameter(torch.randn(width, 5).t()) if dice.random() < 0.6 else None
        self.strided = nn.Parameter(torch.randn(3, 2 * width)[1, ::2]) if dice.random() < 0.6 else None
        self.phase = nn.Parameter(torch.randn(width, dtype=torch.complex64)) if dice.random() < 0.3 else None
        self.empty = nn.Parameter(torch.empty(0, 3)) if dice.random() < 0.3 else None
        if dice.random() < 0.4:  # parameters that lie in one memory
            flat = torch.randn(3 * width)
            self.first, self.second = nn.Parameter(flat[:width]), nn.Parameter(flat[width:])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width, 7).t())
        for parameter in self.parameters():
            if dice.random() < 0.15 and parameter is not self.head.weight:
                parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.body(self.embed(tokens)))
        with torch.no_grad():
            self.calls += 1
            self.mean.mul_(0.9).add_(found[:7])
        if self.coarse is not None:
            found = found + self.coarse(found.bfloat16()).float()
        if self.turned is not None:
            found = found + self.turned.sum(0)
        if self.strided is not None:
            found = found * self.strided
        if self.phase is not None:
            found = found * self.phase.abs()
        if hasattr(self, "first"):
            found = found + self.first * self.second[: self.width]
        if self.empty is not None:
            found = found + self.empty.sum()
        return self.head(found)


def an_optimizer(dice: random.Random, own: list[nn.Parameter]) -> torch.optim.Optimizer:
    real = not any(parameter.is_complex() for parameter in own)
    plain = real and all(p.numel() and p.dtype == torch.float32 and p.is_contiguous() for p in own)
    foreach = dice.choice([True, False, None])
    if len(own) > 1 and dice.random() < 0.5:
        at = dice.randrange(1, len(own))
        groups: Any = [{"params": own[:at]}, {"params": own[at:], "lr": 0.005}]
    else:
        groups = own
    kinds = {
        "SGD": lambda: torch.optim.SGD(groups, 0.01, momentum=0.9, nesterov=dice.random() < 0.5, foreach=foreach),
        "no momentum": lambda: torch.optim.SGD(groups, 0.01, foreach=foreach),
        "Adam": lambda: torch.optim.Adam(groups, 0.01, amsgrad=dice.random() < 0.5, foreach=foreach),
        "AdamW": lambda: torch.optim.AdamW(groups, 0.01, foreach=foreach),
        "Adam with a tensor for lr": lambda: torch.optim.Adam(groups, torch.tensor(0.01), foreach=False),
        "Adagrad": lambda: torch.optim.Adagrad(groups, 0.01, foreach=foreach),
        "RMSprop": lambda: torch.optim.RMSprop(groups, 0.001, momentum=0.5, centered=True, foreach=foreach),
    }
    if real:
        kinds["fused AdamW"] = lambda: torch.optim.AdamW(groups, 0.01, fused=True)
        kinds["fused SGD"] = lambda: torch.optim.SGD(groups, 0.01, momentum=0.9, fused=True)
    if plain and groups is own:
        kinds["LBFGS"] = lambda: torch.optim.LBFGS(own, 0.01, max_iter=3, history_size=2)
    return kinds[dice.choice(list(kinds))]()


class Training:
    """A training whose every part, and the order of what it does, is random; the same for the same seed."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.model = Net(dice)
        own = list(self.model.parameters())
        dice.shuffle(own)
        count = min(dice.randint(1, 3), len(own))
        cuts = [0, *sorted(dice.sample(range(1, len(own)), count - 1)), len(own)]
        self.optimizers = [an_optimizer(dice, own[a:b]) for a, b in itertools.pairwise(cuts)]
        self.attached = dice.sample(self.optimizers, dice.randint(1, count))
        self.schedulers = [
            dice.choice(
                [
                    lambda o: StepLR(o, 2, 0.5),
                    lambda o: CosineAnnealingLR(o, 9),
                    lambda o: OneCycleLR(o, 0.1, 99, cycle_momentum=False),
                ]
            )(o)
            for o in self.optimizers
            if dice.random() < 0.6 and not isinstance(o, torch.optim.LBFGS)
        ]
        averaging = get_ema_multi_avg_fn(0.8) if dice.random() < 0.5 else None
        self.average = AveragedModel(self.model, multi_avg_fn=averaging, use_buffers=dice.random() < 0.5)
        self.copies = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.loader = {
            "order": list(range(20)),
            "at": 0,
            "seen": collections.Counter(),
            "last": collections.deque([0], 5),
        }
        self.array = np.arange(12.0)
        self.alone = torch.zeros(33)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
            "average": self.average,
            "copies": self.copies,
            "rng": tierd.RngState(),
            "loader": self.loader,
            "array": self.array,
            "alone": self.alone,
            "count": 0,
        }
        if dice.random() < 0.4:
            self.state["gradients"] = {}
        keys = list(self.state)
        dice.shuffle(keys)
        self.state = {key: self.state[key] for key in keys}

    # What may happen between two saves, in any order.

    def learn(self) -> None:
        """Forward and backward: gradients add up, buffers and generators move on."""
        loss = self.model(torch.randint(0, 11, (8,))).square().mean() * np.random.rand()
        if loss.requires_grad:
            loss.backward()
        if "gradients" in self.state:
            self.state["gradients"] = {name: p.grad for name, p in self.model.named_parameters()}

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(self.closure if isinstance(optimizer, torch.optim.LBFGS) else None)

    def closure(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(torch.arange(8)).square().mean()
        if loss.requires_grad:
            loss.backward()
        return loss

    def keep_an_average(self) -> None:
        self.average.update_parameters(self.model)
        with torch.no_grad():
            for mine, parameter in zip(self.copies, self.model.parameters(), strict=True):
                mine.mul_(0.7).add_(parameter, alpha=0.3)

    def count(self) -> None:
        self.state["count"] += 1
        self.loader["at"] += 1
        self.dice.shuffle(self.loader["order"])
        self.loader["seen"][self.loader["at"] % 3] += 1
        self.loader["last"].append(self.loader["at"])
        self.array += 1
        self.alone.add_(1)
        random.random(), np.random.rand(), torch.rand(3)

    def zero(self) -> None:
        self.model.zero_grad(set_to_none=self.dice.random() < 0.5)

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def race(spool, seed: int, pace: Pace | FullSpeed, iterations: int = 6) -> None:
    """Train and save; fail if one checkpoint is not what the state was when `save` was called."""
    dice = random.Random(seed)
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    training = Training(dice)
    state, references, saves = training.state, {}, {}
    slots, busy = dice.choice([1, 2]), dice.choice(["wait", "wait", "skip"])
    about = f"seed {seed}, slots={slots}, when_busy={busy}, {[type(o).__name__ for o in training.optimizers]}"
    with tierd.Checkpointer(spool.root, "run", to=[], slots=slots, when_busy=busy) as checkpointer:
        checkpointer.attach(*training.attached)

        def save() -> None:
            if busy == "wait" or slots > 1:
                pace.free(len(saves))  # it would wait for ever
            number = len(saves) + 1
            references[number] = frozen(state)
            saves[number] = checkpointer.save(number, state)

        for _ in range(iterations):
            steps = [lambda o=o: training.step(o) for o in training.optimizers if dice.random() < 0.9]
            acts = [training.learn] * dice.randint(1, 3) + [save] * dice.randint(0, 2) + steps
            acts += [training.keep_an_average, training.count, training.schedule, training.zero]
            dice.shuffle(acts)
            for act in acts:
                if act in steps and any(act.__defaults__[0] is one for one in training.attached):
                    pace.free(len(saves))  # and not before: what comes between has overtaken the copy
                act()
        save()
        training.learn(), training.count(), training.keep_an_average()
        pace.free(len(saves))
    wrong = [f"step {number}: {one.error()!r}" for number, one in saves.items() if not _as_it_should(one)]
    durable = [number for number, one in saves.items() if one.error() is None]
    assert not wrong and sorted(committed(spool)) == durable, f"{about}: {wrong}, {committed(spool)}, {durable}"
    assert checkpointer.stats.failed == 0 and checkpointer.stats.saves == len(durable)
    for number, found in loaded(spool, durable, state):
        wrong = differences(references[number], found)
        assert not wrong, f"{about}: step {number} is torn: {'; '.join(wrong[:5])}"


def _as_it_should(save: tierd.Save) -> bool:
    return save.done() and (save.error() is None or isinstance(save.error(), SaveSkipped))


@pytest.mark.parametrize("seed", range(16))
def test_a_checkpoint_is_the_state_at_the_call_of_save(spool, seed, pace):
    race(spool, seed, pace)
    assert pace.begun, "nothing was copied late: this has tested nothing"


@pytest.mark.parametrize("seed", range(100, 110))
def test_so_it_is_at_full_speed(spool, seed):
    race(spool, seed, FullSpeed())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS))
def test_so_it_is_for_many_trainings(spool, seed, pace):
    race(spool, seed, pace, iterations=10)


# -- what else writes to what is copied late ---------------------------------------------------------------------------


@pytest.fixture
def job(local):
    """A training under way, its optimizer attached."""
    state = fresh()
    train(state, 2)
    local.attach(state["optimizer"])
    return state


def later(seconds: float, call, *arguments) -> None:
    thread = threading.Timer(seconds, call, arguments)
    thread.daemon = True
    thread.start()


def weight(state) -> nn.Parameter:
    return state["model"][3].weight


@torch.no_grad()
def clip(state) -> None:
    weight(state).clamp_(-0.01, 0.01)


@torch.no_grad()
def copied_over(state) -> None:
    weight(state).copy_(torch.ones(4, 16))


@torch.no_grad()
def all_at_once(state) -> None:
    torch._foreach_mul_(list(state["model"].parameters()), 0.5)


@torch.inference_mode()
def in_inference_mode(state) -> None:
    weight(state).neg_()


def through_a_view(state) -> None:
    weight(state).detach()[1:3].zero_()


def load_state_dict(state) -> None:
    state["model"].load_state_dict(fresh(1)["model"].state_dict())


def moments(state) -> None:
    state["optimizer"].state[weight(state)]["exp_avg"].zero_()


def another_optimizer(state) -> None:
    weight(state).grad = torch.ones(4, 16)
    torch.optim.SGD([weight(state)], 1.0).step()


WRITES = [
    clip,
    copied_over,
    all_at_once,
    in_inference_mode,
    through_a_view,
    load_state_dict,
    moments,
    another_optimizer,
]


def check(spool, step: int, reference) -> None:
    ((_, found),) = loaded(spool, [step], reference)
    assert not differences(reference, found)


@pytest.mark.parametrize("moment", ["before", "while it is copied"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_anybody_else_fails_the_save(spool, local, job, pace, caplog, write, moment):
    pace.crawl = 0.004
    save = local.save(1, job)
    pace.reached(1)
    if moment == "before":
        write(job)
        pace.free(1)
    else:
        pace.free(1)
        time.sleep(0.008)
        write(job)
    with pytest.raises(SaveFailed, match=r"was changed between save\(\) and the next step\(\)") as failed:
        save.wait(timeout=20)
    assert isinstance(failed.value.__cause__, TornSnapshot) and save.error() is failed.value.__cause__
    assert local.stats.failed == 1 and caplog.text.count("save failed, training goes on") == 1
    assert not committed(spool) and not list((spool.control / "stage").iterdir())
    pace.free(10**6)
    train(job)  # nothing holds the step
    reference = frozen(job)
    local.save(1, job).wait(timeout=20)
    assert local.stats.failed == 1
    check(spool, 1, reference)


# -- writes that raise no version counter -----------------------------------------------------------------------------


def through_data(state) -> None:
    weight(state).data.add_(1)


def through_numpy(state) -> None:
    weight(state).detach().numpy()[:] += 1


def through_the_address(state) -> None:
    """As a kernel of somebody's own does."""
    ctypes.memset(weight(state).data_ptr(), 1, weight(state).nbytes)


def another_fused_optimizer(state) -> None:
    weight(state).grad = torch.ones(4, 16)
    torch.optim.AdamW([weight(state)], 1.0, fused=True).step()


def averaged_with_another_rank(state) -> None:
    """By a collective of two ranks, which are two threads here."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20)), range(2)))
        mine, others = weight(state).detach(), torch.full((4, 16), 7.0)
        done = [group.allreduce([tensor]) for group, tensor in zip(groups, (mine, others), strict=True)]
        assert all(work.wait() for work in done)


UNCOUNTED = [through_data, through_numpy, through_the_address, another_fused_optimizer, averaged_with_another_rank]


def test_a_write_of_one_element_is_noticed_where_a_counter_shows_it(spool, local):
    """No sample would: it is one of two million."""
    weight = nn.Parameter(torch.zeros(2_000_000))
    local.attach(optimizer := torch.optim.SGD([weight], 0.1))
    save = local.save(1, {"weight": weight})
    copied(local)
    with torch.no_grad():
        weight[777_777] = 1
    optimizer.step()
    with pytest.raises(SaveFailed, match="weight was changed between"):
        save.wait(timeout=20)


def copied(local) -> None:
    """Return when the late copy of the save that was begun last is made."""
    (snapshot,) = local._gate._pending
    end = time.monotonic() + 20
    while not snapshot.copied:
        assert time.monotonic() < end, "it was not copied"
        time.sleep(0.001)


@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_no_counter_shows_fails_the_save_and_is_expected_from_then_on(spool, local, job, write):
    save = local.save(1, job)
    copied(local)
    write(job)
    train(job)
    with pytest.raises(SaveFailed, match=r"model/3.weight was changed between save\(\)"):
        save.wait(timeout=20)
    assert not committed(spool)
    reference = frozen(job)
    save = local.save(2, job)
    write(job)  # once more, as averaging does after each save: the tensor is copied before save() returns by now
    train(job)
    save.wait(timeout=20)
    check(spool, 2, reference)


def test_large_tensors_are_looked_at_where_they_lie_also_beside_one_that_moves(spool, local):
    weights = [nn.Parameter(torch.randn(30_000)) for _ in range(3)]
    weights.append(nn.Parameter(torch.randn(60_001)[1:30_001].detach()))  # between two words of the sample
    weights.append(nn.Parameter(torch.randn(20_000, dtype=torch.complex128)))
    local.attach(optimizer := torch.optim.SGD(weights, 0.1))
    state = {str(number): weight for number, weight in enumerate(weights)}
    for step in range(1, 6):
        save = local.save(step, state)
        copied(local)
        optimizer.step()
        save.wait(timeout=20)
        weights[0].data = weights[0].detach() + 1
    for number in range(1, 5):
        save = local.save(10 + number, state)
        copied(local)
        ctypes.memset(weights[number].data_ptr(), 1, weights[number].nbytes)
        optimizer.step()
        with pytest.raises(SaveFailed, match=f"{number} was changed between"):
            save.wait(timeout=20)


def waited(save) -> None:
    with contextlib.suppress(SaveFailed):
        save.wait(timeout=20)


REACHED = {
    "step": lambda local, job, save: job["optimizer"].step(),
    "save": lambda local, job, save: local.save(2, {"epoch": 3}),
    "wait": lambda local, job, save: waited(save),
    "done": lambda local, job, save: save.done(),
    "restore": lambda local, job, save: local.restore(),
    "close": lambda local, job, save: local.close(),
}


@pytest.mark.parametrize("point", REACHED)
def test_a_copy_is_judged_where_the_training_thread_comes_by(spool, local, job, monkeypatch, point):
    monkeypatch.setattr("tierd.client.saving.snapshot._LONG_OVER", 1000.0)
    save = local.save(1, job)
    copied(local)
    assert not save._ended.wait(0.2) and not committed(spool), "before it was confirmed"
    through_numpy(job)
    REACHED[point](local, job, save)
    assert save._ended.wait(20) and isinstance(save.error(), TornSnapshot)
    assert 1 not in committed(spool)


@pytest.mark.parametrize("point", REACHED)
def test_and_kept_where_nobody_wrote(spool, local, job, monkeypatch, point):
    monkeypatch.setattr("tierd.client.saving.snapshot._LONG_OVER", 1000.0)
    reference = frozen(job)
    save = local.save(1, job)
    copied(local)
    REACHED[point](local, job, save)
    assert save._ended.wait(20) and save.error() is None
    check(spool, 1, reference)


def test_a_copy_is_judged_some_time_later_where_nobody_comes_by(spool, local, job, monkeypatch):
    monkeypatch.setattr("tierd.client.saving.snapshot._LONG_OVER", 0.2)
    reference = frozen(job)
    save = local.save(1, job)
    assert save._ended.wait(20) and save.error() is None
    check(spool, 1, reference)
    save = local.save(2, job)
    copied(local)
    through_numpy(job)
    assert not save._ended.wait(1.0), "what changed may be the next step: only the training thread can tell"
    train(job)
    assert save._ended.wait(20) and isinstance(save.error(), TornSnapshot)


def test_another_thread_that_waits_confirms_nothing(spool, local, job, monkeypatch):
    monkeypatch.setattr("tierd.client.saving.snapshot._LONG_OVER", 1000.0)
    save = local.save(1, job)
    copied(local)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(save.wait, timeout=20)
        assert not save._ended.wait(0.3)
        train(job)
        waiting.result(20)
    assert committed(spool) == [1]


def test_the_end_of_the_interpreter_confirms(tmp_path):
    program = f"""
import torch, tierd
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = tierd.Checkpointer({str(tmp_path / "spool")!r}, "run", to=[])
checkpointer.attach(optimizer)
checkpointer.save(1, {{"model": model}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert committed(Spool(tmp_path / "spool")) == [1]


def test_what_looking_raises_fails_the_save_and_not_the_step(spool, local, job, monkeypatch):
    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("tierd.client.saving.snapshot.TensorSample.look", broken)
    save = local.save(1, job)
    train(job)
    with pytest.raises(SaveFailed, match="no such kernel"):
        save.wait(timeout=20)


def test_a_forward_that_writes_to_its_parameter_fails_the_save(spool, local, pace):
    model = nn.Embedding(9, 4, max_norm=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local.attach(optimizer)
    save = local.save(1, {"model": model})
    model(torch.arange(9))
    pace.free(1)
    optimizer.step()
    with pytest.raises(SaveFailed, match="weight was changed"):
        save.wait(timeout=20)
    assert not committed(spool)


def test_what_is_replaced_is_not_written_to(spool, local, job, pace):
    """New tensors in the place of the old ones: the snapshot has the old ones."""
    reference = frozen(job)
    save = local.save(1, job)
    job["optimizer"].load_state_dict(copy.deepcopy(job["optimizer"].state_dict()))
    for parameter in job["model"].parameters():
        parameter.data = torch.zeros_like(parameter)
    pace.free(1)
    save.wait(timeout=20)
    check(spool, 1, reference)


def test_parameters_beside_a_buffer_in_one_memory_are_saved(spool, local, pace):
    """A flat memory that a model's parameters and a buffer that forward changes are cut from."""
    model, flat = nn.Module(), torch.zeros(100)
    model.weight = nn.Parameter(flat[:60])
    model.register_buffer("seen", flat[60:])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local.attach(optimizer)
    reference = frozen(model)
    save = local.save(1, {"model": model})
    model.seen.add_(1)
    pace.free(1)
    save.wait(timeout=20)
    check(spool, 1, {"model": reference})


def test_an_empty_parameter_is_no_memory(spool, local, pace):
    """All tensors without elements lie at one address, which is none."""
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(3)), "empty": nn.Parameter(torch.empty(0, 4))})
    average = [parameter.detach().clone() for parameter in model.parameters()]
    local.attach(torch.optim.SGD(model.parameters(), 0.1))
    state = {"model": model, "average": average}
    reference = frozen(state)
    save = local.save(1, state)
    for one in average:
        one.add_(1)
    pace.free(1)
    save.wait(timeout=20)
    check(spool, 1, reference)


def test_a_name_that_was_a_parameter_s_may_become_a_copy_s(spool, local, job, pace):
    state = {"best": weight(job).detach(), **job}
    pace.free(1)
    local.save(1, state).wait(timeout=20)
    state["best"] = weight(job).detach().clone()
    reference = frozen(state)
    save = local.save(2, state)
    state["best"].zero_()
    pace.free(2)
    save.wait(timeout=20)
    check(spool, 2, reference)


# -- the gate ---------------------------------------------------------------------------------------------------------


def backward(state) -> torch.Tensor:
    loss = state["model"](torch.randn(16, 8)).square().mean()
    loss.backward()
    return loss


def plainly(state) -> None:
    state["optimizer"].step()


def with_a_closure(state) -> None:
    state["optimizer"].step(lambda: backward(state))


def with_a_grad_scaler(state) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(state["model"](torch.randn(16, 8)).square().mean()).backward()
    scaler.unscale_(state["optimizer"])
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    scaler.step(state["optimizer"])
    scaler.update()


def under_a_scheduler(state) -> None:
    torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 5)  # wraps step once more
    state["optimizer"].step()


def in_another_thread(state) -> None:
    thread = threading.Thread(target=state["optimizer"].step)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("step", [plainly, with_a_closure, with_a_grad_scaler, under_a_scheduler, in_another_thread])
def test_every_way_to_step_waits_for_the_copy(spool, local, job, pace, step):
    backward(job)
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    arrived = register_optimizer_step_pre_hook(lambda *_: later(0.05, pace.free, 1))
    step(job)
    arrived.remove()
    assert local.stats.step_waited_s > 0.01
    save.wait(timeout=20)
    check(spool, 1, reference)
    waited = local.stats.step_waited_s
    plainly(job)
    assert local.stats.step_waited_s == waited, "it waits for nothing that is over"


def test_an_optimizer_that_is_not_attached_does_not_wait(spool, local, job, pace):
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    state = job | {"other": other}
    reference = frozen(state)
    save = local.save(1, state)
    pace.reached(1)
    other(torch.ones(3)).sum().backward()
    optimizer.step()
    assert not save.done() and local.stats.step_waited_s == 0
    pace.free(1)
    save.wait(timeout=20)
    check(spool, 1, reference)


@pytest.mark.parametrize("wrong", [None, "optimizer", nn.Linear(2, 2), torch.optim.AdamW, [], lambda: None])
def test_only_optimizers_are_attached(local, wrong):
    with pytest.raises(ConfigError, match="Optimizer is wanted"):
        local.attach(wrong)


def test_an_optimizer_is_attached_once_and_let_go_by_close(spool, pace):
    state = fresh()
    optimizer = state["optimizer"]
    hooks = optimizer._optimizer_step_pre_hooks
    checkpointer = tierd.Checkpointer(spool.root, "run", to=[])
    checkpointer.attach(optimizer, optimizer)
    checkpointer.attach(optimizer)
    assert len(hooks) == 1
    train(copy.deepcopy(state))  # and can be copied, hooks or not
    reference = frozen(state)
    checkpointer.save(1, state)
    later(0.05, pace.free, 1)
    checkpointer.close()
    assert not hooks
    train(state)
    with pytest.raises(ConfigError, match="closed"):
        checkpointer.attach(optimizer)
    check(spool, 1, reference)


@pytest.mark.parametrize("when", ["after a step", "before a step", "before a step, attached later"])
def test_a_hook_of_an_optimizer_may_save(spool, local, pace, when):
    """After attach, a hook before the step comes behind the gate: what it saves is refused, not torn."""
    state, references, saves = fresh(), {}, {}
    optimizer = state["optimizer"]

    def hook(*_) -> None:
        number = len(saves) + 1
        pace.free(number - 1)
        references[number] = frozen(state)
        saves[number] = local.save(number, state)
        pace.free(number)

    if when != "before a step, attached later":
        local.attach(optimizer)
    (optimizer.register_step_post_hook if when == "after a step" else optimizer.register_step_pre_hook)(hook)
    local.attach(optimizer)
    train(state, 4)
    local.close()
    refused = [number for number, save in saves.items() if isinstance(save.error(), TornSnapshot)]
    assert len(saves) == 4 and committed(spool) == [number for number in saves if number not in refused]
    assert not refused or when == "before a step"
    for number in committed(spool):
        check(spool, number, references[number])


# -- signals, interrupts, forks ---------------------------------------------------------------------------------------


def after(seconds: float, handler) -> None:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def test_a_signal_handler_may_save_while_a_step_waits(spool, local, job, pace):
    """And the step that it came in the way of waits for that save too."""
    backward(job)
    reference, saves = frozen(job), []

    def handler(*_) -> None:
        pace.free(1)
        saves.append(local.save(2, job))
        later(0.1, pace.free, 2)

    saves.append(local.save(1, job))
    pace.reached(1)
    after(0.1, handler)
    job["optimizer"].step()
    for save in saves:
        save.wait(timeout=20)
    for number in (1, 2):
        check(spool, number, reference)


def test_an_interrupt_while_a_step_waits_leaves_the_save_as_it_was(spool, local, job, pace):
    backward(job)
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    after(0.05, interrupt)
    with pytest.raises(KeyboardInterrupt):
        job["optimizer"].step()
    later(0.05, pace.free, 1)
    job["optimizer"].step()  # it still waits
    save.wait(timeout=20)
    check(spool, 1, reference)


@pytest.mark.parametrize("where", ["while save waits", "before save waits"])
def test_an_interrupted_save_is_no_checkpoint_and_holds_no_step(spool, local, job, monkeypatch, where):
    real = Snapshot._begin

    def begin(snapshot, into, names):
        time.sleep(0.2)
        return real(snapshot, into, names)

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "_begin", begin)
        if where == "while save waits":
            after(0.1, interrupt)
        else:
            patch.setattr(local._gate, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            local.save(1, job)
        for buffer in job["model"].buffers():
            buffer.zero_()
        local._pipeline.drain()
    assert not committed(spool)
    train(job)
    reference = frozen(job)
    local.save(1, job).wait(timeout=20)
    check(spool, 1, reference)


def test_an_interrupt_while_a_blocking_save_encodes_leaves_no_torn_checkpoint(spool, local, monkeypatch):
    """The thread that trains may have work of its own while the copy runs: it can be interrupted there as well."""
    state, begin, tree = fresh(), Snapshot._begin, Capture.tree

    def slow(*arguments):
        time.sleep(0.2)
        return begin(*arguments)

    def interrupted(capture):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return tree(capture)

    reference = frozen(state)
    monkeypatch.setattr(Snapshot, "_begin", slow)
    monkeypatch.setattr(Capture, "tree", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        local.save(1, state)
    for tensor in state["model"].state_dict().values():
        tensor.zero_()
    local._pipeline.drain()
    if committed(spool):
        check(spool, 1, reference)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_step_in_a_forked_child_waits_for_nothing(spool, local, job, pace):
    """Its copy of the gate is as it was at the fork, and nobody copies there."""
    reference = frozen(job)
    save = local.save(1, job)
    pace.reached(1)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            torch.set_num_threads(1)  # OpenMP's others, if a test before has made them, are not there after a fork
            job["optimizer"].step()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pace.free(1)
    save.wait(timeout=20)
    check(spool, 1, reference)
