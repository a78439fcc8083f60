"""Items that wait to be scored on the engine's thread, one forward pass at a time between the steps of requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable

from moe_opt.modeling.scoring import Tree


@dataclasses.dataclass
class ScoreJob:
    """One call of `EngineClient.score`.

    Attributes:
        passes: trees of the forward passes that are left. values: [items][choices] log-probabilities, filled as they
            are run. done: set to `values` after the last pass, or to what went wrong.
    """

    passes: deque[list[Tree]]
    values: list[list[float]]
    done: concurrent.futures.Future[list[list[float]]] = dataclasses.field(default_factory=concurrent.futures.Future)

    @property
    def over(self) -> bool:
        """Nothing is left to run, or nobody waits for it any more."""
        return not self.passes or self.done.done()

    def finish(self) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the client went away
            self.done.set_result(self.values)

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.done.set_exception(error)


class ScoreQueue:
    """Jobs in turn: each gets a pass before the first gets its next. Used on the engine's thread alone."""

    def __init__(self) -> None:
        self._jobs: deque[ScoreJob] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: ScoreJob) -> None:
        self._jobs.append(job)

    def next(self) -> ScoreJob | None:
        """The job whose pass is due, taken out of the queue; those that nobody waits for are dropped."""
        while self._jobs:
            job = self._jobs.popleft()
            if not job.over:
                return job
        return None

    def back(self, job: ScoreJob) -> None:
        """After a pass: the job is done, or waits for its next turn."""
        if job.passes:
            self._jobs.append(job)
        else:
            job.finish()

    def fail_all(self, error: Callable[[], BaseException]) -> None:
        """Nothing is run any more; every job gets an error of its own."""
        while self._jobs:
            self._jobs.popleft().fail(error())
