"""`Reader.live`: newer weights arrive by the head, verified and only as far as they differ, and never older ones."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.doubles import Double, is_chunk
from support.live_history import Publisher, bits
from support.saved import ReadOnly
from support.world import RUN, Daemon, attempt, hurry, part
from support.writers import head

import tierd
from tierd.core.errors import ConfigError, CorruptChunk, StateMismatch, StoreUnavailable
from tierd.core.ids import head_key
from tierd.reading import Reader
from tierd.reading.live_weights import LiveWeights
from tierd.stores.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def small_chunks_are_shared(monkeypatch):
    hurry(monkeypatch)


class Calm(random.Random):
    """Draws neither an encrypted tier, nor a second one, nor a kill."""

    def random(self) -> float:
        return 0.99

    def choice(self, options):
        return options[0]

    def randint(self, low, high):
        return high


@pytest.fixture
def publisher(tmp_path) -> Publisher:
    torch.manual_seed(0)
    made = Publisher(tmp_path, Calm(), Counter())
    made.publish()
    return made


def follow(publisher: Publisher, state=None, period_s=None, **options) -> tuple[Double, Reader, LiveWeights]:
    double = Double(ReadOnly(publisher.tiers[0]))
    reader = Reader({"tier": double}, RUN)
    return double, reader, reader.live(state, only="model", period_s=period_s, **options)


def zeros(publisher: Publisher) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in publisher.weights.items()}


def test_newer_step_costs_a_get_and_no_listing(publisher):
    model = zeros(publisher)
    double, reader, live = follow(publisher, model)
    with reader, live:
        assert live.checkpoint is None and live.problem
        first = live.update()
        assert first.tensors.keys() == model.keys() and bits(model) == bits(publisher.weights)
        double.calls.clear()
        assert live.update() is None and not live.problem
        assert double.calls == [("get", head_key(RUN, "0badcafe"))]
        publisher.publish()
        double.calls.clear()
        update = live.update()
        assert update.step == 2 and bits(model) == bits(publisher.weights)
        assert update.tensors.keys() == {"rows.weight", "count"} and update.abandoned is None
        assert 0 < update.fetched_bytes < first.fetched_bytes / 2
        assert not [key for operation, key in double.calls if operation == "scan"]


def test_follower_applies_a_delta_to_the_chunk_that_it_holds(publisher):
    double, reader, live = follow(publisher)
    with reader, live:
        live.update()
        old = [key for key in publisher.tiers[0].keys if is_chunk(key)]
        publisher.publish()
        for key in old:  # so nothing but the delta can be read
            content, number = publisher.tiers[0].objects[key]
            publisher.tiers[0].objects[key] = bytes(len(content)), number
        update = live.update()
        assert bits(update.tensors).items() <= bits(publisher.weights).items() and update.step == 2
        assert any(".delta" in key for operation, key in double.calls if operation == "get")


def test_follower_whose_memory_changed_fetches_the_base(publisher):
    model = zeros(publisher)
    _, reader, live = follow(publisher, model)
    with reader, live:
        live.update().tensors["rows.weight"].fill_(0)  # which nobody may do
        publisher.publish()
        live.update()
        assert bits(model) == bits(publisher.weights)


@pytest.mark.parametrize(
    "content", [b"", b"{}", head(attempt(1), by="0badcafe"), None], ids=["empty", "torn", "lies", "missing"]
)
def test_head_is_a_hint_alone(publisher, content):
    model = zeros(publisher)
    _, reader, live = follow(publisher, model)
    with reader, live:
        live.update()
        tier, key = publisher.tiers[0], head_key(RUN, "0badcafe")
        right = tier.objects[key]
        if content is None:
            asyncio.run(tier.delete([key]))
        else:
            tier.objects[key] = content, 0
        assert live.update() is None and live.checkpoint.step == 1
        for _ in range(7):  # a head keeps the largest step that it has named, which the lie made 7
            publisher.publish()
        assert live.update().step == 8 and bits(model) == bits(publisher.weights)
        asyncio.run(tier.put(key, right[0]))  # an older one
        assert live.update() is None and live.checkpoint.step == 8


def test_update_names_the_checkpoint_that_a_rolled_back_trainer_abandoned(publisher):
    model = zeros(publisher)
    for _ in range(3):
        publisher.publish()
    _, reader, live = follow(publisher, model)
    with reader, live:
        abandoned = part(4).checkpoint
        assert (live.update().step, live.checkpoint) == (4, abandoned)
        publisher.relaunch(part(2).checkpoint)
        publisher.publish()
        update = live.update()
        assert (update.step, update.attempt, update.abandoned) == (3, attempt(2), abandoned)
        assert bits(model) == bits(publisher.weights)


def test_checkpoint_that_vanished_without_a_newer_launch_is_kept(publisher):
    publisher.publish()
    model = zeros(publisher)
    _, reader, live = follow(publisher, model)
    with reader, live:
        live.update()
        tier = publisher.tiers[0]
        gone = [key for key in tier.keys if part(2).checkpoint.name in key or "/timeline/" in key]
        asyncio.run(tier.delete(gone))
        assert live.update() is None
        assert live.checkpoint.step == 2 and "kept here" in live.problem and bits(model) == bits(publisher.weights)


def test_chunk_that_does_not_verify_is_not_applied(publisher):
    model = zeros(publisher)
    _, reader, live = follow(publisher, model)
    with reader, live:
        live.update()
        before, held = bits(model), set(publisher.tiers[0].keys)
        publisher.publish()
        for key in set(publisher.tiers[0].keys) - held:
            if is_chunk(key):
                content, number = publisher.tiers[0].objects[key]
                publisher.tiers[0].objects[key] = content[:-1] + bytes([content[-1] ^ 1]), number
        for _ in range(2):
            assert live.update() is None and bits(model) == before
            assert "step 2" in live.problem
        publisher.publish()
        publisher.train(everything=True)
        publisher.publish()
        assert live.update() is not None and bits(model) == bits(publisher.weights) and not live.problem


def test_tier_that_does_not_answer_keeps_weights_and_is_asked_again(publisher):
    model = zeros(publisher)
    double, reader, live = follow(publisher, model)
    with reader, live:
        live.update()
        publisher.publish()
        double.error = StoreUnavailable("no answer")
        assert live.update() is None and "no answer" in live.problem
        double.error = None
        assert live.update().step == 2 and not live.problem


def test_followers_of_one_node_fetch_each_object_once(publisher, tmp_path):
    fetched = []
    for _ in range(3):
        _, reader, live = follow(publisher, cache=tmp_path / "cache")
        with reader, live:
            fetched.append(live.update().fetched_bytes)
    assert fetched[0] > 0 and fetched[1:] == [0, 0]
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(b"damaged" + file.read_bytes()[7:])
    _, reader, live = follow(publisher, cache=tmp_path / "cache")
    with reader, live:
        update = live.update()
        assert bits(update.tensors) == bits(publisher.weights) and update.fetched_bytes == fetched[0]


def test_cache_that_others_may_write_to_is_refused(publisher, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with Reader({"tier": publisher.tiers[0]}, RUN) as reader, pytest.raises(ConfigError, match="others may write"):
        reader.live(cache=tmp_path / "open")


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("bias", torch.zeros(8), r"\[7\] in the checkpoint"),
        ("bias", torch.zeros(7).bfloat16(), "float32"),
        ("other", torch.zeros(7), "other not in the checkpoint"),
    ],
)
def test_state_of_another_form_is_refused_and_unchanged(publisher, name, tensor, reason):
    model = {**zeros(publisher), name: tensor}
    _, reader, live = follow(publisher, model)
    with reader, live:
        for _ in range(2):
            with pytest.raises(StateMismatch, match=reason):
                live.update()
        assert not any(tensor.any() for tensor in model.values())


def test_interrupted_update_is_repeated_whole(publisher, monkeypatch):
    model = zeros(publisher)
    _, reader, live = follow(publisher, model)
    with reader, live:
        live.update()
        publisher.publish()
        copy = torch.Tensor.copy_
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", lambda target, source: copy(target, source + 1))
            with pytest.raises(CorruptChunk, match="after it was copied"):
                live.update()
        update = live.update()
        assert update.tensors.keys() == publisher.weights.keys()
        assert bits(model) == bits(publisher.weights)


def test_no_update_happens_inside_paused(publisher):
    model = zeros(publisher)
    _, reader, live = follow(publisher, model, period_s=0.01)
    with reader, live:
        assert live.update(wait_s=60).step == 1
        publisher.publish()
        with live.paused(), live.paused():
            with pytest.raises(ConfigError, match="paused"):
                while live.update(wait_s=60) is None:
                    pass
            updating = threading.Thread(target=live.update, args=[60])
            updating.start()
            updating.join(0.2)
            assert live.checkpoint.step == 1 and bits(model) != bits(publisher.weights)
        updating.join(60)
        assert live.checkpoint.step == 2 and bits(model) == bits(publisher.weights)


def test_module_follows_a_trainer_through_its_daemon(tmp_path: Path):
    store = MemoryStore()
    trained, served = (torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 7)) for _ in range(2))
    trained[1].bias = served[1].bias = None
    with Daemon(tmp_path, {"tier": store}) as daemon, tierd.Checkpointer(tmp_path, RUN) as ckpt:
        reader = Reader({"tier": ReadOnly(store)}, RUN)
        with reader, reader.live(served, only="model", period_s=0.01) as live:
            for step, update in zip(range(1, 4), steps_of(ckpt, trained, live), strict=False):
                assert update.step == step
                assert all(
                    torch.equal(ours, theirs)
                    for ours, theirs in zip(served.parameters(), trained.parameters(), strict=True)
                )
        daemon.settle()


def steps_of(ckpt, model, live):
    """Train a step at a time, and yield the update that brings each."""
    for step in range(1, 4):
        with torch.no_grad():
            model[0].weight += 1
        ckpt.save(step, {"model": model})
        while (update := live.update(wait_s=60)) is None:
            pass
        yield update
