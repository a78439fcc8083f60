"""KV pages: who holds which, where free ones lie together, and which hold a prefix that can be used again.

A page is `page_size` token slots of the KV pool; page p has slots `p * page_size` to `(p + 1) * page_size - 1`. The
pool of pages is bookkeeping alone and knows nothing of tensors.

Pages of one sequence are handed out side by side where possible: attention on a CPU reads a run of neighbouring pages
as one view of the pool, where scattered pages would have to be copied together in every step of every layer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

import numpy as np

_EVICT_AT_ONCE = 4  # cached pages given up for a growing sequence: neighbours, as the end of one old chain


def root_hash(adapter: str | None, browned: bool) -> bytes:
    """Start of a prefix chain. KV of browned-out tokens differs, hence the one bit."""
    return hashlib.blake2b(f"{int(browned)}:{adapter or ''}".encode(), digest_size=16).digest()


def chain_hash(previous: bytes, tokens: SequenceOf[int]) -> bytes:
    """Hash of a full page: of its tokens and of everything before it."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Allocator and prefix cache of `num_pages` pages.

    A page is free; or used, by `references[page]` sequences; or cached: no sequence holds it, its content can be found
    by hash, and it is given away, least recently used first, once free pages run out.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.references = np.zeros(num_pages, dtype=np.int32)
        self._free = np.ones(num_pages, dtype=bool)
        self._num_free = num_pages
        self._room_of = np.full(num_pages, -1, dtype=np.int64)  # serial of the sequence that may grow into the page
        self._rooms: dict[int, list[slice]] = {}
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evictions = 0

    # ------------------------------------------------------------- counts

    @property
    def free(self) -> int:
        return self._num_free

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_pages - self._num_free - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be handed out: free or cached."""
        return self._num_free + len(self._cached)

    def check(self) -> None:
        """Assert every invariant; for tests and debugging."""
        held = self.references > 0
        assert (self.references >= 0).all()
        assert self._num_free == int(self._free.sum())
        assert not (held & self._free).any()
        for page in self._cached:
            assert not held[page]
            assert not self._free[page]
            assert page in self._hash_of
        assert int(held.sum()) == self.used
        assert len(self._hash_of) == len(self._page_of)
        assert all(self._hash_of[page] == key for key, page in self._page_of.items())
        assert not any(self._free[page] for page in self._hash_of)

    # ------------------------------------------------------------- taking and giving back

    def make_room(self, serial: int, pages: int, needed: int = 1) -> None:
        """Set `pages` neighbouring free pages aside that sequence `serial` is expected to need. A wish, not a claim:
        others take from it before anyone is refused. Prefixes are given up for the `needed` ones only."""
        self._forget_room(serial)
        if self._num_free < needed:
            self._evict(min(needed - self._num_free, len(self._cached)))
        start, length = self._best_extent(pages)
        if length:
            extent = slice(start, start + min(length, pages))
            self._room_of[extent] = serial
            self._rooms.setdefault(serial, []).append(extent)

    def take(self, serial: int, after: int | None, wanted: int = 1) -> int | None:
        """A page for sequence `serial`, the one behind `after` if that can be had; None if nothing is free or cached.

        Args:
            wanted: how many pages the sequence will need from here on; a new run starts where so many are free.
        """
        if after is not None and after + 1 < self.num_pages and self._free[after + 1]:
            owner = self._room_of[after + 1]
            if owner in (-1, serial):
                return self._hold(after + 1)
        own = self._first_of_room(serial)
        if own is None and self.available:
            self.make_room(serial, wanted, min(wanted, _EVICT_AT_ONCE))
            own = self._first_of_room(serial)
        if own is not None:
            return self._hold(own)
        if not self._num_free:
            if not self._cached:
                return None
            self._evict(1)
        # Only pages that others have set aside are left: take from the end of a room, where it is needed last.
        return self._hold(int(np.flatnonzero(self._free)[-1]))

    def share(self, page: int) -> None:
        """One more sequence holds a used or cached page."""
        if self.references[page] == 0:
            del self._cached[page]
        self.references[page] += 1

    def release(self, serial: int, pages: SequenceOf[int]) -> None:
        """A sequence gives up its pages. Those with a known prefix stay findable; the chain's end is reclaimed first,
        because a page is of no use without those before it."""
        self._forget_room(serial)
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free[page] = True
                self._num_free += 1

    def _hold(self, page: int) -> int:
        self._free[page] = False
        self._num_free -= 1
        self.references[page] = 1
        return page

    def _forget_room(self, serial: int) -> None:
        for extent in self._rooms.pop(serial, ()):
            part = self._room_of[extent]
            part[part == serial] = -1

    def _first_of_room(self, serial: int) -> int | None:
        for extent in self._rooms.get(serial, ()):
            usable = np.flatnonzero(self._free[extent] & (self._room_of[extent] == serial))
            if usable.size:
                return extent.start + int(usable[0])
        return None

    def _best_extent(self, pages: int) -> tuple[int, int]:
        """(start, length) of the smallest run of unclaimed free pages that holds `pages`, else of the longest."""
        usable = np.zeros(self.num_pages + 2, dtype=np.int8)
        usable[1:-1] = self._free & (self._room_of < 0)
        edges = np.flatnonzero(np.diff(usable))
        if not edges.size:
            return 0, 0
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        enough = np.flatnonzero(lengths >= pages)
        best = enough[np.argmin(lengths[enough])] if enough.size else np.argmax(lengths)
        return int(starts[best]), int(lengths[best])

    # ------------------------------------------------------------- prefixes

    def find(self, key: bytes) -> int | None:
        """The page with this chain hash, used or cached."""
        return self._page_of.get(key)

    def publish(self, page: int, key: bytes) -> None:
        """Make a full page findable. Where another page has the same content already, this one stays unnamed."""
        if key not in self._page_of and page not in self._hash_of:
            self._page_of[key] = page
            self._hash_of[page] = key

    def forget_prefixes(self) -> None:
        """Drop every cached page and every name, after the weights behind them changed."""
        self._evict(len(self._cached))
        self._page_of.clear()
        self._hash_of.clear()

    def _evict(self, count: int) -> None:
        for _ in range(count):
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
            self._free[page] = True
            self._num_free += 1
        self.evictions += count
