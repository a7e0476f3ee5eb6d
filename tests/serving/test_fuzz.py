"""Requests made from the OpenAPI document, valid and broken: never a 5xx, never an error out of shape, nothing left over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from epilora.serving.openapi import document
from epilora.serving.settings import Timeouts
from tests.serving.operators_port import operators_port
from tests.serving.serving_parts import Parts

EXAMPLES = int(os.environ.get("EPILORA_FUZZ_EXAMPLES", "4"))  # per operation; raise it for a long run
schema = schemathesis.openapi.from_dict(document())
schema.config.generation.update(modes=list(GenerationMode))


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Parts]]:
    parts = Parts(tmp_path_factory.mktemp("fuzz"), timeouts=Timeouts())
    for name in ("tone", "other"):
        parts.publish(name, len(name))
    with operators_port(parts.core) as (url, _):
        yield url, parts


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_request_gets_an_answer_in_shape(case: schemathesis.Case, port: tuple[str, Parts]) -> None:
    url, _ = port
    for key in ("admin-key", "acme-key"):
        answer = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        case.validate_response(answer, checks=[not_a_server_error, response_schema_conformance])
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_nothing_is_left_running(port: tuple[str, Parts]) -> None:
    _, parts = port
    assert (parts.core.completions.running, parts.core.completions.gate.running) == (0, 0)
    assert parts.engines[0].running == set()


def test_the_document_names_every_route(tmp_path: Path) -> None:
    routes = {path for _, path in Parts(tmp_path).core._routes} - {"/", "/page.js", "/page.css", "/openapi.json"}
    assert routes == set(document()["paths"]) - {"/v1/models/{model}"}
