"""The OpenAPI description of the routes, made from the very schemas that check the bodies."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moe_opt import __version__
from moe_opt.serving.api import schemas, score_schemas

_POSTS: dict[str, tuple[type[BaseModel] | None, str, bool]] = {
    "/": (schemas.CompatGenerateRequest, "Generate; a stream if `stream` is true", True),
    "/generate": (schemas.GenerateRequest, "Generate tokens", False),
    "/generate_stream": (schemas.GenerateRequest, "Generate a stream of tokens", True),
    "/tokenize": (schemas.TokenizeRequest, "Tokenize inputs", False),
    "/chat_tokenize": (schemas.ChatRequest, "Template and tokenize a chat request", False),
    "/v1/chat/completions": (schemas.ChatRequest, "Chat completion in OpenAI's dialect", True),
    "/v1/completions": (schemas.CompletionRequest, "Completion in OpenAI's dialect", True),
    "/v1/score": (score_schemas.ScoreRequest, "Probabilities of tokens after a query with each item", False),
    "/v1/classify": (score_schemas.ClassifyRequest, "Probabilities of choices given as text", False),
    "/v1/rerank": (score_schemas.RerankRequest, "Documents by their relevance to a query", False),
    "/invocations": (None, "SageMaker: the body of /, of chat or of completions", True),
    "/vertex": (schemas.VertexRequest, "Vertex: several prompts, texts back", False),
    "/brownout": (schemas.BrownoutUpdate, "Change thresholds, strategy or united experts while serving", False),
}
_GETS = {
    "/": "Health, for probes that ask the root",
    "/health": "Whether the engine runs",
    "/ping": "The same for SageMaker",
    "/info": "The served model and its limits",
    "/metrics": "Prometheus metrics",
    "/v1/models": "The served model in OpenAI's dialect",
    "/brownout": "Thresholds, objectives and united experts as they are now",
    "/docs": "These routes on a page",
    "/api-doc/openapi.json": "This description",
}
_ERRORS = {
    "413": "The body is larger than the payload limit",
    "415": "The body is not JSON",
    "422": "Input validation error",
    "424": "Request failed during generation",
    "429": "Model is overloaded",
    "503": "The server is shutting down",
}


@functools.cache
def description() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    models = {model for model, _, _ in _POSTS.values() if model is not None}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    components = dict(definitions["$defs"])
    components["ErrorResponse"] = {
        "type": "object",
        "required": ["error", "error_type"],
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
    }
    paths: dict[str, Any] = {}
    for path, summary in _GETS.items():
        paths.setdefault(path, {})["get"] = {"summary": summary, "responses": {"200": {"description": "OK"}}}
    for path, (model, summary, streams) in _POSTS.items():
        schema = (
            {"$ref": f"#/components/schemas/{model.__name__}"}
            if model is not None
            else {
                "anyOf": [
                    {"$ref": f"#/components/schemas/{name}"}
                    for name in ("CompatGenerateRequest", "ChatRequest", "CompletionRequest")
                ]
            }
        )
        content: dict[str, Any] = {"application/json": {}}
        if streams:
            content["text/event-stream"] = {}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}
        responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
        responses.update({code: {"description": text, "content": error} for code, text in _ERRORS.items()})
        paths.setdefault(path, {})["post"] = {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
            "responses": responses,
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "moe-opt", "version": __version__, "description": "TGI's API over MoE models with brownout"},
        "paths": paths,
        "components": {"schemas": components},
    }
