"""The fleet as policies see it: `Worker` objects whose token counts are brought up to date only when read.

Between two events every running request gains one token per step, so what a worker holds follows from its
step counter. Writing 32,000 counters per step for 1,024 workers would cost more than the simulation itself.
"""

from __future__ import annotations

from collections.abc import Hashable, ItemsView, Iterator, ValuesView
from typing import Any, Protocol

from moe_opt.cluster import RunningRequest, Worker


class Clock(Protocol):
    """What a live worker asks the engine."""

    def steps_now(self, worker: int) -> int: ...

    def load_now(self, worker: int) -> int: ...


class LiveRequest(RunningRequest):
    """A running request that remembers when it joined, in steps of its worker's group."""

    __slots__ = ("index", "joined", "start_generated", "start_kv", "total")

    def __init__(self, index: int, kv_tokens: int, generated: int, total: int, oracle: bool):
        super().__init__(kv_tokens, float(total - generated) if oracle else None, generated)
        self.index = index  # row of the trace
        self.start_kv = kv_tokens
        self.start_generated = generated
        self.total = total  # output tokens when it ends
        self.joined: int | None = None  # None: dispatched, not yet decoding


class LiveRunning(dict[Hashable, RunningRequest]):
    """`Worker.running`, brought up to date when values are read. Length, keys and membership need no
    update."""

    __slots__ = ("_clock", "_oracle", "_stamp", "_worker")

    def __init__(self, clock: Clock, worker: int, oracle: bool):
        super().__init__()
        self._clock, self._worker, self._oracle = clock, worker, oracle
        self._stamp = -1

    def touch(self) -> None:
        """Something other than the step counter changed."""
        self._stamp = -1

    def sync(self) -> None:
        """Write the token counts of this moment into the running requests."""
        step = self._clock.steps_now(self._worker)
        if step == self._stamp:
            return
        self._stamp = step
        for request in super().values():
            assert isinstance(request, LiveRequest)
            done = 0 if request.joined is None else step - request.joined
            request.kv_tokens = request.start_kv + done
            request.generated = request.start_generated + done
            if self._oracle:
                request.remaining = float(request.total - request.generated)

    def __iter__(
        self,
    ) -> Iterator[Hashable]:  # overridden so that dict(running) also goes through __getitem__
        return super().__iter__()

    def __getitem__(self, key: Hashable) -> RunningRequest:
        self.sync()
        return super().__getitem__(key)

    def get(self, key: Hashable, default: Any = None) -> Any:
        self.sync()
        return super().get(key, default)

    def values(self) -> ValuesView[RunningRequest]:  # type: ignore[override]
        self.sync()
        return super().values()

    def items(self) -> ItemsView[Hashable, RunningRequest]:  # type: ignore[override]
        self.sync()
        return super().items()

    def copy(self) -> dict[Hashable, RunningRequest]:
        self.sync()
        return dict(super().items())

    def take(self, key: Hashable) -> LiveRequest:
        """Remove a request, without an update of the others."""
        request = super().pop(key)
        assert isinstance(request, LiveRequest)
        return request

    def raw(self) -> ValuesView[LiveRequest]:
        """The requests with the counts of their last update; the engine itself reads step counters."""
        return super().values()  # type: ignore[return-value]


class LiveWorker(Worker):
    """A worker of the simulated fleet. Its KV load is one lookup instead of a sum over its requests."""

    __slots__ = ("_clock", "index")

    def __init__(self, clock: Clock, index: int, slots: int, kv_capacity: int | None, oracle: bool):
        super().__init__(f"w{index}", slots, LiveRunning(clock, index, oracle), kv_capacity)
        self._clock = clock
        self.index = index

    @property
    def kv_tokens(self) -> int:
        """KV tokens held now: running and dispatched requests."""
        return self._clock.load_now(self.index)

    @property
    def live(self) -> LiveRunning:
        """`running` with its own type."""
        assert isinstance(self.running, LiveRunning)
        return self.running
