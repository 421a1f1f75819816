"""Each rank gets its own dataset state back and goes on with the very next sample; what does not fit is named."""

from __future__ import annotations

import copy
import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.seeds import examples
from support.state_files import flatten
from support.training import through
from support.world import attempt
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import tierd
from tierd.core.errors import StateMismatch, StateRefused
from tierd.state.capturer import Capturer
from tierd.state.kinds import loader_arguments
from tierd.state.kinds.loader_fingerprint import state_dict_with_arguments
from tierd.state.load_check import check_fit
from tierd.state.state_loading import load_restored, unflatten

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")
WORLD = 3


def shuffled(n: int, seed: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


# ---- pipelines as people have them


class Numbers(Dataset):
    def __init__(self, n=60):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return index


class RankSampler(Sampler):
    """Every rank's share of a permutation that the epoch decides; knows where it is."""

    def __init__(self, n, rank, world_size, seed=0):
        self.n, self.rank, self.world_size, self.seed = n, rank, world_size, seed
        self.epoch = self.position = 0
        self._resumes = False

    def __iter__(self):
        if not self._resumes:
            self.position = 0
        self._resumes = False
        mine = shuffled(self.n, self.seed + self.epoch)[self.rank :: self.world_size]
        while self.position < len(mine):
            self.position += 1
            yield mine[self.position - 1]
        self.epoch += 1

    def __len__(self):
        return len(range(self.rank, self.n, self.world_size))

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumes = True


class Stream(IterableDataset):
    """Every rank's and every worker's share of a stream."""

    def __init__(self, n, rank, world_size, seed=0):
        self.n, self.rank, self.world_size, self.seed = n, rank, world_size, seed
        self.epoch = self.position = 0
        self._resumes = False

    def __iter__(self):
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker else (0, 1)
        if not self._resumes:
            self.position = 0
        self._resumes = False
        mine = shuffled(self.n, self.seed + self.epoch)[self.rank * of + number :: self.world_size * of]
        while self.position < len(mine):
            self.position += 1
            yield mine[self.position - 1]
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        self._resumes = True


class Silent(Stream):
    """The same, without a state: torchdata then counts, and skips."""

    state_dict = None
    load_state_dict = None


def sampled(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2):
    sampler = RankSampler(n, rank, world, seed)
    return StatefulDataLoader(Numbers(n), batch_size=batch, sampler=sampler, num_workers=workers)


def distributed(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2, shuffle=True, kind=StatefulDistributedSampler):
    dataset = Numbers(n)
    sampler = kind(dataset, world, rank, shuffle=shuffle, seed=seed)
    return StatefulDataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)


def drawn(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2, shuffle=True):
    """Every rank's own subset, shuffled by torchdata."""
    mine = Subset(Numbers(n), range(rank, n, world))
    generator = torch.Generator().manual_seed(seed + rank)
    return StatefulDataLoader(mine, batch_size=batch, shuffle=shuffle, num_workers=workers, generator=generator)


def streamed(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2, kind=Stream):
    return StatefulDataLoader(kind(n, rank, world, seed), batch_size=batch, num_workers=workers)


def counted(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2):
    return streamed(rank, world, seed, n, workers, batch, kind=Silent)


def noded(rank=0, world=WORLD, seed=0, n=60, workers=0, batch=2, prefetch=2):
    node = nodes.SamplerWrapper(DistributedSampler(Numbers(n), world, rank, seed=seed))
    node = nodes.ParallelMapper(node, torch.tensor, num_workers=workers)
    node = nodes.Batcher(node, batch)
    node = nodes.Mapper(node, torch.stack)
    return nodes.Loader(nodes.Prefetcher(node, prefetch) if prefetch else node)


PIPELINES = [sampled, distributed, drawn, streamed, counted, noded]


def samples(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def taken(loader, count: int) -> tuple[Iterator, list[list[int]]]:
    iterator = iter(loader)
    return iterator, [next(iterator).tolist() for _ in range(count)]


# ---- every rank its own


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
def test_every_rank_continues_with_its_own_next_sample(spool, make: Callable, workers: int):
    """Ranks are interrupted at different places of an epoch; together they then see what nobody had seen."""
    before, expected = [], []
    for rank in range(WORLD):
        loader = make(rank, workers=workers)
        iterator, seen = taken(loader, 2 + 2 * rank)
        with tierd.Checkpointer(spool.root, "run", rank=rank, world_size=WORLD, attempt=attempt(1), to=[]) as saving:
            saving.save(1, {"data": loader, "seen": seen}).wait()
        before.append(seen)
        expected.append((samples(iterator), samples(loader)))  # the rest of this epoch, and the next
    assert len({str(rest) for rest, _ in expected}) == WORLD
    for rank in range(WORLD):
        state = {"data": make(rank, workers=workers), "seen": []}
        with tierd.Checkpointer(spool.root, "run", rank=rank, world_size=WORLD, attempt=attempt(2), to=[]) as resuming:
            assert resuming.restore(state).step == 1
        assert state["seen"] == before[rank]
        rest, following = samples(state["data"]), samples(state["data"])
        assert rest == expected[rank][0]
        if make is not drawn or workers:  # torchdata's own shuffling without workers is one draw behind from there on
            assert following == expected[rank][1]
    epoch = [one for seen, (rest, _) in zip(before, expected, strict=True) for batch in seen + rest for one in batch]
    assert sorted(epoch) == list(range(60))


def test_before_the_first_sample_and_after_the_last():
    for make in (sampled, drawn, streamed, noded):
        for count in (0, 10):
            loader = make(1)
            iterator, _ = taken(loader, count)
            saved = copy.deepcopy(loader.state_dict())
            state = {"data": make(1)}
            load_restored(state, through({"data": loader}))
            samples(iterator)
            alone = make(1)
            alone.load_state_dict(saved)
            assert samples(state["data"]) == samples(alone)


# ---- what does not fit


def refused(make, other) -> str:
    """The message; nothing was loaded, and nothing was started to find out."""
    loader = make()
    iterator, _ = taken(loader, 3)
    restored = through({"epoch": 7, "data": loader})
    samples(iterator)  # torchdata's threads end with it
    state = {"epoch": 0, "data": other()}
    running = multiprocessing.active_children()
    with pytest.raises(StateMismatch) as caught:
        load_restored(state, restored)
    assert multiprocessing.active_children() == running
    assert state["epoch"] == 0
    assert getattr(state["data"], "next_iter_state", None) is getattr(state["data"], "_iterator", None) is None
    assert str(caught.value).endswith(' (None in place of state["data"] takes what was saved)')
    return str(caught.value).removesuffix(' (None in place of state["data"] takes what was saved)')


def differs(where: str, name: str, there: object, here: object) -> str:
    return f'state["data"]{where}: {name}={there!r} in the checkpoint, {name}={here!r} here'


REFUSED = {
    "workers": (lambda: drawn(workers=2), lambda: drawn(workers=1), ("", "num_workers", 2, 1)),
    "workers, or none": (lambda: drawn(workers=2), lambda: drawn(), ("", "num_workers", 2, 0)),
    "none, or workers": (lambda: streamed(), lambda: streamed(workers=2), ("", "num_workers", 0, 2)),
    "batch size": (lambda: drawn(), lambda: drawn(batch=3), ("", "batch_size", 2, 3)),
    "dataset": (lambda: distributed(), lambda: distributed(n=57), (".dataset", "length", 60, 57)),
    "own sampler's dataset": (lambda: sampled(), lambda: sampled(n=57), (".dataset", "n", 60, 57)),
    "subset": (lambda: drawn(), lambda: drawn(world=4), (".dataset", "length", 20, 15)),
    "rank": (lambda: sampled(0), lambda: sampled(1), (".sampler", "rank", 0, 1)),
    "torch's rank": (lambda: distributed(0), lambda: distributed(1), (".sampler", "rank", 0, 1)),
    "rank of a stream": (lambda: streamed(0), lambda: streamed(1), (".dataset", "rank", 0, 1)),
    "rank in workers": (lambda: counted(0, workers=2), lambda: counted(1, workers=2), (".dataset", "rank", 0, 1)),
    "rank of nodes": (lambda: noded(0), lambda: noded(1), (".root.source.source.source.source.sampler", "rank", 0, 1)),
    "world": (lambda: distributed(), lambda: distributed(world=2), (".sampler", "num_replicas", 3, 2)),
    "world of a stream": (lambda: streamed(), lambda: streamed(world=2), (".dataset", "world_size", 3, 2)),
    "seed": (lambda: sampled(), lambda: sampled(seed=1), (".sampler", "seed", 0, 1)),
    "torch's seed": (lambda: distributed(), lambda: distributed(seed=1), (".sampler", "seed", 0, 1)),
    "shuffle": (lambda: distributed(), lambda: distributed(shuffle=False), (".sampler", "shuffle", True, False)),
    "a state where there was none": (lambda: counted(), lambda: streamed(), (".dataset", "stateful", False, True)),
    "batch size of nodes": (lambda: noded(), lambda: noded(batch=3), (".root.source.source", "batch_size", 2, 3)),
    "threads or none": (
        lambda: noded(workers=2),
        lambda: noded(),
        (".root.source.source.source", "parallel", True, False),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_difference_is_named_and_nothing_is_loaded(name):
    make, other, difference = REFUSED[name]
    assert differs(*difference) in refused(make, other).split("; ")


def test_another_kind_of_sampler_or_node_is_named():
    at = 'state["data"].sampler: '
    assert refused(drawn, lambda: drawn(shuffle=False)) == (
        f"{at}RandomSampler in the checkpoint, SequentialSampler here"
    )
    assert refused(lambda: drawn(shuffle=False), drawn) == (
        f"{at}SequentialSampler in the checkpoint, RandomSampler here"
    )
    assert refused(lambda: distributed(kind=DistributedSampler), distributed) == (
        f"{at}DistributedSampler in the checkpoint, StatefulDistributedSampler here"
    )
    assert refused(noded, lambda: noded(prefetch=0)) == (
        'state["data"].root: Prefetcher in the checkpoint, ParallelMapper here'
    )


def test_value_that_is_no_state_of_a_loader_is_refused_at_once():
    """torchdata would say so at the first batch, when everything else has been loaded."""
    for saved in ({"position": 3}, {"_snapshot": {}}, [1]):
        for make in (drawn, noded):
            with pytest.raises(StateMismatch, match=r'state\["data"\]: .*not the state of a torchdata\.'):
                check_fit({"data": make()}, through({"data": saved}))
    check_fit({"data": drawn()}, through({"data": {}}))  # torchdata takes it for a fresh start


def test_the_number_of_workers_is_in_the_state_itself():
    loader = drawn(workers=2)
    taken(loader, 1)
    with pytest.raises(StateMismatch, match=r'state\["data"\]: num_workers=2 in the checkpoint, num_workers=0 here'):
        check_fit({"data": drawn()}, through({"data": loader.state_dict()}))


def test_a_sampler_alone():
    def sampler(rank, n=60):
        return StatefulDistributedSampler(Numbers(n), 2, rank, seed=3)

    one = sampler(1)
    iterator = iter(one)
    for _ in range(7):
        next(iterator)
    saved = through({"sampler": one})
    state = {"sampler": sampler(1)}
    load_restored(state, saved)
    assert list(state["sampler"]) == list(iterator)
    for other, where in ((sampler(0), ": rank=1 in"), (sampler(1, 62), r"\.dataset: n=60 in")):
        with pytest.raises(StateMismatch, match=rf'state\["sampler"\]{where} the checkpoint'):
            check_fit({"sampler": other}, saved)


def test_the_how_to_quotes_the_message():
    with pytest.raises(StateMismatch) as caught:
        check_fit({"data": distributed(1)}, through({"data": distributed(0)}))
    assert (
        f"\n    {caught.value}\n"
        in (Path(tierd.__file__).parents[1] / "docs" / "howto" / "data-loaders.md").read_text()
    )


def test_one_difference_is_said_once():
    message = refused(lambda: distributed(n=60, batch=2), lambda: distributed(n=57, batch=3))
    assert message == "; ".join(
        (
            differs("", "batch_size", 2, 3),
            differs(".dataset", "n", 60, 57),
            differs(".dataset", "length", 60, 57),
        )
    )


made = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 1),
        "world": st.integers(2, 3),
        "seed": st.integers(0, 1),
        "n": st.sampled_from((40, 41)),
        "batch": st.integers(1, 2),
    }
)


@given(st.sampled_from((sampled, distributed, streamed, counted)), made, made, st.integers(0, 4))
@settings(max_examples=examples(60))
def test_loader_that_is_not_refused_continues_exactly(make, one, other, count):
    loader = make(**one)
    iterator, _ = taken(loader, count)
    state = {"data": make(**other)}
    try:
        load_restored(state, through({"data": loader}))
    except StateMismatch:
        assert one != other
    else:
        assert one == other
        assert samples(state["data"]) == samples(iterator)


# ---- datasets with a state of their own, as the guides for them describe


class Hidden:
    """Has its rank where no attribute says so."""

    def __init__(self, rank, fails=False, seed=0):
        self._where, self.seed = (rank, 0), seed
        self.fails, self.asked = fails, 0

    def __iter__(self):
        return iter(())

    def state_dict(self):
        self.asked += 1
        if self.fails:
            raise RuntimeError
        return {"rank": self._where[0], "position": self._where[1]}

    def load_state_dict(self, state):
        self._where = (self._where[0], state["position"])


def test_a_rank_that_only_the_state_names():
    with pytest.raises(StateMismatch, match=r'state\["data"\]: rank=0 in the checkpoint, rank=1 here'):
        check_fit({"data": Hidden(1)}, through({"data": Hidden(0)}))
    seeded = Hidden(0, seed=1)
    with pytest.raises(StateMismatch, match=r'state\["data"\]: seed=1 in the checkpoint, seed=2 here'):
        check_fit({"data": Hidden(0, fails=True, seed=2)}, through({"data": seeded}))
    state = {"data": Hidden(0, fails=True)}
    load_restored(state, through({"data": Hidden(0)}))
    assert state["data"].asked == 1


# ---- what goes on changing


class Moving:
    """Keeps what it was made with; its state is what `keys` name."""

    keys = ("at",)
    at = 0

    def state_dict(self):
        return {key: getattr(self, key) for key in self.keys}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Ramp(Moving):
    """Doubles its batch size."""

    keys = ("at", "batch_size")

    def __init__(self, dataset, batch_size, seed=0):
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed

    def __iter__(self):
        return self

    def __next__(self):
        first, self.at, self.batch_size = self.at, self.at + self.batch_size, 2 * self.batch_size
        return torch.arange(first, self.at)


class Buffer(Moving):
    """Grows, and counts what it has seen."""

    keys = ("size", "n", "_shard")

    def __init__(self, size, n=0, shard=0):
        self.size, self.n, self._shard = size, n, shard

    def __getitem__(self, index):
        raise IndexError


class LowRank(Moving):
    """Of a matrix."""

    keys = ("rank",)

    def __init__(self, rank):
        self.rank = rank

    def __getitem__(self, index):
        raise IndexError


class OfRank(LowRank):
    keys = ("rank", "_world_size")

    def __init__(self, rank, world_size=2):
        self.rank, self._world_size = rank, world_size


class Hides(LowRank):
    """Only its state says so."""

    def __init__(self, rank):
        self._columns = rank

    def state_dict(self):
        return {"rank": self._columns}


def test_attributes_that_the_state_of_an_object_restores_need_not_fit():
    ramp = Ramp(Numbers(), 8)
    next(ramp)
    state = {"data": Ramp(Numbers(), 8)}
    load_restored(state, through({"data": ramp}))
    assert next(state["data"]).tolist() == list(range(8, 24))
    with pytest.raises(
        StateMismatch, match=r'state\["data"\]: seed=0 in the .*\.dataset: n=60 in the checkpoint, n=61 '
    ):
        check_fit({"data": Ramp(Numbers(61), 8, seed=1)}, through({"data": ramp}))
    state = {"data": Buffer(8)}
    load_restored(state, through({"data": Buffer(16, n=5, shard=3)}))
    assert vars(state["data"]) == {"size": 16, "n": 5, "_shard": 3}


def test_a_low_rank_is_no_rank():
    for kind in (LowRank, Hides):
        state = {"data": kind(8)}
        load_restored(state, through({"data": kind(4)}))
        assert state["data"].rank == 4
    with pytest.raises(StateMismatch, match=r'state\["data"\]: rank=0 in the checkpoint, rank=1 here'):
        check_fit({"data": OfRank(1)}, through({"data": OfRank(0)}))


class Remaining(Moving, Sampler):
    """Its length is what it has left."""

    def __init__(self, total_samples):
        self.total_samples = total_samples

    def __iter__(self):
        while self.at < self.total_samples:
            self.at += 1
            yield self.at - 1

    def __len__(self):
        return self.total_samples - self.at


def test_length_of_the_remaining_samples_need_not_fit():
    one, state = Remaining(60), {"data": Remaining(60)}
    iterator = iter(one)
    assert [next(iterator) for _ in range(10)] == list(range(10))
    load_restored(state, through({"data": one}))
    assert list(state["data"]) == list(iterator)
    with pytest.raises(
        StateMismatch, match=r'state\["data"\]: total_samples=60 in the checkpoint, total_samples=61 here'
    ):
        check_fit({"data": Remaining(61)}, through({"data": one}))


class ShardAfterShard(Moving):
    """Opens one dataset after the other, and a loader over it."""

    keys = ("at", "opened")

    def __init__(self, sizes, rank=0):
        self.sizes, self.rank, self.opened = sizes, rank, 0
        self._open()

    def _open(self):
        self.current_dataset = Numbers(self.sizes[self.opened])
        self.loader = distributed(self.rank, n=self.sizes[self.opened])

    def __iter__(self):
        while self.opened < len(self.sizes):
            while self.at < len(self.current_dataset):
                self.at += 1
                yield self.opened, self.at
            self.at, self.opened = 0, self.opened + 1
            self._open()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._open()


def test_objects_that_a_loader_opens_as_it_reads_need_not_fit():
    one, state = ShardAfterShard([5, 7, 9]), {"data": ShardAfterShard([5, 7, 9])}
    iterator = iter(one)
    for _ in range(6):
        following = next(iterator)
    load_restored(state, through({"data": one}))
    assert (following, next(iter(state["data"]))) == ((1, 1), (1, 2))
    other = ShardAfterShard([5, 7, 9])
    other.loader = distributed(1)
    with pytest.raises(StateMismatch, match=r'state\["data"\]\.loader\.sampler: rank=0 in the checkpoint, rank=1 here'):
        check_fit({"data": other}, through({"data": one}))


class Wrapped(Moving):
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def test_workers_must_fit_where_the_order_depends_on_them():
    stream, number = Stream(60, 0, 1), Numbers()
    for there, here in ((1, 2), (0, 2), (2, 0)):
        one, other = (Wrapped(DataLoader(number, num_workers=workers)) for workers in (there, here))
        check_fit({"data": other}, through({"data": one}))
        for kind, dataset in ((DataLoader, stream), (StatefulDataLoader, stream), (StatefulDataLoader, number)):
            one, other = (Wrapped(kind(dataset, num_workers=workers)) for workers in (there, here))
            with pytest.raises(
                StateMismatch, match=rf"\.loader: num_workers={there} in the .*, num_workers={here} here"
            ):
                check_fit({"data": other}, through({"data": one}))


class Counted(Numbers):
    """Is not to be hashed, and its length is dear."""

    asked = 0
    __hash__ = None

    def __len__(self):
        self.asked += 1
        return self.n


def test_the_length_of_a_dataset_is_taken_once():
    dataset, other = Counted(), Counted()
    for at in range(3):
        saved = through({"data": Ramp(dataset, at)})
        assert saved["data"]._metadata["made_with"][".dataset"]["length"] == 60
    assert dataset.asked == 1
    check_fit({"data": Ramp(other, 1)}, saved)
    check_fit({"data": Ramp(other, 1)}, saved)
    assert other.asked == 1
    known = len(loader_arguments._lengths)
    del dataset, other
    gc.collect()
    assert len(loader_arguments._lengths) <= known - 2
    listed = through({"data": Ramp([1, 2, 3], 1)})
    with pytest.raises(StateMismatch, match=r"\.dataset: length=3 in the checkpoint, length=2 here"):
        check_fit({"data": Ramp([1, 2], 1)}, listed)


# ---- the record


class Keeps:
    """What it was given last."""

    def __init__(self, rank=0, **state):
        self.rank, self.state = rank, state

    def __iter__(self):
        return iter(())

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_object_gets_the_state_that_it_gave():
    state = {"data": Keeps()}
    load_restored(state, through({"data": Keeps(a=1, b=[2])}))
    assert type(state["data"].state) is dict
    assert state["data"].state == {"a": 1, "b": [2]}
    state = {"data": None}
    load_restored(state, through({"data": Keeps(a=1)}))
    assert state["data"] == {"a": 1}
    load_restored({"data": Keeps(rank=5)}, through({"data": {"a": 1}}))  # nobody knows what it was made with


def test_every_save_records_the_attributes_of_its_time():
    capturer, loader = Capturer(), sampled()
    state = {"data": loader, "own": Keeps(1, a=1)}
    iterator = iter(loader)
    for rank in (0, 0, 1):
        loader.sampler.rank = rank
        next(iterator)
        captured = capturer.capture(state)
        tree = captured.tree()
        assert tree == flatten(state).tree
        assert unflatten(tree, b"\x02\0\0\0\0\0\0\0{}")["data"]._metadata["made_with"][".sampler"]["rank"] == rank


class History(list):
    def state_dict(self):
        return {"all": list(self)}

    def load_state_dict(self, state):
        self[:] = state["all"]


def test_growing_container_need_not_fit():
    state = {"losses": History(), "data": Prickly(dataset=History())}
    load_restored(state, through({"losses": History([1.0, 2.0]), "data": Prickly(dataset=History([3]))}))
    assert state["losses"] == [1.0, 2.0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", PIPELINES, ids=lambda make: make.__name__)
def test_how_far_it_is_is_no_part_of_the_record(make, workers):
    """Else a fresh loader would not take the state of one that has worked."""
    loader = make(1, workers=workers)
    records = []
    for _ in range(2):
        iterator = iter(loader)
        for _ in iterator:
            records.append(state_dict_with_arguments(loader)._metadata)
        records.append(state_dict_with_arguments(loader)._metadata)
    assert len(records) == 22
    assert all(record == records[0] for record in records)
    assert records[0] == state_dict_with_arguments(make(1, workers=workers))._metadata


def test_none_in_its_place_is_the_way_out():
    """A dataset that has grown, and a sampler that does not mind."""
    loader = distributed(shuffle=False)
    taken(loader, 3)
    state = {"data": None}
    load_restored(state, through({"data": loader}))
    grown = distributed(n=90, shuffle=False)
    grown.load_state_dict(state["data"])
    assert samples(grown)[0] == [18, 21]


class Prickly:
    def __init__(self, dataset=None):
        self.dataset = dataset

    def __iter__(self):
        raise AssertionError("iterated")

    def __len__(self):
        raise OSError("gone")

    def __getitem__(self, index):
        raise AssertionError("indexed")

    def state_dict(self):
        return {"rank": 1}

    def load_state_dict(self, state):
        self.loaded = state


class Endless(Prickly):
    def __init__(self, state, seed=0):
        self.state, self.seed = state, seed

    def state_dict(self):
        return self.state


class Opaque(Prickly):
    @property
    def __dict__(self):
        raise RuntimeError("hands off")


def test_an_object_that_does_not_like_to_be_looked_at_is_saved_and_restored():
    for one in (Prickly(), Prickly(Prickly()), Opaque()):
        other = copy.copy(one) if type(one) is Prickly else Opaque()
        load_restored({"data": other}, through({"data": one}))
        assert other.loaded == {"rank": 1}


def test_a_cycle_and_many_parts_end():
    state = {"position": 0}
    state["self"] = state
    with pytest.raises(StateRefused):
        flatten({"data": Endless(state)})
    one = Prickly()
    one.dataset = one
    check_fit({"data": one}, through({"data": one}))
    many = Prickly(ConcatDataset([Numbers(number + 1) for number in range(1000)]))
    other = Prickly(ConcatDataset([Numbers(number + 2) for number in range(1000)]))
    with pytest.raises(
        StateMismatch, match=r"\.dataset\.datasets\[0\]: n=1 in the checkpoint, n=2 here.* and \d+ more"
    ):
        check_fit({"data": other}, through({"data": many}))


def test_own_batch_sampler_with_another_rank_or_size_is_refused():
    def make(rank, size):
        batches = BatchSampler(RankSampler(60, rank, 2), size, drop_last=False)
        return StatefulDataLoader(Numbers(60), batch_sampler=batches)

    message = refused(lambda: make(0, 2), lambda: make(1, 3))
    assert message == "; ".join(
        (differs(".batch_sampler", "batch_size", 2, 3), differs(".batch_sampler.sampler", "rank", 0, 1))
    )
