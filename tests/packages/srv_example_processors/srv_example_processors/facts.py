"""The facts of the processors, which the API process reads without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.sample.third_party import ProcessorFacts


def _one_token(params: Mapping[str, Any]) -> str | None:
    token = params.get("token")
    if set(params) == {"token"} and isinstance(token, int) and token >= 0:
        return None
    return 'it must be {"token": ID}'


def _nothing(params: Mapping[str, Any]) -> str | None:
    return "it must be empty" if params else None


ONLY = ProcessorFacts("only", "srv_example_processors.processors:Only", _one_token)
BROKEN = ProcessorFacts("broken", "srv_example_processors.processors:Broken", _nothing)
