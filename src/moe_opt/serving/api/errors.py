"""One error type from the engine to the wire, in TGI's shape: `{"error": ..., "error_type": ...}`."""

from __future__ import annotations

import json
from typing import Any

from moe_opt.errors import ConfigError, MoEOptError
from moe_opt.serving.engine.types import (
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
)


class ApiError(MoEOptError):
    """What a client is told: HTTP status, machine-readable type, one sentence.

    Attributes:
        status: HTTP status. error_type: TGI's name of the kind. metric: label of `tgi_request_failure`.
    """

    def __init__(self, status: int, error_type: str, message: str, metric: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.metric = metric or error_type

    def body(self) -> dict[str, str]:
        return {"error": str(self), "error_type": self.error_type}

    def openai_body(self) -> dict[str, Any]:
        """The event that ends a stream of the OpenAI dialect."""
        return {"error": {"message": str(self), "http_status_code": self.status, "type": self.error_type}}

    def json(self) -> str:
        return json.dumps(self.body())


def validation_error(message: str) -> ApiError:
    return ApiError(422, "validation", f"Input validation error: {message}")


def tool_error(message: str) -> ApiError:
    return ApiError(422, "tool_error", f"Tool error: {message}")


def template_error(message: str) -> ApiError:
    return ApiError(422, "template_error", f"Template error: {message}")


def overloaded_error() -> ApiError:
    return ApiError(429, "overloaded", "Model is overloaded")


def generation_error(reason: str) -> ApiError:
    return ApiError(424, "generation", f"Request failed during generation: {reason}")


def incomplete_error() -> ApiError:
    return ApiError(500, "incomplete_generation", "Incomplete generation", metric="incomplete")


def unhealthy_error(message: str = "unhealthy") -> ApiError:
    return ApiError(503, "healthcheck", message)


def as_api_error(error: Exception) -> ApiError:
    """What the engine or our own code raised, as the client sees it. Details of unknown errors stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (InvalidRequestError, ConfigError)):
        return validation_error(str(error))
    if isinstance(error, OverloadedError):
        return overloaded_error()
    if isinstance(error, EngineClosedError):
        return unhealthy_error(str(error) or "the server is shutting down")
    if isinstance(error, MoEOptError):  # GenerationError among them
        return generation_error(str(error))
    return generation_error(f"{type(error).__name__}; see the server's log")
