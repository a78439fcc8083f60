"""The scoring routes of a real server, against direct calls of the same model."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


def direct(reference: Any, prompt: str | list[int], choices: list[list[int]]) -> list[float]:
    """Log-probability of each choice's tokens after the prompt."""
    model, tokenizer = reference
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    out = []
    for choice in choices:
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *choice]])).logits[0].log_softmax(-1)
        out.append(float(sum(logits[len(ids) + j - 1, token] for j, token in enumerate(choice))))
    return out


def softmax(values: list[float]) -> list[float]:
    return torch.tensor(values).softmax(0).tolist()


def tokens(reference: Any, text: str) -> list[int]:
    return reference[1](text, add_special_tokens=False)["input_ids"]


QUERY = "The court held that the contract was"
ITEMS = [" void.", " signed in the morning.", " void."]


def test_score(server, reference) -> None:
    labels = [11, 300, 42]
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": labels}
    answer = server.post("/v1/score", body).json()
    expected = [direct(reference, QUERY + item, [[t] for t in labels]) for item in ITEMS]
    for found, values in zip(answer["scores"], expected, strict=True):
        assert found == pytest.approx([math.exp(v) for v in values], rel=2e-3, abs=1e-7)
    assert answer["object"] == "scoring"
    assert answer["usage"]["prompt_tokens"] == sum(len(reference[1](QUERY + item)["input_ids"]) for item in ITEMS)
    soft = server.post("/v1/score", {**body, "apply_softmax": True}).json()["scores"]
    assert soft[0] == pytest.approx(softmax(expected[0]), abs=1e-3)
    first = server.post("/v1/score", {**body, "items": ITEMS[1], "item_first": True, "apply_softmax": True}).json()
    assert first["scores"][0] == pytest.approx(
        softmax(direct(reference, ITEMS[1] + QUERY, [[t] for t in labels])), abs=1e-3
    )


def test_score_takes_token_ids(server, reference) -> None:
    query, item = tokens(reference, QUERY), tokens(reference, ITEMS[1])
    body = {"query": query, "items": [item], "label_token_ids": [5, 9], "apply_softmax": True}
    found = server.post("/v1/score", body).json()["scores"][0]
    assert found == pytest.approx(softmax(direct(reference, query + item, [[5], [9]])), abs=1e-3)


def test_classify_by_text_scores_whole_choices(server, reference) -> None:
    choices = [" guilty of the crime.", " yes", " a very long answer that nobody expected"]
    answer = server.post("/v1/classify", {"input": [QUERY, "def f(x):"], "choices": choices}).json()
    for text, row in zip([QUERY, "def f(x):"], answer["data"], strict=True):
        values = direct(reference, text, [tokens(reference, choice) for choice in choices])
        assert row["logprobs"] == pytest.approx(values, abs=2e-3)
        assert row["probabilities"] == pytest.approx(softmax(values), abs=1e-3)
        assert row["label"] == choices[row["choice"]]
        assert row["choice"] == max(range(3), key=values.__getitem__)


def test_classify_by_identifier_and_labels(server, reference) -> None:
    body = {"input": "Water boils at 100 degrees.", "choices": ["physics", "law"]}
    row = server.post("/v1/classify", {**body, "mode": "identifier"}).json()["data"][0]
    prompt = "Water boils at 100 degrees.\nA. physics\nB. law\nAnswer:"
    expected = softmax(direct(reference, prompt, [tokens(reference, " A"), tokens(reference, " B")]))
    assert row["probabilities"] == pytest.approx(expected, abs=1e-3)
    labels = server.post("/v1/classify", {**body, "mode": "multi_label", "threshold": 0.0}).json()["data"][0]
    assert labels["labels"] == ["physics", "law"]
    prompt = "Water boils at 100 degrees.\nLabel: law\nDoes the label apply? Answer:"
    expected = softmax(direct(reference, prompt, [tokens(reference, " yes"), tokens(reference, " no")]))
    assert labels["probabilities"][1] == pytest.approx(expected[0], abs=1e-3)


def test_rerank_orders_by_relevance(server) -> None:
    documents = ["Contracts may be void.", "The fish swims.", "A court decides."]
    answer = server.post("/v1/rerank", {"query": "law", "documents": documents}).json()["results"]
    assert sorted(result["index"] for result in answer) == [0, 1, 2]
    scores = [result["relevance_score"] for result in answer]
    assert scores == sorted(scores, reverse=True)
    assert answer[0]["document"]["text"] == documents[answer[0]["index"]]
    top = server.post("/v1/rerank", {"query": "law", "documents": documents, "top_n": 1, "return_documents": False})
    assert [result["index"] for result in top.json()["results"]] == [answer[0]["index"]]
    assert "document" not in top.json()["results"][0]


def test_scores_beside_generation_change_nothing(server, reference, greedy) -> None:
    """Scoring runs between the steps of requests that generate, and neither sees the other."""
    _, tokenizer = reference
    expected = tokenizer.decode(greedy(QUERY, 24))
    body = {"inputs": QUERY, "parameters": {"max_new_tokens": 24, "ignore_eos": True}}
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(server.post, "/generate", body) for _ in range(4)]
        scores = [
            pool.submit(server.post, "/v1/score", {"query": QUERY, "items": ITEMS, "label_token_ids": [11, 300]})
            for _ in range(8)
        ]
    found = [future.result().json()["scores"] for future in scores]
    assert all(values == found[0] for values in found)
    for future in texts:
        assert future.result().json()["generated_text"] == expected
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [99999999]}, "vocabulary"),
        ("/v1/score", {"query": [1], "items": ["b"], "label_token_ids": [1]}, "both"),
        ("/v1/score", {"query": "a", "items": ["b"] * 1025, "label_token_ids": [1]}, "--max-score-items"),
        ("/v1/score", {"query": "a " * 5000, "items": ["b"], "label_token_ids": [1]}, "less than"),
        ("/v1/classify", {"input": "a", "choices": []}, "choices"),
        ("/v1/classify", {"input": "a", "choices": ["b"], "mode": "best"}, "mode"),
        ("/v1/classify", {"input": "a", "choices": [str(k) for k in range(30)], "mode": "identifier"}, "at most 26"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_wrong_bodies_are_422(server, path: str, body: dict[str, Any], message: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 422
    assert message in response.json()["error"]
    assert response.json()["error_type"] == "validation"
