"""What every policy promises, whatever the fleet looks like; and what each baseline is."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from fleets import check_promises, fleets, random_fleet, signature_model
from hypothesis import HealthCheck, given, settings

from moe_opt.cluster import (
    Assignment,
    Request,
    RunningRequest,
    Worker,
    make_policy,
    policy_names,
    register_policy,
)
from moe_opt.cluster.policies import OneByOnePolicy, registry
from moe_opt.cluster.predictors import SurvivalPredictor
from moe_opt.errors import ConfigError

MODEL = signature_model()
POLICIES = [
    ("random", {}),
    ("round-robin", {}),
    ("jsq", {}),
    ("p2c", {}),
    ("least-kv", {}),
    ("vllm-queue", {}),
    ("vllm-kv", {}),
    ("domain", {}),
    ("eldr", {"signature_model": MODEL}),
    ("br-0", {}),
    ("br-0", {"candidates": 2, "subset_size": 5, "pool_bound": 0}),
    ("br-h", {}),
    ("br-h", {"predictor": "survival", "horizon": 0}),
    ("br-h", {"predictor": "exact-match", "refresh_every": 1}),
    ("br-h", {"predictor": "length-bucket", "gamma": 0.5}),
    ("eldr+br-0", {"signature_model": MODEL}),
    ("eldr+br-h", {"signature_model": MODEL, "predictor": "survival", "tau": 0.0}),
]
IDS = [f"{name}-{'-'.join(map(str, options))}" for name, options in POLICIES]
RELAXED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def loaded(counts: list[int], max_running: int = 8, tokens: int = 10) -> list[Worker]:
    """One worker per entry, with that many requests of ``tokens`` KV tokens and one generated token each."""
    return [
        Worker(f"w{k}", max_running, {f"run-{k}-{i}": RunningRequest(tokens, generated=1) for i in range(count)})
        for k, count in enumerate(counts)
    ]


def queue(*prompts: int) -> list[Request]:
    return [Request(f"r{i}", tokens, arrival=float(i)) for i, tokens in enumerate(prompts)]


def where(assignments: list[Assignment]) -> list[str]:
    return [assignment.worker_id for assignment in assignments]


@pytest.mark.parametrize(("name", "options"), POLICIES, ids=IDS)
class TestEveryPolicy:
    @RELAXED
    @given(case=fleets())
    def test_keeps_its_promises(self, name, options, case):
        waiting, workers = case
        check_promises(waiting, workers, make_policy(name, **options).assign(waiting, workers, 0.0))

    @RELAXED
    @given(case=fleets())
    def test_the_state_is_left_as_it_was(self, name, options, case):
        waiting, workers = case
        before = [(w.id, dict(w.running), [replace(r) for r in w.running.values()]) for w in workers]
        order = list(waiting)
        make_policy(name, **options).assign(waiting, workers, 0.0)
        after = [(w.id, dict(w.running), list(w.running.values())) for w in workers]
        assert repr(before) == repr(after)
        assert waiting == order

    @RELAXED
    @given(case=fleets())
    def test_names_of_workers_do_not_matter(self, name, options, case):
        waiting, workers = case
        renamed = [replace(worker, id=("another", 9 - k)) for k, worker in enumerate(workers)]
        place = {worker.id: k for k, worker in enumerate(workers)}
        renamed_place = {worker.id: k for k, worker in enumerate(renamed)}
        first = make_policy(name, **options).assign(waiting, workers, 0.0)
        second = make_policy(name, **options).assign(waiting, renamed, 0.0)
        assert [(a.request_id, place[a.worker_id]) for a in first] == [
            (a.request_id, renamed_place[a.worker_id]) for a in second
        ]

    def test_the_same_seed_gives_the_same_day(self, name, options):
        days = []
        for _ in range(2):
            policy = make_policy(name, seed=5, **options)
            rng = np.random.default_rng(1)
            day = []
            for tick in range(6):
                waiting, workers = random_fleet(rng, workers=5, slots=6, free=3, waiting=12)
                day.append(policy.assign(waiting, workers, float(tick)))
                policy.observe_finished(waiting[0], int(rng.integers(1, 200)))
            days.append(day)
        assert days[0] == days[1]

    def test_nothing_comes_of_nothing(self, name, options):
        policy = make_policy(name, **options)
        assert policy.assign([], [], 0.0) == []
        assert policy.assign(queue(1, 2), [], 0.0) == []
        assert policy.assign([], loaded([0, 1]), 0.0) == []

    def test_a_full_or_draining_fleet_gets_nothing(self, name, options):
        workers = loaded([3, 3, 0], max_running=3)
        workers[2].draining = True
        assert make_policy(name, **options).assign(queue(1, 2), workers, 0.0) == []

    def test_a_day_loses_nothing_and_ends(self, name, options):
        """Every request gets its worker in the end, oversized loads and zero-token prompts included."""
        policy = make_policy(name, **options)
        rng = np.random.default_rng(0)
        workers = [Worker(k, 3, kv_capacity=50_000) for k in range(4)]
        waiting = [
            Request(i, int(rng.choice([0, 1, 700, 30_000])), arrival=i / 10, prompt_hash=i % 3) for i in range(60)
        ]
        requests = {request.id: request for request in waiting}
        left = {request.id: int(rng.integers(1, 30)) for request in waiting}
        seen: list[int] = []
        for step in range(1000):
            assignments = policy.assign(waiting, workers, float(step))
            check_promises(waiting, workers, assignments)
            for request_id, worker_id in assignments:
                workers[worker_id].running[request_id] = RunningRequest(requests[request_id].prompt_tokens)
                seen.append(request_id)
            waiting = [request for request in waiting if request.id not in seen]
            for worker in workers:
                for request_id, request in list(worker.running.items()):
                    request.kv_tokens += 1
                    request.generated += 1
                    if request.generated == left[request_id]:
                        del worker.running[request_id]
                        policy.observe_finished(requests[request_id], request.generated)
            if not waiting:
                break
        assert sorted(seen) == sorted(requests)

    def test_a_repeated_id_is_assigned_once(self, name, options):
        workers = loaded([1, 1])
        twice = [*queue(5, 6), *queue(5, 6), Request("run-0-0", 4)]
        assert sorted(a.request_id for a in make_policy(name, **options).assign(twice, workers, 0.0)) == ["r0", "r1"]

    def test_a_request_that_runs_already_is_not_assigned_again(self, name, options):
        assert make_policy(name, **options).assign([Request("run-0-0", 4)], loaded([1, 1]), 0.0) == []

    def test_two_workers_with_one_id_are_refused(self, name, options):
        with pytest.raises(ValueError, match="worker ids must differ"):
            make_policy(name, **options).assign(queue(1), [Worker("a", 1), Worker("a", 1)], 0.0)


class TestMakePolicy:
    def test_an_unknown_name_lists_the_choices(self):
        with pytest.raises(ConfigError, match=r"unknown routing policy 'brh'.*jsq.*eldr\+br-h"):
            make_policy("brh")

    def test_an_unknown_option_lists_the_choices(self):
        with pytest.raises(ConfigError, match=r"'br-0' has no option 'alpha', 'horizon'; it takes: .*candidates"):
            make_policy("br-0", horizon=4, alpha=2)

    @pytest.mark.parametrize(
        "options",
        [
            {"gamma": 1.5},
            {"gamma": float("nan")},
            {"horizon": -1},
            {"candidates": 0},
            {"subset_size": 0},
            {"alpha": 0},
            {"beta": -1},
            {"pool_bound": -1},
            {"predictor": "survival", "refresh_every": 0},
            {"predictor": "crystal-ball"},
            {"predictor": object()},
            {"predictor": SurvivalPredictor},
            {"patience": -1},
        ],
    )
    def test_a_setting_out_of_range_is_refused(self, options):
        with pytest.raises(ConfigError):
            make_policy("br-h", **options)

    def test_users_add_their_own(self, monkeypatch):
        monkeypatch.setattr(registry, "_registered", {})

        class LastPolicy(OneByOnePolicy):
            def choose(self, request, fitting, fleet):
                return fitting[-1]

        register_policy("last", LastPolicy)
        assert "last" in policy_names()
        assert where(make_policy("last").assign(queue(1), loaded([0, 0, 0]), 0.0)) == ["w2"]
        with pytest.raises(ConfigError, match="exists already"):
            register_policy("jsq", LastPolicy)
        with pytest.raises(ConfigError, match="it takes: seed"):
            make_policy("last", seed=0, speed=1)

    def test_no_torch_no_http_and_no_scikit_learn_unless_asked_for(self):
        code = """
import sys
from moe_opt.cluster import Request, Worker, make_policy
for name in ("jsq", "br-0", "br-h"):
    make_policy(name).assign([Request("r", 1)], [Worker("w", 1)], 0.0)
assert not {"torch", "transformers", "sklearn", "aiohttp"} & set(sys.modules)
"""
        subprocess.run([sys.executable, "-c", code], check=True)


class TestState:
    def test_every_worker_has_its_own_running_dict(self):
        assert Worker("a", 1).running is not Worker("b", 1).running

    def test_an_assignment_is_a_plain_pair(self):
        assert Assignment("r", "w") == ("r", "w")

    @pytest.mark.parametrize("tokens", [-1, float("nan")])
    def test_a_prompt_has_no_negative_length(self, tokens):
        with pytest.raises(ConfigError, match="prompt_tokens"):
            Request("r", tokens)

    def test_load_is_what_runs_and_what_is_reserved(self):
        worker = Worker("w", 4, {"a": RunningRequest(7), "b": RunningRequest(5)}, reserved_tokens=3)
        assert (worker.kv_tokens, worker.free_slots) == (15, 2)


class TestBaselines:
    def test_older_requests_go_first(self):
        late, early = Request("late", 1, arrival=2.0), Request("early", 1, arrival=1.0)
        assignments = make_policy("jsq").assign([late, early], [Worker("w", 1)], 0.0)
        assert assignments == [("early", "w")]

    def test_jsq_levels_requests(self):
        assert where(make_policy("jsq").assign(queue(9, 9, 9, 9), loaded([2, 0, 1]), 0.0)) == ["w1", "w1", "w2", "w0"]

    def test_least_kv_levels_tokens(self):
        workers = loaded([1, 1])
        workers[0].running["run-0-0"].kv_tokens = 100
        assert where(make_policy("least-kv").assign(queue(60, 50, 10), workers, 0.0)) == ["w1", "w1", "w0"]

    def test_round_robin_goes_on_where_it_stopped_and_passes_full_workers(self):
        policy = make_policy("round-robin")
        workers = loaded([0, 8, 0])
        assert where(policy.assign(queue(1), workers, 0.0)) == ["w0"]
        assert where(policy.assign(queue(1, 1), workers, 0.0)) == ["w2", "w0"]

    def test_random_reaches_everyone(self):
        counts = Counter(where(make_policy("random", seed=1).assign(queue(*[1] * 300), loaded([0, 0, 0], 300), 0.0)))
        assert min(counts.values()) > 70

    def test_p2c_never_takes_the_longest_queue(self):
        workers = loaded([0, 0, 200], max_running=400)
        counts = Counter(where(make_policy("p2c", seed=1).assign(queue(*[1] * 100), workers, 0.0)))
        assert counts["w2"] == 0
        assert min(counts["w0"], counts["w1"]) > 25

    def test_vllm_queue_counts_a_request_without_tokens_four_times(self):
        workers = loaded([3, 1])
        workers[1].running["run-1-0"].generated = 0
        assert where(make_policy("vllm-queue").assign(queue(1), workers, 0.0)) == ["w0"]  # 3 against 4

    def test_vllm_kv_avoids_a_queue_where_memory_is_scarce(self):
        workers = loaded([3, 2])
        for worker in workers:
            worker.kv_capacity = 1000
        workers[1].running["run-1-0"] = RunningRequest(890, generated=0)
        # w0: 3 in flight, none waiting. w1: 2 in flight, 1 waiting at 0.9: 2 + 6 * 0.4 = 4.4.
        assert where(make_policy("vllm-kv").assign(queue(1), workers, 0.0)) == ["w0"]
        workers[1].running["run-1-0"].kv_tokens = 400
        assert where(make_policy("vllm-kv").assign(queue(1), workers, 0.0)) == ["w1"]

    def test_vllm_kv_rotates_ties(self):
        policy = make_policy("vllm-kv")
        assert [where(policy.assign(queue(1), loaded([0, 0, 0]), 0.0))[0] for _ in range(4)] == ["w0", "w1", "w2", "w0"]

    def test_domain_keeps_labels_apart_until_their_workers_are_full(self):
        policy = make_policy("domain", domains=["code", "law"])
        waiting = [Request(f"r{i}", 1, arrival=float(i), domain=d) for i, d in enumerate(["law", "code", "law", "law"])]
        assert where(policy.assign(waiting, loaded([0, 0, 0], max_running=2), 0.0)) == ["w1", "w0", "w1", "w2"]

    def test_an_oversized_request_blocks_nobody(self):
        workers = [Worker("w", 4, kv_capacity=100)]
        assert make_policy("jsq").assign(queue(500, 10), workers, 0.0) == [("r1", "w")]
