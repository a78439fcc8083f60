"""Which sequences run in the next step, and with how many tokens.

First come, first served. Every step decodes one token of each sequence that decodes, and computes prompt tokens up to
a budget beside them, so that neither starves the other. When pages run out, the newest sequence gives its pages back
and is computed again later; the oldest one therefore always gets on.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.pages import PagePool
from moe_opt.serving.engine.sequence import Sequence

if TYPE_CHECKING:
    from moe_opt.serving.engine.kv_state import KVState

_ROOM_FOR_OUTPUT = 512  # tokens; longer outputs start another run of pages if others took what lies behind


@dataclasses.dataclass(slots=True)
class Row:
    """Tokens `start` to `start + count - 1` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    decode: bool

    @property
    def samples(self) -> bool:
        """Whether the step yields this sequence's next token."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclasses.dataclass(slots=True)
class Import:
    """KV that came with a request: of `sequence`'s pages from index `first_page` to `last_page`, exclusive."""

    sequence: Sequence
    kv: KVState
    first_page: int
    last_page: int


@dataclasses.dataclass(slots=True)
class Plan:
    """One step. `decode` rows have one token each, `prefill` rows one or more; a plan may be empty."""

    decode: list[Row]
    prefill: list[Row]
    preempted: list[Sequence]
    fresh_pages: list[int]  # taken for this step; what was counted for them before is void
    imports: list[Import] = dataclasses.field(default_factory=list)  # to be written before the step's forward pass

    @property
    def rows(self) -> list[Row]:
        return self.decode + self.prefill

    @property
    def phase(self) -> str:
        return "prefill" if self.prefill else "decode"


class Scheduler:
    """Owns the waiting queue, the running sequences and, through the pool, their pages."""

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_query_tokens = 0
        self._steps_since_prefill = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A finished, failed or cancelled sequence gives everything back."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.pool.release(sequence.serial, sequence.drop_pages())

    def schedule(self, *, reuse_browned: bool) -> Plan:
        """Take pages for the next step and say what is in it.

        Args:
            reuse_browned: whether a request that did not ask for exact output may read KV pages that were computed
                under brownout; the engine says so while brownout is on.
        """
        plan = Plan([], [], [], [])
        prefill_now = self._prefill_now()
        budget = self.config.max_batch_prefill_tokens if prefill_now else 0
        for sequence in list(self.running):
            if sequence in plan.preempted:
                continue
            if sequence.decoding:
                if self._grow(sequence, 1, plan):
                    plan.decode.append(Row(sequence, sequence.computed, 1, True))
            elif budget:
                budget -= self._prefill(sequence, budget, plan)
        while budget and self.waiting and not plan.preempted and len(self.running) < self.config.max_batch_size:
            if not self._admit(self.waiting[0], reuse_browned, plan):
                break
            sequence = self.waiting.popleft()
            bisect.insort(self.running, sequence, key=lambda s: s.serial)
            budget -= self._prefill(sequence, budget, plan)
        self._steps_since_prefill = 0 if plan.prefill else self._steps_since_prefill + 1
        return plan

    def computed(self, row: Row, browned: bool) -> None:
        """The step ran: the row's KV is in its pages, and full pages can be found by others."""
        sequence = row.sequence
        if browned and sequence.browned_from is None:
            sequence.browned_from = row.start
        sequence.computed = row.start + row.count
        if self.config.prefix_caching and sequence.publishable:
            self._publish(sequence)

    def forget_browned(self) -> None:
        """The united experts changed: KV that the old ones had a part in is not reused, not even what is being made."""
        self.pool.forget_prefixes()
        for sequence in self.running:
            if sequence.browned_from is not None:
                sequence.publishable = False

    # ------------------------------------------------------------- parts of a step

    def _prefill_now(self) -> bool:
        if not any(sequence.decoding for sequence in self.running):
            return True
        return self._steps_since_prefill >= self.config.decode_between_prefills

    def _prefill(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        count = min(sequence.remaining_compute, budget)
        if not self._grow(sequence, count, plan):
            return 0
        plan.prefill.append(Row(sequence, sequence.computed, count, False))
        return count

    def _grow(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Pages for `count` more tokens; newer sequences give theirs up if need be. False if this one had to."""
        size = self.pool.page_size
        needed = -(-(sequence.computed + count) // size)
        while len(sequence.pages) < needed:
            after = sequence.pages[-1] if sequence.pages else None
            page = self.pool.take(sequence.serial, after, self._room(sequence))
            if page is not None:
                sequence.append_page(page)
                plan.fresh_pages.append(page)
                continue
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _room(self, sequence: Sequence) -> int:
        """Pages that the sequence may still need, as a hint where to put it."""
        output = min(sequence.max_new_tokens - sequence.generated, _ROOM_FOR_OUTPUT)
        return max(1, -(-(len(sequence.tokens) + output) // self.pool.page_size) - len(sequence.pages))

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.serial, sequence.drop_pages())
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)  # it came before everyone who still waits
        plan.preempted.append(sequence)

    def _admit(self, sequence: Sequence, reuse_browned: bool, plan: Plan) -> bool:
        """Give a waiting sequence its cached prefix, if the rest of its prompt and a page per running sequence fit."""
        size = self.pool.page_size
        found = self._lookup(sequence, reuse_browned)
        rest = -(-(len(sequence.tokens) + 1) // size) - len(found)
        reclaimed = sum(1 for page, _ in found if self.pool.references[page] == 0)
        if self.running and rest + len(self.running) > self.pool.available - reclaimed:
            return False
        for index, (page, browned) in enumerate(found):
            self.pool.share(page)
            sequence.append_page(page)
            if browned and sequence.browned_from is None:
                sequence.browned_from = index * size
        sequence.computed = len(found) * size
        sequence.published = len(found)
        self.prefix_hit_tokens += sequence.computed
        self.prefix_query_tokens += len(sequence.tokens)
        if sequence.preemptions == 0:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        self.pool.make_room(sequence.serial, self._room(sequence), rest)
        if sequence.request.kv is not None and sequence.preemptions == 0:
            self._import(sequence, sequence.request.kv, plan)
        return True

    def _import(self, sequence: Sequence, kv: KVState, plan: Plan) -> None:
        """Take pages for the KV that came with a request, beyond what the prefix cache has. Its last token is computed
        here all the same if it is the sequence's: the step needs its logits."""
        tokens = min(len(kv.tokens), len(sequence.tokens) - 1)
        first, last = len(sequence.pages), -(-tokens // self.pool.page_size)
        if tokens <= sequence.computed:
            return
        while len(sequence.pages) < last:
            after = sequence.pages[-1] if sequence.pages else None
            page = self.pool.take(sequence.serial, after, self._room(sequence))
            if page is None:  # cannot be had: what fits is kept, the rest is computed
                tokens = len(sequence.pages) * self.pool.page_size
                last = len(sequence.pages)
                break
            sequence.append_page(page)
        if last == first:
            return
        plan.imports.append(Import(sequence, kv, first, last))
        sequence.imported_tokens = tokens - sequence.computed
        sequence.computed = tokens
        sequence.counted = min(len(kv.tokens), last * self.pool.page_size)
        sequence.lowest_threshold = min(sequence.lowest_threshold, kv.lowest_threshold)
        if kv.browned_from is not None and sequence.browned_from is None and kv.browned_from < tokens:
            sequence.browned_from = kv.browned_from

    def _lookup(self, sequence: Sequence, reuse_browned: bool) -> list[tuple[int, bool]]:
        """(page, browned) of the longest cached prefix that leaves at least one token to compute."""
        if not self.config.prefix_caching or sequence.request.params.decoder_input_details:
            return []  # logprobs of the prompt need every prompt token computed
        size = self.pool.page_size
        kinds = (False, True) if reuse_browned and not sequence.request.exact else (False,)
        found: list[tuple[int, bool]] = []
        for index in range((len(sequence.tokens) - 1) // size):
            for browned in kinds:
                if browned is False and found and found[-1][1]:
                    continue  # behind browned KV nothing is exact
                page = self.pool.find(sequence.page_hash(index, size, browned))
                if page is not None:
                    found.append((page, browned))
                    break
            else:
                break
        return found

    def _publish(self, sequence: Sequence) -> None:
        size = self.pool.page_size
        while (sequence.published + 1) * size <= sequence.computed:
            index = sequence.published
            end = (index + 1) * size
            browned = sequence.browned_from is not None and sequence.browned_from < end
            self.pool.publish(sequence.pages[index], sequence.page_hash(index, size, browned))
            sequence.published += 1
