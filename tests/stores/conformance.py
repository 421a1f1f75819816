"""What every store and every wrapper must do: the promises of `tierd.stores.base`, one test each.

A subclass of `Conformance` gives the fixture `make`, which returns a function that opens an empty store.
"""

from __future__ import annotations

import array
import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import xxhash

from tierd.core.errors import ObjectNotFound, StoreRefused
from tierd.stores.base import Store, list_children, list_names

BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/..",
    "../a",
    "a/./b",
    ".tmp/a",
    "a/.b",
    "a b",
    "a\n",
    "ä",
    "a\x00",
    "x" * 600,
]


def on_store(test: Callable[[Any, Store], Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in a loop of its own, on a store that is closed afterwards."""

    def run(self: Any, make: Callable[[], Store]) -> None:
        async def whole() -> None:
            store = make()
            try:
                await test(self, store)
            finally:
                await store.aclose()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def keys(store: Store, prefix: str = "", after: str = "") -> list[str]:
    return [info.key async for info in store.scan(prefix, after)]


class Conformance:
    many = 2500  # objects in the listing that has pages
    size = 3 << 20  # of an object that takes a while
    operations = 400  # of the random walk
    verifies = ""  # what a put answers: the checksum that the place is proven to check
    can_digest = False  # whether an object can be digested where it lies
    has_condition = True  # whether a put can leave an object as it is

    @on_store
    async def test_pages_names_and_small_objects_are_those_of_scan_and_get(self, store: Store) -> None:
        below = {"b", "b-c/d", "b.c", "b0/x", "b1", "b10/y/z", "c/1", "c/2"}
        for name in (*below, "e"):
            await store.put(f"a/{name}", name.encode())
        for prefix, after in (("a/", ""), ("a/b", ""), ("a/c/", "a/c/1"), ("none/", "")):
            paged = [info.key async for page in store.scan_pages(prefix, after) for info in page]
            assert paged == await keys(store, prefix, after)
        for prefix in ("", "a/", "a/c/", "none/"):
            names = await store.directories(prefix)
            assert names is None or sorted(names) == sorted(await list_names(store, prefix))
        asked = ["a/b", "a/none", "a/c/2"]
        for data, expected in zip(await store.get_small(asked), (b"b", None, b"c/2"), strict=True):
            assert data is None or bytes(data) == expected

    @on_store
    async def test_get_returns_the_bytes_of_the_put(self, store: Store) -> None:
        data = random.Random(1).randbytes(100_000)
        floats = array.array("d", [1.0, 2.5, -3.0])
        for number, form in enumerate(
            [data, bytearray(data), memoryview(data), memoryview(data)[7:77], memoryview(floats)]
        ):
            await store.put(f"a/{number}", form)
            assert bytes(await store.get(f"a/{number}")) == bytes(form)

    @on_store
    async def test_a_put_names_the_checksum_that_the_place_verified(self, store: Store) -> None:
        for key, data in (("a", b"data"), ("b", b""), ("a", b"other data")):
            assert await store.put(key, data) == self.verifies
        assert await keys(store) == ["a", "b"]

    @on_store
    async def test_a_get_may_fill_a_buffer_of_the_callers(self, store: Store) -> None:
        data = random.Random(1).randbytes(self.size)
        await store.put("k", data)
        await store.put("empty", b"")
        for start, room in ((0, len(data)), (0, len(data) + 100), (7, len(data) + 7)):
            buffer = bytearray(b"!" * (len(data) + 200))
            got = await store.get("k", memoryview(buffer)[start : start + room])
            assert isinstance(got, memoryview)
            assert (got.nbytes, got.format, got.obj is buffer) == (len(data), "B", True)
            assert buffer == b"!" * start + data + b"!" * (200 - start)
            assert (await store.get("empty", memoryview(buffer)[start:])).nbytes == 0  # type: ignore[union-attr]
            assert bytes(await store.get("empty", memoryview(buffer)[:0])) == b""
            assert buffer == b"!" * start + data + b"!" * (200 - start)

    @on_store
    async def test_a_buffer_may_be_of_any_flat_shape(self, store: Store) -> None:
        await store.put("k", array.array("d", [1.0, 2.5]))
        floats = array.array("d", [0.0] * 3)
        assert bytes(await store.get("k", memoryview(floats))) == array.array("d", [1.0, 2.5]).tobytes()
        assert floats.tolist() == [1.0, 2.5, 0.0]

    @on_store
    async def test_a_buffer_that_is_too_small_is_refused_by_both_sizes(self, store: Store) -> None:
        await store.put("k", b"x" * 1001)
        for room in (1000, 1, 0):
            with pytest.raises(StoreRefused, match=rf"1001\b.*\b{room}\b"):
                await store.get("k", memoryview(bytearray(room)))
        with pytest.raises(ObjectNotFound):
            await store.get("none", memoryview(bytearray(10)))
        assert bytes(await store.get("k")) == b"x" * 1001  # and nothing is left taken

    @on_store
    async def test_nothing_writes_to_the_buffer_of_a_cancelled_get(self, store: Store) -> None:
        await store.put("k", b"k" * self.size)
        for round_ in range(8):
            buffer = bytearray(self.size)
            task = asyncio.create_task(store.get("k", memoryview(buffer)))
            await asyncio.sleep(0.002 * round_)
            task.cancel()
            await asyncio.wait([task])
            buffer[:] = b"!" * self.size
            await asyncio.sleep(0.01)
            assert buffer == b"!" * self.size

    @on_store
    async def test_a_digest_is_of_the_bytes_that_a_get_returns(self, store: Store) -> None:
        assert store.can_digest == self.can_digest
        if not self.can_digest:
            return
        for key, size in (("empty", 0), ("small", 1001), ("pages", 2 << 20), ("odd", self.size + 1)):
            data = random.Random(size).randbytes(size)
            await store.put(key, data)
            assert await store.digest(key) == (size, xxhash.xxh3_128_hexdigest(data))
        for key, error in (("none", ObjectNotFound), *((key, StoreRefused) for key in BAD_KEYS)):
            with pytest.raises(error):
                await store.digest(key)

    @on_store
    async def test_an_object_may_be_empty(self, store: Store) -> None:
        await store.put("empty", b"")
        await store.put("view", memoryview(b""))
        assert bytes(await store.get("empty")) == b"" == bytes(await store.get("view"))
        assert [(i.key, i.size) async for i in store.scan("")] == [("empty", 0), ("view", 0)]

    @on_store
    async def test_large_object_is_returned_whole(self, store: Store) -> None:
        data = random.Random(2).randbytes(self.size + 1)
        await store.put("large", data)
        assert bytes(await store.get("large")) == data
        assert [i.size async for i in store.scan("large")] == [len(data)]

    @on_store
    async def test_missing_key_is_not_there(self, store: Store) -> None:
        await store.put("a/b/c", b"1")
        for key in ("x", "a", "a/b", "a/b/d", "a/b/c/d", "b/c"):
            with pytest.raises(ObjectNotFound):
                await store.get(key)

    @on_store
    async def test_put_replaces_and_is_idempotent(self, store: Store) -> None:
        await store.put("k", b"first, and longer")
        [before] = [i async for i in store.scan("k")]
        await store.put("k", b"second")
        await store.put("k", b"second")
        [now] = [i async for i in store.scan("k")]
        assert bytes(await store.get("k")) == b"second"
        assert (now.size, before.size) == (6, 17)
        assert now.token != before.token

    @on_store
    async def test_put_if_absent_leaves_object_that_is_there_as_it_is(self, store: Store) -> None:
        for round_ in range(2):
            assert await store.put_if_absent("a/k", b"first") == self.verifies
            answer = await store.put_if_absent("a/k", memoryview(b"second, and longer"))
            assert answer == (None if self.has_condition else self.verifies)
            assert bytes(await store.get("a/k")) == (b"first" if self.has_condition else b"second, and longer")
            await store.put("a/k", b"third")
            assert bytes(await store.get("a/k")) == b"third"
            assert await keys(store) == ["a/k"], round_
            await store.delete(["a/k"])
        assert await store.put_if_absent("empty", b"") == self.verifies
        assert await store.put_if_absent("empty", b"more") == (None if self.has_condition else self.verifies)

    @on_store
    async def test_concurrent_puts_if_absent_store_one_object(self, store: Store) -> None:
        contents = [bytes([number]) * (self.size // 4 + number) for number in range(6)]
        answers = await asyncio.gather(*(store.put_if_absent("k", data) for data in contents))
        put = [data for data, answer in zip(contents, answers, strict=True) if answer is not None]
        assert len(put) == (1 if self.has_condition else 6)
        assert bytes(await store.get("k")) in put

    @on_store
    async def test_token_distinguishes_contents_of_the_same_size(self, store: Store) -> None:
        await store.put("k", b"aaaa")
        [before] = [i async for i in store.scan("k")]
        [again] = [i async for i in store.scan("k")]
        await store.put("k", b"bbbb")
        [now] = [i async for i in store.scan("k")]
        assert before == again != now

    @on_store
    async def test_the_buffer_is_the_callers_again_after_put(self, store: Store) -> None:
        data = bytearray(b"x" * 1000)
        await store.put("k", data)
        data[:] = b"y" * 1000
        assert bytes(await store.get("k")) == b"x" * 1000

    @on_store
    async def test_scan_is_in_byte_order_of_whole_keys(self, store: Store) -> None:
        expected = sorted(
            ["a-b", "a.b", "a/b", "a/b.c", "a/b-c/d", "a0", "aB", "a_b", "ab/c", "B/a", "0", "a-b-/c", "z", "-q", "_q"]
        )
        for key in random.Random(3).sample(expected, len(expected)):
            await store.put(key, key.encode())
        assert await keys(store) == expected
        assert [i.size async for i in store.scan("")] == [len(key) for key in expected]

    @on_store
    async def test_a_prefix_need_not_end_at_a_slash(self, store: Store) -> None:
        for key in ("run/chunks/1", "run/chunks/12", "run/chunks-2", "run2/x", "ru"):
            await store.put(key, b"")
        assert await keys(store, "run/chunks/1") == ["run/chunks/1", "run/chunks/12"]
        assert await keys(store, "run/ch") == ["run/chunks-2", "run/chunks/1", "run/chunks/12"]
        assert await keys(store, "run") == ["run/chunks-2", "run/chunks/1", "run/chunks/12", "run2/x"]
        for nothing in ("run/chunks/13", "runs/", "run/chunks/1/", "x", "..", "/", "run//", "../run"):
            assert await keys(store, nothing) == []

    @on_store
    async def test_after_is_exclusive_and_need_not_exist(self, store: Store) -> None:
        names = ["a-b", "a/b", "a/c", "a0", "b/a/x", "b/b"]
        for key in names:
            await store.put(key, b"")
        for after in [*names, "", "a", "a/", "a/bb", "a/\x7f", "b/a", "b/a/", "b/a/\x7f", "b/a0", "c", "\x7f"]:
            assert await keys(store, "", after) == [key for key in names if key > after], after
            assert await keys(store, "a", after) == [key for key in names if key > after and key[0] == "a"], after
            assert await keys(store, "b/", after) == [key for key in names if key > after and key[:2] == "b/"], after

    @on_store
    async def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert await keys(store) == []
        assert await keys(store, "run/manifests/") == []
        assert [name async for name in list_children(store, "")] == []

    @on_store
    async def test_long_listings_and_long_deletes(self, store: Store) -> None:
        names = [f"run/{number % 7}/{number:05}" for number in range(self.many)]
        for start in range(0, len(names), 50):
            await asyncio.gather(*(store.put(key, b"x") for key in names[start : start + 50]))
        assert await keys(store, "run/") == sorted(names)
        middle = sorted(names)[self.many // 2]
        assert await keys(store, "run/", middle) == [key for key in sorted(names) if key > middle]
        await store.delete([*names[5:], "run/none"])
        assert await keys(store) == sorted(names[:5])

    @on_store
    async def test_delete_is_idempotent(self, store: Store) -> None:
        for key in ("a/b", "a/c", "d"):
            await store.put(key, b"1")
        await store.delete([])
        await store.delete(["a/b", "a/x", "y", "y/z", "d/e", "a"])
        await store.delete(["a/b"])
        assert await keys(store) == ["a/c", "d"]
        with pytest.raises(ObjectNotFound):
            await store.get("a/b")
        await store.delete(["a/c"])
        await store.put("a/c", b"2")
        assert bytes(await store.get("a/c")) == b"2"

    @on_store
    async def test_concurrent_puts_of_one_key_leave_one_of_them_whole(self, store: Store) -> None:
        contents = [bytes([number]) * (self.size // 4 + number) for number in range(6)]
        await store.put("k", contents[0])
        seen: list[bytes] = []

        async def read() -> None:
            for _ in range(6):
                seen.append(bytes(await store.get("k")))

        await asyncio.gather(*(store.put("k", data) for data in contents), read())
        assert all(data in contents for data in [*seen, bytes(await store.get("k"))])
        assert await keys(store) == ["k"]

    @on_store
    async def test_puts_and_deletes_of_neighbours_do_not_disturb_each_other(self, store: Store) -> None:
        async def churn(number: int) -> None:
            for round_ in range(8):
                key = f"run/{round_ % 2}/deep/{number}"
                await store.put(key, key.encode())
                assert bytes(await store.get(key)) == key.encode()
                await store.delete([key])

        await asyncio.gather(*(churn(number) for number in range(6)))
        assert await keys(store) == []

    @on_store
    async def test_a_cancelled_put_leaves_the_old_or_the_new(self, store: Store) -> None:
        old, rng = b"old" * 1000, random.Random(4)
        for round_ in range(12):
            await store.put("k", old)
            new = bytearray(b"n" * self.size)
            task = asyncio.create_task(store.put("k", new))
            await asyncio.sleep(rng.random() * 0.03 * (round_ % 4))
            task.cancel()
            await asyncio.wait([task])
            new[:] = b"!" * self.size  # the buffer may be reused at once
            assert await keys(store) == ["k"]
            for _ in range(3):
                assert bytes(await store.get("k")) in (old, b"n" * self.size)
                await asyncio.sleep(0.005)
            if not task.cancelled():
                assert bytes(await store.get("k")) == b"n" * self.size

    @on_store
    async def test_a_listing_holds_up_while_the_store_changes(self, store: Store) -> None:
        stay = [f"s/{number % 3}/{number:03}" for number in range(60)]
        go = [key.replace("s/", "s/x") for key in stay]
        for start in range(0, 60, 20):
            await asyncio.gather(*(store.put(key, b"1") for key in [*stay, *go][start * 2 : start * 2 + 40]))
        seen = []
        async with aclosing(store.scan("s/")) as listing:
            async for info in listing:
                seen.append(info.key)
                if len(seen) % 10 == 0:
                    await store.delete([go.pop(), go.pop()])
                    await store.put(f"s/y{len(seen)}", b"1")
        assert seen == sorted(set(seen))
        assert set(stay) <= set(seen)

    @on_store
    async def test_a_listing_may_be_left_early(self, store: Store) -> None:
        for number in range(30):
            await store.put(f"a{number:02}/b", b"1")
        for _ in range(40):  # more often than a pool has connections
            async with aclosing(store.scan("")) as listing:
                assert (await anext(listing)).key == "a00/b"
        assert len(await keys(store)) == 30

    @on_store
    async def test_children_are_the_names_directly_below(self, store: Store) -> None:
        for key in (
            "README.md",
            "run-a/chunks/1/2",
            "run-a/chunks/1/3",
            "run-a/manifests/m",
            "run-a.x/y",
            "run/z",
            "run/z2/q",
        ):
            await store.put(key, b"")
        # in the order of the keys: "run-a.x/" < "run-a/" < "run/"
        assert [name async for name in list_children(store, "")] == ["README.md", "run-a.x", "run-a", "run"]
        assert [name async for name in list_children(store, "run-a/")] == ["chunks", "manifests"]
        assert [name async for name in list_children(store, "run/")] == ["z", "z2"]
        assert [name async for name in list_children(store, "none/")] == []

    @on_store
    async def test_malformed_key_is_refused(self, store: Store) -> None:
        await store.put("fine", b"1")
        for key in BAD_KEYS:
            with pytest.raises(StoreRefused):
                await store.put(key, b"2")
            with pytest.raises(StoreRefused):
                await store.put_if_absent(key, b"2")
            with pytest.raises(StoreRefused):
                await store.get(key)
            with pytest.raises(StoreRefused):
                await store.delete(["fine", key])
        assert await keys(store) == ["fine"]

    @on_store
    async def test_a_random_walk_agrees_with_a_dict(self, store: Store) -> None:
        rng, model = random.Random(5), dict[str, bytes]()
        names = [
            f"{above}f{below}"
            for above in ("", "a/", "a-/", "a/b/", "a.b/", "a/b/c/", "b/")
            for below in ("", "-1", ".x")
        ]
        for step in range(self.operations):
            key = rng.choice(names)
            match rng.choice(["put", "put", "get", "scan", "delete", "delete many"]):
                case "put":
                    model[key] = b"%d" % step * rng.randrange(3)
                    await store.put(key, model[key])
                case "get" if key in model:
                    assert bytes(await store.get(key)) == model[key]
                case "get":
                    with pytest.raises(ObjectNotFound):
                        await store.get(key)
                case "scan":
                    prefix = key[: rng.randrange(len(key) + 1)]
                    after = rng.choice(["", rng.choice(names), rng.choice(names)[:-1]])
                    expected = sorted((k, len(v)) for k, v in model.items() if k.startswith(prefix) and k > after)
                    assert [(i.key, i.size) async for i in store.scan(prefix, after)] == expected
                case "delete":
                    model.pop(key, None)
                    await store.delete([key])
                case "delete many":
                    gone = rng.sample(names, 4)
                    for key in gone:
                        model.pop(key, None)
                    await store.delete(gone)

    @on_store
    async def test_closing_twice_is_harmless(self, store: Store) -> None:
        await store.put("k", b"1")
        await store.aclose()
        await store.aclose()

    def test_nothing_to_close(self, make: Callable[[], Store]) -> None:
        asyncio.run(make().aclose())

    def test_its_repr_names_it(self, make: Callable[[], Store]) -> None:
        store = make()
        assert type(store).__name__ in repr(store)
        asyncio.run(store.aclose())
