"""Without native kernels, as on a machine without a compiler, the server still answers, and logs the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WARNING = "the native CPU kernels are not used, torch's operators are: "


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        pytest.param("SRV_CPU_NATIVE", "0", "SRV_CPU_NATIVE=0 turns it off", id="turned off"),
        pytest.param("SRV_CPU_LIBRARY", "none.so", "none.so does not exist; build it with", id="not built"),
    ],
)
def test_a_server_without_native_kernels_answers_and_says_why_it_has_none(
    tmp_path: Path, variable: str, value: str, why: str
) -> None:
    arguments = ("--device", "cpu", "--max-total-tokens", "4096")
    with served(tmp_path / "log", *arguments, environment={variable: value}) as server:
        asked = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        response = server.post("/v1/completions", model=server.model(), **asked)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert "Paris" in answer["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 8
        (line,) = [line for line in server.log_text().splitlines() if WARNING in line]
        assert "WARNING" in line
        assert why in line
