"""Traces are refused where their packages are not installed: by launch and by plan alike, before anything starts."""

from __future__ import annotations

import pytest
from args_world import manifest, model, resolved, user

from srv.args.rules import debugging
from srv.errors import Refusal


def test_traces_need_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    here = debugging.TRACE_DISTRIBUTIONS[:2]
    monkeypatch.setattr(debugging, "_installed", lambda *names: frozenset(here))
    with pytest.raises(Refusal) as raised:
        resolved(user(enable_trace=True), manifest(), model=model())
    (rejection,) = raised.value.rejections
    assert (rejection.code, rejection.what) == ("not_installed", "enable_trace")
    assert rejection.reason == "opentelemetry-exporter-otlp-proto-http is not installed"
    resolved(user(), manifest(), model=model())
