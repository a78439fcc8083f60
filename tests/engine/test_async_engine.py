"""The engine behind asyncio."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tiny_engines import finish_of, generated, make_model, make_tokenizer, request, tokens_of

from moe_opt import UnitedExperts, detach_united_experts
from moe_opt.errors import ConfigError
from moe_opt.modeling.score_item import ScoreItem
from moe_opt.modeling.scoring import score_items
from moe_opt.serving.engine.async_engine import AsyncEngine
from moe_opt.serving.engine.config import EngineConfig
from moe_opt.serving.engine.types import (
    EngineClosedError,
    Event,
    FinishEvent,
    Grammar,
    InvalidRequestError,
    OverloadedError,
)

PROMPT = tuple(range(5, 26))


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(**{"page_size": 4, "kv_pages": 64, "max_batch_size": 4, **settings})
    engine = AsyncEngine(make_model(), make_tokenizer(), config)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        engine.engine.check()
        assert engine.engine.stats().used_pages == 0


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(bounded())


def test_requests_run_together_and_stream_in_order() -> None:
    async def body() -> None:
        async with running() as engine:
            prompts = [PROMPT[: 3 + 2 * i] for i in range(8)]
            streams = [engine.submit(request(str(i), p, max_new_tokens=8)) for i, p in enumerate(prompts)]
            for prompt, events in zip(prompts, await asyncio.gather(*map(collect, streams)), strict=True):
                assert tokens_of(events) == generated("qwen2_moe", prompt, 8)
                assert [event.index for event in events[:-1]] == list(range(len(events) - 1))
            assert engine.stats().finished == 8

    in_loop(body)


def test_closing_a_stream_cancels_its_request_and_only_that() -> None:
    async def body() -> None:
        async with running() as engine:
            kept = asyncio.create_task(collect(engine.submit(request("kept", PROMPT, max_new_tokens=12))))
            stream = engine.submit(request("left", PROMPT[::-1], ignore_eos=True))
            seen = [await anext(stream) for _ in range(3)]
            await stream.aclose()
            assert [event async for event in stream] == []
            assert len(seen) == 3
            assert tokens_of(await kept) == generated("qwen2_moe", PROMPT, 12)
            assert await engine.drain(10)
            assert engine.stats().cancelled == 1

    in_loop(body)


def test_a_cancelled_task_cancels_its_request() -> None:
    async def body() -> None:
        async with running() as engine:
            task = asyncio.create_task(collect(engine.submit(request("a", PROMPT, ignore_eos=True))))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await engine.drain(10)
            await engine.set_brownout(threshold=1.0)  # every earlier command has been obeyed
            assert (engine.stats().cancelled, engine.stats().used_pages) == (1, 0)

    in_loop(body)


def test_cancel_by_id_ends_the_stream_without_a_finish() -> None:
    async def body() -> None:
        async with running() as engine:
            stream = engine.submit(request("a", PROMPT, ignore_eos=True))
            first = await anext(stream)
            engine.cancel("a")
            engine.cancel("a")
            engine.cancel("nobody")
            rest = await collect(stream)
            assert not any(isinstance(event, FinishEvent) for event in [first, *rest])

    in_loop(body)


def test_random_cancellations_lose_nothing_and_leak_no_page() -> None:
    async def body() -> None:
        rng = random.Random(5)
        async with running(kv_pages=40, max_waiting=500) as engine:

            async def one(index: int) -> str:
                await asyncio.sleep(rng.random() * 0.5)
                prompt = PROMPT[: rng.randint(1, 21)]
                stream = engine.submit(request(str(index), prompt, max_new_tokens=rng.randint(1, 10)))
                stop_after = rng.choice([None, None, 0, 1, 4])
                events = []
                async for event in stream:
                    events.append(event)
                    if stop_after is not None and len(events) > stop_after:
                        await stream.aclose()
                if stop_after is None:
                    assert tokens_of(events) == generated("qwen2_moe", prompt, 16)[: len(events) - 1]
                    return finish_of(events).finish_reason
                return "left"

            results = await asyncio.gather(*(one(index) for index in range(150)))
            assert await engine.drain(10)
            await engine.set_brownout(threshold=1.0)
            stats = engine.stats()
            assert stats.finished + stats.cancelled == 150
            assert results.count("left") >= stats.cancelled
            assert (stats.running, stats.waiting, stats.used_pages) == (0, 0, 0)
            assert stats.free_pages + stats.cached_pages == stats.total_pages

    in_loop(body)


def test_refusals_come_at_once_and_grammar_errors_with_the_stream() -> None:
    async def body() -> None:
        pytest.importorskip("llguidance")
        async with running(max_waiting=1, max_batch_size=1) as engine:
            with pytest.raises(InvalidRequestError, match="no tokens"):
                engine.submit(request("empty", ()))
            streams = [engine.submit(request(str(i), PROMPT, max_new_tokens=3)) for i in range(2)]
            with pytest.raises(InvalidRequestError, match="in use"):
                engine.submit(request("1", PROMPT))
            with pytest.raises(OverloadedError):
                engine.submit(request("2", PROMPT))
            await asyncio.gather(*map(collect, streams))
            bad = engine.submit(request("bad", PROMPT, grammar=Grammar("regex", "((")))
            with pytest.raises(InvalidRequestError, match="`grammar` does not compile"):
                await collect(bad)
            good = engine.submit(request("good", PROMPT, grammar=Grammar("regex", "(ab)+x"), max_new_tokens=20))
            assert finish_of(await collect(good)).generated_text.startswith("ab")

    in_loop(body)


def test_draining_finishes_what_runs_and_takes_nothing_more() -> None:
    async def body() -> None:
        async with running() as engine:
            task = asyncio.create_task(collect(engine.submit(request("a", PROMPT, max_new_tokens=30, ignore_eos=True))))
            await asyncio.sleep(0)
            assert await engine.drain(0.0001) is False
            with pytest.raises(EngineClosedError):
                engine.submit(request("b", PROMPT))
            assert await engine.drain(20)
            assert finish_of(await task).generated_tokens == 30
            assert engine.stats().draining

    in_loop(body)


def test_closing_answers_what_still_runs() -> None:
    async def body() -> None:
        engine = AsyncEngine(make_model(), make_tokenizer(), EngineConfig(kv_pages=64))
        await engine.start()
        assert engine.alive
        task = asyncio.create_task(collect(engine.submit(request("a", PROMPT, ignore_eos=True, max_new_tokens=100))))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineClosedError):
            await task
        assert not engine.alive
        with pytest.raises(EngineClosedError):
            engine.submit(request("b", PROMPT))
        await engine.close()

    in_loop(body)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_if_the_thread_dies_nobody_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        engine = AsyncEngine(make_model(), make_tokenizer(), EngineConfig(kv_pages=64))
        await engine.start()
        monkeypatch.setattr(engine.engine, "step", lambda: (_ for _ in ()).throw(SystemExit("killed")))
        with pytest.raises(EngineClosedError):
            await collect(engine.submit(request("a", PROMPT)))
        await asyncio.sleep(0.05)
        assert not engine.alive
        await engine.close()

    in_loop(body)


def test_brownout_and_united_experts_change_while_serving() -> None:
    async def body() -> None:
        async with running() as engine:
            stream = engine.submit(request("a", PROMPT, max_new_tokens=40, ignore_eos=True))
            await anext(stream)
            with pytest.raises(ConfigError):
                await engine.set_brownout(threshold=2.0)
            engine.set_brownout_soon(threshold=7.0)  # logged, harmless
            await engine.swap_united(UnitedExperts.from_average(engine.engine.runner.model, ways=2))
            await engine.set_brownout(threshold=0.1, phase="decode")
            assert engine.brownout().decode.threshold == 0.1
            events = await collect(stream)
            assert finish_of(events).browned
            await engine.set_brownout(threshold=1.0)

    try:
        in_loop(body)
    finally:
        detach_united_experts(make_model())


def test_an_idle_engine_sleeps() -> None:
    async def body() -> None:
        async with running() as engine:
            await collect(engine.submit(request("a", PROMPT, max_new_tokens=2)))
            before = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.1
            assert engine.stats().steps >= 1

    in_loop(body)


def score_jobs(count: int) -> list[ScoreItem]:
    """Prompts without a common beginning, so that each takes a pass of its own in a small batch."""
    return [ScoreItem([3 + i, *PROMPT[: 12 + i % 5]], [[7 + i], [9, 11 + i]]) for i in range(count)]


def test_scoring_takes_turns_with_the_steps_of_requests() -> None:
    items = score_jobs(12)
    expected = score_items(make_model(), items)

    async def body() -> None:
        async with running(max_batch_prefill_tokens=16) as engine:
            streams = [engine.submit(request(str(i), PROMPT[: 5 + i], max_new_tokens=12)) for i in range(3)]
            parts = [engine.score(items[:5]), engine.score(items[5:])]
            first, second, *events = await asyncio.gather(*parts, *map(collect, streams))
            for found, values in zip([*first, *second], expected, strict=True):
                assert found == pytest.approx(values, abs=1e-4)
            for i, found in enumerate(events):
                assert tokens_of(found) == generated("qwen2_moe", PROMPT[: 5 + i], 12)
            assert await engine.score([]) == []
            with pytest.raises(ConfigError, match="at least one token"):
                await engine.score([ScoreItem([1], [[]])])

    in_loop(body)


def test_callers_that_go_away_leave_the_engine_running() -> None:
    async def body() -> None:
        async with running(max_batch_prefill_tokens=16) as engine:
            stream = engine.submit(request("kept", PROMPT, max_new_tokens=24, ignore_eos=True))
            for _ in range(4):
                await anext(stream)
                gone = [
                    asyncio.create_task(call)
                    for call in (engine.score(score_jobs(30)), engine.set_brownout(threshold=1.0))
                ]
                await asyncio.sleep(0.002)
                for task in gone:
                    task.cancel()
                await asyncio.gather(*gone, return_exceptions=True)
            assert len(await collect(stream)) == 21
            assert engine.alive
            assert len(await engine.score(score_jobs(2))) == 2

    in_loop(body)


def test_whoever_waits_for_scores_hears_of_the_end() -> None:
    async def body() -> None:
        async with running(max_batch_prefill_tokens=16) as engine:
            waiting = [asyncio.create_task(engine.score(score_jobs(400))) for _ in range(2)]
            while not len(engine._scoring):
                await asyncio.sleep(0.001)
            await engine.close()
            for task in waiting:
                with pytest.raises(EngineClosedError):
                    await task

    in_loop(body)
