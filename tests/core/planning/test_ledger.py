"""The memory ledger: what it predicts, when a line is off, and which line is blamed when memory runs out."""

from __future__ import annotations

import pytest
import torch
from args_world import GIB, model

from srv.args.config import Config, make_config
from srv.errors import SrvError, is_out_of_memory, startup_failure
from srv.io.memory_lines import MemoryLine
from srv.planning.budget import compute
from srv.planning.ledger import Ledger, line_text, predict, predicted_text
from srv.planning.pools import bytes_per_page

MIB = 2**20
RESERVED = {"activations": 4.0 * MIB, "sampling": 2.0 * MIB, "runtime": 100.0 * MIB, "graphs": 50.0 * MIB, "ranks": 0.0}
VALUES = {
    "dtype": "bfloat16",
    "context_length": 1000,
    "mem_fraction_static": 0.5,
    "page_size": 16,
    "max_running_requests": 8,
    "graph_max_batch_size": 4,
    "disable_graphs": False,
}


def config(**values: object) -> Config:
    return make_config({**VALUES, **values})


def predicted(**values: object) -> dict[str, int | None]:
    chosen = config(**values)
    budget = compute(chosen, model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    return {line.name: line.predicted for line in predict(chosen, model(), RESERVED, budget)}


def test_each_part_of_the_memory_has_one_line() -> None:
    lines = predicted()
    chosen = config()
    budget = compute(chosen, model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    columns = -(-budget.max_request_tokens // 16)
    logits, inputs = 4 * 1000 * 4, 4 * (8 + 8 + 4 * columns)
    assert lines == {
        "runtime": 100 * MIB,
        "weights": 200_000_000,
        "prepared weights": 200_000_000,
        "KV pool": (budget.pages[0] + 1) * bytes_per_page(chosen, model())[0],
        "backend buffers": None,
        "captured logits": logits,
        "captured inputs": inputs,
        "graphs": 50 * MIB - logits - inputs,
        "activations": 6 * MIB,
    }
    assert "graphs" not in predicted(disable_graphs=True)


def test_blocks_of_a_gguf_file_are_predicted_as_they_are_stored() -> None:
    stored = {"Q4_1": 32_000, "Q8_0": 3_200, "F32": 100}
    quantized = model(format="gguf", quantization="gguf:Q4_1", stored_types=stored, parameters=35_300)
    lines = {line.name: line.predicted for line in predict(config(), quantized, RESERVED)}
    assert lines["weights"] == 1000 * 20 + 100 * 34 + 100 * 2
    assert lines["prepared weights"] == 32_000 * 10 // 16 + 3_200 * 17 // 16 + 100 * 2
    assert lines["KV pool"] is None, "it depends on what is free once the weights are loaded"


def test_a_line_is_off_beyond_five_percent_in_either_direction() -> None:
    off = {measured: MemoryLine("weights", 1000, measured).off for measured in (949, 950, 1050, 1051)}
    assert off == {949: True, 950: False, 1050: False, 1051: True}
    assert not MemoryLine("weights", None, 1000).off
    assert not MemoryLine("weights", 1000).off


def test_the_text_of_a_line_gives_both_figures_and_their_difference() -> None:
    assert line_text(MemoryLine("x", 2 * MIB, 3 * MIB)) == "2.00 MiB predicted, 3.00 MiB measured (+50.0%)"
    assert line_text(MemoryLine("x", None, note="none here")) == "no prediction, not measured; none here"
    assert predicted_text(MemoryLine("x", MIB, note="at most")) == "1.00 MiB, at most"
    assert predicted_text(MemoryLine("x", None)) == "no claim is made"


def test_better_predictions_keep_what_was_measured() -> None:
    ledger = Ledger(predict(config(), model(), RESERVED))
    ledger.measure("weights", 123, "counted")
    budget = compute(config(), model(), free_bytes=15 * GIB, total_bytes=16 * GIB)
    ledger.expect(predict(config(), model(), RESERVED, budget))
    lines = {line.name: line for line in ledger.lines}
    assert (lines["weights"].measured, lines["weights"].note) == (123, "counted")
    assert lines["KV pool"].predicted is not None


def test_the_line_with_the_largest_excess_is_blamed() -> None:
    ledger = Ledger(predict(config(), model(), RESERVED))
    ledger.measure("weights", 400_000_000)
    ledger.measure("runtime", 101 * MIB)  # within 5 %
    ledger.measure("prepared weights", 220_000_000)
    error = ledger.exhausted("KV pool", torch.OutOfMemoryError("no room for 3 GiB\ntraceback"), 7 * MIB)
    assert error.line == "weights"
    text = str(error)
    assert text.startswith("memory ran out for KV pool: the device has no more memory (no room for 3 GiB). ")
    assert "190.73 MiB predicted, 381.47 MiB measured (+100.0%)" in text
    assert "--tp-size" in text
    assert "--max-total-tokens" in text
    assert "ulimit" not in text
    assert startup_failure(error) == ([text], 2)


def test_without_an_excess_the_line_that_did_not_fit_is_blamed() -> None:
    ledger = Ledger(predict(config(), model(), RESERVED))
    ledger.measure("weights", 200_000_000)
    error = ledger.exhausted("activations", MemoryError(), 5 * MIB)
    assert error.line == "activations"
    assert "6.00 MiB predicted, and 5.00 MiB are free" in str(error)
    assert "--chunked-prefill-size" in str(error)
    assert "this process can have no more host memory (MemoryError)" in str(error)
    assert "ulimit -v" in str(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
        (SrvError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
