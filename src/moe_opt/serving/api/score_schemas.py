"""Request bodies of the scoring routes: probabilities of given choices from one prefill."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moe_opt.serving.api.schemas import U32, RequestModel

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[U32], Field(min_length=1)]


class ScoreRequest(RequestModel):
    """`POST /v1/score`: next-token probabilities of some tokens after a query with each item.

    Attributes:
        query, items: texts, or token ids on both sides. A prompt is query + item; item + query with `item_first`.
        label_token_ids: the tokens to score. apply_softmax: over these tokens; without it their probabilities in the
            whole vocabulary.
    """

    query: Text | Ids
    items: Text | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    label_token_ids: Ids
    apply_softmax: bool = False
    item_first: bool = False
    model: str | None = None


class ClassifyRequest(RequestModel):
    """`POST /v1/classify`: probabilities of choices that are given as text.

    Attributes:
        input: one text or several. choices: at least one.
        mode: "text" scores each choice as the continuation of the input, whatever its number of tokens; "identifier"
            lists the choices under letters and scores the letters; "multi_label" asks about each choice by itself,
            yes or no, all after one shared prefix.
        threshold: "multi_label" only: a label applies from this probability on.
    """

    input: Text | Annotated[list[Text], Field(min_length=1)]
    choices: Annotated[list[Text], Field(min_length=1)]
    mode: Literal["text", "identifier", "multi_label"] = "text"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    model: str | None = None


class RerankRequest(RequestModel):
    """`POST /v1/rerank`: documents in the order of their relevance to a query.

    Attributes:
        top_n: only so many; all by default. return_documents: repeat the texts in the answer.
    """

    query: Text
    documents: Annotated[list[Text], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    model: str | None = None
