"""The page allocator and its prefix cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_opt.serving.engine.pages import PagePool, chain_hash, root_hash


def take(pool: PagePool, serial: int, count: int, wanted: int | None = None) -> list[int]:
    pages: list[int] = []
    for taken in range(count):
        page = pool.take(serial, pages[-1] if pages else None, (wanted or count) - taken)
        assert page is not None
        pages.append(page)
    return pages


def test_pages_of_one_sequence_lie_side_by_side() -> None:
    pool = PagePool(32, 4)
    first = take(pool, 0, 2, wanted=6)
    second = take(pool, 1, 3, wanted=3)
    first += [pool.take(0, first[-1]) for _ in range(4)]
    assert first == list(range(first[0], first[0] + 6))
    assert second == list(range(second[0], second[0] + 3))


def test_a_room_is_a_wish_that_others_may_break() -> None:
    pool = PagePool(8, 4)
    take(pool, 0, 1, wanted=8)
    others = take(pool, 1, 7)
    assert sorted(others) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.take(0, 0) is None
    pool.check()


def test_a_released_page_with_a_name_is_cached_and_found_again() -> None:
    pool = PagePool(4, 2)
    pages = take(pool, 0, 2)
    key = chain_hash(root_hash(None, False), [1, 2])
    pool.publish(pages[0], key)
    pool.release(0, pages)
    assert (pool.free, pool.cached, pool.used) == (3, 1, 0)
    assert pool.find(key) == pages[0]
    pool.share(pages[0])
    assert (pool.free, pool.cached, pool.used) == (3, 0, 1)
    pool.check()


def test_the_least_recently_used_prefix_goes_first_and_the_end_of_a_chain_before_its_start() -> None:
    pool = PagePool(4, 2)
    old, new = take(pool, 0, 2), take(pool, 1, 2)
    for index, page in enumerate(old + new):
        pool.publish(page, bytes([index]))
    pool.release(0, old)
    pool.release(1, new)
    for gone in (old[1], old[0], new[1], new[0]):
        assert pool.find(bytes([(old + new).index(gone)])) == gone
        take(pool, 2, 1)
        assert pool.find(bytes([(old + new).index(gone)])) is None
    assert pool.take(2, None) is None


def test_the_prefix_hash_depends_on_everything_before_and_on_the_salt() -> None:
    plain = root_hash(None, False)
    assert chain_hash(chain_hash(plain, [1, 2]), [3, 4]) != chain_hash(chain_hash(plain, [1, 1]), [3, 4])
    assert len({plain, root_hash(None, True), root_hash("french", False), root_hash("french", True)}) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "release", "publish", "share", "room"]), st.integers(0, 9)), max_size=80
    )
)
def test_no_page_is_lost_or_held_twice(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(12, 2)
    held: dict[int, list[int]] = {serial: [] for serial in range(10)}
    names = 0
    for action, serial in actions:
        pages = held[serial]
        if action == "take":
            page = pool.take(serial, pages[-1] if pages else None, 1 + serial % 4)
            assert (page is None) == (sum(map(len, map(set, held.values()))) >= 12 and pool.available == 0)
            if page is not None:
                assert all(page not in other for other in held.values())
                pages.append(page)
        elif action == "release":
            pool.release(serial, pages)
            held[serial] = []
        elif action == "publish" and pages:
            pool.publish(pages[0], names.to_bytes(4, "big"))
            names += 1
        elif action == "share":
            page = pool.find(max(names - 1 - serial, 0).to_bytes(4, "big"))
            if page is not None and page not in pages:
                pool.share(page)
                pages.append(page)
        elif action == "room":
            pool.make_room(serial, 1 + serial)
        pool.check()
        assert pool.free + pool.used + pool.cached == 12
        assert pool.used == len({page for pages in held.values() for page in pages})
