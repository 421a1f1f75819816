"""Replicated tensors: each rank of a node stores its share, all ranks together everything, and a restore gets all."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

import pytest
import torch
from support.ranks import Group
from support.state_digests import state_digest

import tierd
from tierd.client.checkpointer import internals
from tierd.core.errors import ConfigError, SaveFailed, StateMismatch, StateRefused
from tierd.spool.spool import Spool

_SIZES = {"a": 9000, "b": 8000, "c": 5000, "d": 4000, "tiny": 3}  # elements


def state_of(rank: int, step: int, more: int = 0) -> dict:
    model = {name: torch.full((size,), float(step)) + torch.arange(size) for name, size in _SIZES.items()}
    model |= {f"more{number}": torch.full((3000,), float(step)) for number in range(more)}
    return {"model": model, "own": torch.full((2000,), float(100 * rank + step)), "epoch": step}


def is_state_of(state: dict, rank: int, step: int) -> bool:
    expected = state_of(rank, step)
    return (
        state["epoch"] == step
        and torch.equal(state["own"], expected["own"])
        and state["model"].keys() == expected["model"].keys()
        and all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    )


@pytest.fixture
def launch(monkeypatch):
    """Return a function that runs `work(checkpointer, rank)` on each rank of a launch, in a thread for each rank."""

    def run(world: int, spools: list[Path], work, **options) -> list:
        group = Group(world).install(monkeypatch)

        def work_on_rank(rank: int):
            spool = spools[rank * len(spools) // world]
            with tierd.Checkpointer(spool, "run", to=[], replicated=("model",), **options) as checkpointer:
                return work(checkpointer, rank)

        return group.run(work_on_rank)

    return run


def saving(*steps: int, more: dict[int, int] | None = None):
    def work(checkpointer, rank):
        for step in steps:
            checkpointer.save(step, state_of(rank, step, (more or {}).get(rank, 0))).wait()

    return work


def restoring(fresh: tuple[str, ...] = (), only=None):
    def work(checkpointer, rank):
        state = state_of(rank, 10**6)
        restored = checkpointer.restore(state, fresh=fresh, only=only)
        return restored.step, state

    return work


def tensor_bytes(spool: Path, step: int) -> list[int]:
    return [path.stat().st_size for path in sorted(spool.glob(f"run/{step:012}.*/*/tensors.safetensors"))]


def test_ranks_of_a_node_store_replicated_tensors_once(tmp_path, launch):
    assert launch(4, [tmp_path], saving(1, 2)) == [None] * 4
    replicated = 4 * sum(_SIZES.values())
    for step in (1, 2):
        sizes = tensor_bytes(tmp_path, step)
        assert len(sizes) == 4 and sum(sizes) <= replicated + 4 * (4 * 2000 + 4096 + 64)
    for rank, (step, state) in enumerate(launch(4, [tmp_path], restoring())):
        assert step == 2 and is_state_of(state, rank, 2)


def test_each_node_stores_replicated_tensors_whole(tmp_path, launch):
    spools = [tmp_path / "a", tmp_path / "b"]
    assert launch(4, spools, saving(1)) == [None] * 4
    for spool in spools:
        assert len(tensor_bytes(spool, 1)) == 2 and sum(tensor_bytes(spool, 1)) >= 4 * sum(_SIZES.values())
    parts = Spool(spools[1]).parts("run")
    homes = {chunk.home for part in parts for chunk in Spool(spools[1]).manifest(part).chunks()}
    assert homes <= {None, 0}, "the lowest rank of the launch is the home, on every node"
    for rank, (step, state) in enumerate(launch(4, spools, restoring())):
        assert step == 1 and is_state_of(state, rank, 1)


def test_manifest_has_the_number_of_nodes_that_hold_the_shared_chunks(tmp_path, launch):
    spools = [tmp_path / "first", tmp_path / "second"]
    launch(4, spools, saving(1))
    manifests = {part.rank: spool.manifest(part) for spool in map(Spool, spools) for part in spool.parts("run")}
    assert [manifests[rank].senders for rank in range(4)] == [
        *([{0: (0, 2, True)}] * 2),
        *([{0: (1, 2, True)}] * 2),
    ]
    launch(3, [tmp_path / "uneven", tmp_path / "other"], saving(1))
    uneven = Spool(tmp_path / "uneven")
    assert {uneven.manifest(part).senders[0] for part in uneven.parts("run")} == {(0, 2, False)}
    launch(2, [tmp_path / "alone"], saving(1))
    alone = Spool(tmp_path / "alone")
    assert all(not alone.manifest(part).senders for part in alone.parts("run"))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_replicated_entries_restore_on_any_number_of_ranks(tmp_path, launch, world):
    launch(4, [tmp_path], saving(1, 2))
    for rank, (step, state) in enumerate(launch(world, [tmp_path], restoring(fresh=("own",)))):
        value = 100 * rank + (2 if rank < 4 else 10**6)  # a new rank keeps the tensor that it had
        assert step == 2 and torch.equal(state["own"], torch.full((2000,), float(value)))
        assert is_state_of(state | {"own": state_of(rank, 2)["own"]}, rank, 2)


def test_other_number_of_ranks_is_refused_alike_if_entries_differ(tmp_path, launch):
    launch(4, [tmp_path], saving(1))
    for refusal in launch(3, [tmp_path], restoring()):
        assert isinstance(refusal, StateMismatch) and '"own"' in str(refusal) and "fresh=['own']" in str(refusal)


def test_checkpoint_of_one_rank_restores_replicated_entries_on_several(tmp_path, launch):
    launch(1, [tmp_path], saving(1))
    for rank, (step, state) in enumerate(launch(3, [tmp_path], restoring(fresh=("own",)))):
        assert step == 1 and is_state_of(state | {"own": state_of(rank, 1)["own"]}, rank, 1)


def test_restore_of_some_entries_follows_them_into_other_parts(tmp_path, launch):
    launch(4, [tmp_path], saving(1))
    for rank, (_, state) in enumerate(launch(4, [tmp_path], restoring(only=("model",)))):
        assert is_state_of(state | {"own": state_of(rank, 1)["own"], "epoch": 1}, rank, 1)
        assert torch.equal(state["own"], state_of(rank, 10**6)["own"])


def test_launch_continues_on_another_number_of_ranks_and_back(tmp_path, launch):
    launch(4, [tmp_path], saving(1))

    def continuing(step):
        def work(checkpointer, rank):
            state = state_of(rank, 10**6)
            restored = checkpointer.restore(state, fresh=("own",))
            assert is_state_of(state | {"own": state_of(rank, restored.step)["own"]}, rank, restored.step)
            checkpointer.save(step, state_of(rank, step)).wait()
            return restored.step

        return work

    assert launch(2, [tmp_path], continuing(2)) == [1] * 2
    assert launch(5, [tmp_path], continuing(3)) == [2] * 5
    assert launch(4, [tmp_path], continuing(4)) == [3] * 4


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_divide_different_states_fail_and_store_everything_next(tmp_path, launch, first):
    """Nobody can restore the first checkpoints; from the third one on each rank stores all that it has. A rank that
    always commits before the other one notices it at its next save.
    """
    together, first_saved = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    errors: dict[int, list[str]] = {0: [], 1: []}

    def work(checkpointer, rank):
        for step in (1, 2, 3):
            if rank != first:
                first_saved.wait()
            try:
                checkpointer.save(step, state_of(rank, step, more=rank)).wait()
            except SaveFailed as error:
                errors[rank].append(str(error))
            if rank == first:
                first_saved.wait()
            together.wait()

    assert launch(2, [tmp_path], work) == [None] * 2
    assert errors[1 - first] and "step 1 " in errors[1 - first][0] and "model/more0 is declared" in errors[1 - first][0]
    whole = 4 * sum(_SIZES.values())
    assert all(size >= whole for size in tensor_bytes(tmp_path, 3))
    assert launch(2, [tmp_path], lambda checkpointer, rank: checkpointer.restore(state_of(rank, 0, rank)).step) == [
        3,
        3,
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_save_fails_if_one_rank_alone_has_a_replicated_entry(tmp_path, launch, first):
    """The rank that has it left some of its tensors to the other one, which stores nothing of them."""
    together, first_saved = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    failed: list[tuple[int, int]] = []

    def state(rank: int, step: int) -> dict:
        return {name: value for name, value in state_of(rank, step).items() if rank == 0 or name != "model"}

    def work(checkpointer, rank):
        for step in (1, 2, 3):
            if rank != first:
                first_saved.wait()
            try:
                checkpointer.save(step, state(rank, step)).wait()
            except SaveFailed as error:
                assert "model" in str(error)
                failed.append((rank, step))
            if rank == first:
                first_saved.wait()
            together.wait()

    assert launch(2, [tmp_path], work) == [None] * 2
    assert (1 - first, 1) in failed and not any(step == 3 for _, step in failed)

    def restore(checkpointer, rank):
        mine = state(rank, 50)
        assert checkpointer.restore(mine).step == 3
        return mine

    mine = launch(2, [tmp_path], restore)[0]
    assert all(torch.equal(mine["model"][name], tensor) for name, tensor in state_of(0, 3)["model"].items())


@pytest.mark.parametrize("first", [0, 1])
def test_launch_that_saves_one_checkpoint_of_different_states_fails(tmp_path, launch, first):
    """A later launch restores the checkpoint before."""
    first_saved = threading.Barrier(2, timeout=60)

    def work(checkpointer, rank):
        checkpointer.restore(state_of(rank, 0))
        if rank != first:
            first_saved.wait()
        save = checkpointer.save(2, state_of(rank, 2, more=rank))
        with contextlib.suppress(SaveFailed):
            save.wait()
        if rank == first:
            first_saved.wait()

    assert launch(2, [tmp_path], saving(1)) == [None] * 2
    results = launch(2, [tmp_path], work)
    assert isinstance(results[1 - first], SaveFailed) and "model/more0" in str(results[1 - first])
    assert [step for step, _ in launch(2, [tmp_path], restoring())] == [1, 1]


@pytest.mark.parametrize("world", [2, 6])
def test_own_entries_do_not_hinder_restore_of_replicated_entries_alone(tmp_path, launch, world):
    launch(4, [tmp_path], saving(1))
    for rank, (_, state) in enumerate(launch(world, [tmp_path], restoring(only=("model", "epoch")))):
        assert is_state_of(state | {"own": state_of(rank, 1)["own"]}, rank, 1)
        assert torch.equal(state["own"], state_of(rank, 10**6)["own"])


def test_new_rank_gets_entry_that_is_equal_on_all_ranks_also_if_it_is_named_as_fresh(tmp_path, launch):
    launch(2, [tmp_path], saving(1))
    restored = launch(3, [tmp_path], restoring(fresh=("own", "epoch", "model")))
    assert [state["epoch"] for _, state in restored] == [1, 1, 1]


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_rank_gets_its_own_entries_though_other_ranks_have_others(tmp_path, launch, holder, world):
    """For example rank 0 alone, which keeps the history of losses."""

    def state(rank: int, step: int) -> dict:
        return state_of(rank, step) | ({"history": [step], "best": torch.full((9,), step)} if rank == holder else {})

    launch(3, [tmp_path], lambda checkpointer, rank: checkpointer.save(1, state(rank, 1)).wait())

    def work(checkpointer, rank):
        mine = state(rank, 50)
        checkpointer.restore(mine, fresh=("own", "history", "best"))
        return mine

    for rank, mine in enumerate(launch(world, [tmp_path], work)):
        assert is_state_of(mine | {"own": state_of(rank, 1)["own"]}, rank, 1)
        assert mine.keys() == state(rank, 1).keys()
        assert rank != holder or (mine["history"], mine["best"][0]) == ([1], 1)


@pytest.mark.parametrize("declared", ["model", "model/ema"])
def test_own_entry_named_below_a_replicated_entry_is_not_divided(tmp_path, launch, declared):
    """Tensors are named by their path, so those of "model/ema" looked like tensors of "model"."""

    def state(rank: int, step: int) -> dict:
        own = {name: torch.full((size,), float(100 * rank + step)) for name, size in _SIZES.items()}
        alike = {name: torch.full((size,), float(step)) for name, size in _SIZES.items()}
        pair = (alike, own) if declared == "model" else ({"ema": own}, alike["a"])
        return dict(zip(("model", "model/ema"), pair, strict=True))

    def work(checkpointer, rank):
        with tierd.Checkpointer(tmp_path / "other", "run", to=[], replicated=(declared,)) as other:
            other.save(1, state(rank, 1)).wait()
            mine = state(50, 50)
            other.restore(mine)
            return mine

    for rank, mine in enumerate(launch(3, [tmp_path], work)):
        assert state_digest(mine) == state_digest(state(rank, 1))


def test_buffers_of_modules_in_a_replicated_entry_are_each_ranks_own(tmp_path, launch):
    """As of a generator and a discriminator in one entry: those of a module that is itself an entry always were."""

    def state(rank: int) -> dict:
        norms = [torch.nn.BatchNorm1d(3000) for _ in range(3)]
        for norm in norms:
            norm.running_mean.fill_(rank)
        return {"model": {"first": norms[0], "rest": [norms[1], (norms[2],)]}}

    launch(2, [tmp_path], lambda checkpointer, rank: checkpointer.save(1, state(rank)).wait())

    def work(checkpointer, rank):
        mine = state(50)
        checkpointer.restore(mine)
        first, (second, (third,)) = mine["model"]["first"], mine["model"]["rest"]
        return [norm.running_mean[0].item() for norm in (first, second, third)]

    assert launch(2, [tmp_path], work) == [[0.0] * 3, [1.0] * 3]


def test_restore_knows_entries_that_an_adapter_declared(tmp_path, launch):
    """A Trainer of one rank that goes on with two: resume declares its model between `Checkpointer` and restore."""

    def state(step: int) -> dict:
        return {"weights": torch.full((3000,), float(step)), "epoch": step}

    launch(1, [tmp_path], lambda checkpointer, rank: checkpointer.save(1, state(1)).wait())

    def work(checkpointer, rank):
        mine = state(50)
        internals(checkpointer).state_saver.declare(("weights",))
        checkpointer.restore(mine)
        return mine["weights"][0].item(), mine["epoch"]

    assert launch(2, [tmp_path], work) == [(1.0, 1)] * 2


def test_ranks_of_which_one_lacks_saves_compare_the_same_tensors(tmp_path, launch):
    """Only saves that were taken counted, so after one that was skipped or refused, no tensor was compared."""
    steps = range(32)

    def work(checkpointer, rank):
        for step in steps:
            if rank == 0 and step in (3, 4, 11):
                with pytest.raises(StateRefused):
                    checkpointer.save(step, {"model": {"a": object()}})
            else:
                checkpointer.save(step, state_of(rank, step)).wait()

    assert launch(2, [tmp_path], work) == [None] * 2
    spool = Spool(tmp_path)
    compared: dict[int, list[list[str]]] = {}
    for part in spool.parts("run"):
        compared.setdefault(part.checkpoint.step, []).append(sorted(spool.manifest(part).replicas))
    pairs = [names for names in compared.values() if len(names) == 2]
    assert len(pairs) == 29 and all(first == second for first, second in pairs)


def test_damaged_share_makes_all_ranks_fall_back(tmp_path, launch):
    launch(4, [tmp_path], saving(1, 2))
    broken = sorted(tmp_path.glob("run/000000000002.*/00002-of-00004/tensors.safetensors"))[0]
    data = bytearray(broken.read_bytes())
    data[-5000] ^= 1
    broken.write_bytes(data)
    for rank, (step, state) in enumerate(launch(4, [tmp_path], restoring())):
        assert step == 1 and is_state_of(state, rank, 1)


def saving_with_flips(steps: range, flipped: set[int]):
    """Save on each rank; at the `flipped` steps the last of three ranks holds other bits of every replicated tensor."""

    def work(checkpointer, rank):
        for step in steps:
            state = state_of(rank, step, more=60)  # so that each save compares some
            if step in flipped and rank == 2:
                for tensor in state["model"].values():
                    tensor.view(torch.int32)[0] ^= 1
            checkpointer.save(step, state).wait()

    return work


def restored_steps(launch, spool: Path, world: int, **options) -> list:
    def work(checkpointer, rank):
        restored = checkpointer.restore(state_of(rank, 10**6, more=60), fresh=("own",))
        return restored.step, [str(skip) for skip in restored.skipped]

    return launch(world, [spool], work, **options)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_restore_passes_over_checkpoints_whose_replicas_differ_if_it_is_to(tmp_path, launch, world):
    launch(3, [tmp_path], saving_with_flips(range(1, 6), {4, 5}))
    assert [step for step, _ in restored_steps(launch, tmp_path, world)] == [5] * world
    results = restored_steps(launch, tmp_path, world, prefer_equal_replicas=True)
    if world == 2:  # the rank whose bits differ is not there
        assert [step for step, _ in results] == [5] * world
        return
    assert [step for step, _ in results] == [3] * world
    for _, skipped in results:
        assert [skip.partition(" (")[0] for skip in skipped] == ["step 5", "step 4"]
        assert all("its ranks hold different replicas" in skip and "rank 2 differs" in skip for skip in skipped)


def test_newest_checkpoint_is_restored_with_a_warning_if_all_have_replicas_that_differ(tmp_path, launch, caplog):
    launch(3, [tmp_path], saving_with_flips(range(1, 4), {1, 2, 3}))
    caplog.clear()
    assert [step for step, _ in restored_steps(launch, tmp_path, 3, prefer_equal_replicas=True)] == [3] * 3
    assert "step 3" in caplog.text and "is restored although its replicas differ" in caplog.text


def test_step_that_was_asked_for_is_restored_though_its_replicas_differ(tmp_path, launch):
    launch(3, [tmp_path], saving_with_flips(range(1, 3), {2}))

    def work(checkpointer, rank):
        return checkpointer.restore(state_of(rank, 10**6, more=60), step=2).step

    assert launch(3, [tmp_path], work, prefer_equal_replicas=True) == [2, 2, 2]


@pytest.mark.parametrize("names", ["model", [1], [None]])
def test_replicated_has_to_be_names(tmp_path, names):
    with pytest.raises(ConfigError, match="names of entries"):
        tierd.Checkpointer(tmp_path, "run", to=[], replicated=names)


def test_ranks_compare_every_replicated_tensor_in_turn(tmp_path, launch):
    steps = range(32)
    launch(2, [tmp_path], saving(*steps))
    spool = Spool(tmp_path)
    taken = []
    for step in steps:
        first, second = (spool.manifest(part).replicas for part in spool.parts("run") if part.checkpoint.step == step)
        assert first == second
        taken += first
    assert sorted(taken) == sorted(f"model/{name}" for name in _SIZES)


@pytest.mark.parametrize("tensor", ["c", "tiny"])
def test_flipped_bit_of_a_replica_shows_in_the_fingerprints_of_its_rank(tmp_path, launch, tensor):
    """The daemon compares them: tests/daemon has that half."""

    def work(checkpointer, rank):
        for step in range(32):
            state = state_of(rank, 7)
            if rank == 2:
                state["model"][tensor].view(torch.int32)[_SIZES[tensor] // 2] ^= 1 << 30
            checkpointer.save(step, state).wait()

    launch(3, [tmp_path], work)
    spool = Spool(tmp_path)
    seen: dict[str, list[set[str]]] = {}
    for part in spool.parts("run"):
        for name, fingerprint in spool.manifest(part).replicas.items():
            seen.setdefault(name, [set(), set(), set()])[part.rank].add(fingerprint)
    assert [name for name, ranks in seen.items() if not ranks[0] == ranks[1] == ranks[2]] == [f"model/{tensor}"]
    first, second, flipped = seen[f"model/{tensor}"]
    assert first == second != flipped


def test_log_names_equal_entries_that_each_rank_stores(tmp_path, monkeypatch, caplog):
    def state(rank: int) -> dict:
        return {
            "model": {"a": torch.ones(1 << 19), "b": torch.ones(5)},
            "ema": torch.zeros(1 << 19),
            "own": torch.full((1 << 19,), rank),
            "few": torch.ones(9000),
            "declared": {str(number): torch.ones(1000) for number in range(300)},
        }

    together = threading.Barrier(3, timeout=60)

    def work(rank: int) -> None:
        with tierd.Checkpointer(tmp_path, "run", to=[], replicated=("declared",)) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, state(rank)).wait()
                together.wait()

    with caplog.at_level(logging.WARNING, "tierd"):
        assert Group(3).install(monkeypatch).run(work) == [None] * 3
    (advice,) = {record.message for record in caplog.records if "stored them" in record.message}
    assert (
        "Checkpointer(replicated=('ema', 'model'))" in advice or "Checkpointer(replicated=('model', 'ema'))" in advice
    )


def test_log_names_replicated_entries_that_the_state_lacks(tmp_path, caplog):
    with (
        caplog.at_level(logging.WARNING, "tierd"),
        tierd.Checkpointer(tmp_path, "run", to=[], replicated=("model", "modle")) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save(step, {"model": torch.ones(5)}).wait()
        assert checkpointer.restore({"model": torch.ones(5)}, fresh=None) is not None
    assert [record.message for record in caplog.records if "modle" in record.message] == [
        "run run: `replicated` names modle, which the state does not have"
    ]
