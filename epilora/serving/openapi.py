"""The HTTP API as an OpenAPI 3.1 document, served at /openapi.json; tests make requests from it."""

from __future__ import annotations

from typing import Any

from epilora import __version__

from .admin import MAX_NUMBER
from .openai_api import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _nullable(**schema: Any) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


_SAMPLING: dict[str, Any] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 512, "examples": ["tiny", "tone", "tone@1", "tiny:tone"]},
    "max_tokens": _nullable(type="integer", minimum=1, maximum=1 << 24),
    "temperature": _nullable(type="number", minimum=0, maximum=2),
    "top_p": _nullable(type="number", exclusiveMinimum=0, maximum=1),
    "top_k": _nullable(type="integer", minimum=-1, maximum=1 << 24),
    "n": _nullable(type="integer", minimum=1, maximum=MAX_CHOICES),
    "seed": _nullable(type="integer", minimum=-(1 << 63), maximum=(1 << 63) - 1),
    "stream": _nullable(type="boolean"),
    "ignore_eos": _nullable(type="boolean"),
    "stop": {
        "anyOf": [
            {"type": "null"},
            {"type": "string", "minLength": 1, "maxLength": 1024},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": 1024},
            },
        ]
    },
}
_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}}
_COMPLETION = {
    "type": "object",
    "required": ["model", "prompt"],
    "additionalProperties": False,
    "properties": {
        **_SAMPLING,
        "logprobs": _nullable(type="integer", minimum=0, maximum=MAX_LOGPROBS),
        "prompt": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKENS,
                {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _TOKENS},
            ]
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": "string"},
        "name": _nullable(type="string"),
    },
}
_CHAT = {
    "type": "object",
    "required": ["model", "messages"],
    "additionalProperties": False,
    "properties": {
        **_SAMPLING,
        "logprobs": _nullable(type="boolean"),
        "messages": {"type": "array", "minItems": 1, "maxItems": 4096, "items": _MESSAGE},
    },
}
_NAME = {"type": "string", "minLength": 1, "maxLength": 4096}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/load_lora_adapter": {
        "type": "object",
        "required": ["lora_name", "lora_path"],
        "properties": {"lora_name": _NAME, "lora_path": _NAME, "owner": _nullable(type="string", maxLength=4096)},
    },
    "/v1/unload_lora_adapter": {
        "type": "object",
        "required": ["lora_name"],
        "properties": {"lora_name": _NAME, "owner": _nullable(type="string", maxLength=4096)},
    },
    "/v1/adapters/promote": {
        "type": "object",
        "required": ["name", "version"],
        "properties": {
            "name": _NAME,
            "version": {"type": "integer", "minimum": 1, "maximum": MAX_NUMBER},
            "owner": _nullable(type="string", maxLength=4096),
        },
    },
    "/v1/adapters/rollback": {
        "type": "object",
        "required": ["name"],
        "properties": {"name": _NAME, "owner": _nullable(type="string", maxLength=4096)},
    },
    "/v1/adapters/gc": {
        "type": "object",
        "properties": {"keep_latest": {"type": "integer", "minimum": 1, "maximum": MAX_NUMBER}},
    },
    "/v1/engines/drain": {
        "type": "object",
        "required": ["engine"],
        "properties": {"engine": _NAME, "drain": {"type": "boolean"}},
    },
}
_PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 1000}},
    {"name": "offset", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 1 << 31}},
]
_GETS: dict[str, list[dict[str, Any]]] = {
    "/health": [],
    "/ready": [],
    "/metrics": [],
    "/v1/models": _PAGE,
    "/v1/models/{model}": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
    "/v1/versions": [{"name": "name", "in": "query", "required": True, "schema": {"type": "string"}}],
    "/v1/state": [],
    "/v1/audit": [
        _PAGE[0],
        {"name": "after_id", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 1 << 62}},
    ],
}
_OPEN = {"/health", "/ready", "/metrics"}


def document() -> dict[str, Any]:
    """The whole API; a port serves the part of it that its role has."""
    errors = {
        "default": {
            "description": "an error in OpenAI's shape",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    }
    good = {"200": {"description": "the answer"}}
    paths: dict[str, Any] = {}
    for path, parameters in _GETS.items():
        responses = {**good, **errors} if path not in _OPEN else {**good, "503": {"description": "not ready"}}
        paths[path] = {"get": {"parameters": parameters, "responses": responses}}
        if path in _OPEN:
            paths[path]["get"]["security"] = []
    for path, schema in _BODIES.items():
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": {**good, **errors}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "EpiLoRA", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
