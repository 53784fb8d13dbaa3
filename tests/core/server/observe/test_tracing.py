"""Traces are refused with a remedy if their packages are missing, or if the protocol is none."""

from __future__ import annotations

import sys

import pytest

from srv.errors import Refusal
from srv.server.observe.tracing import PROTOCOL_VARIABLE, make_tracer


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    monkeypatch.delenv(PROTOCOL_VARIABLE, raising=False)
    with pytest.raises(Refusal) as refused:
        make_tracer("m", "localhost:4317", "command line")
    text = str(refused.value)
    assert "enable_trace = true (set by command line)" in text
    assert "pip install 'srv[trace]'" in text


def test_unknown_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "http/json")
    with pytest.raises(Refusal, match="grpc and http/protobuf"):
        make_tracer("m", "localhost:4317", "command line")
