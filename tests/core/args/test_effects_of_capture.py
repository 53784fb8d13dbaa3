"""Arguments of graph capture and of torch.compile have an effect, as those in `test_effects`."""

from __future__ import annotations

import gc
import gzip
import tempfile
from pathlib import Path

import pytest
import torch
from engine_small import Small, engine, make_small, message, messages
from oracle_drafter import oracle
from torch import Tensor

from srv.errors import Refusal
from srv.worker.compiled import OpaqueCalls
from srv_cpu.graphs import CpuGraphs
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = [
    pytest.mark.slow,  # each test starts engines
    pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model with a head size that native attention supports."""
    return make_small("llama", tmp_path_factory.mktemp("captured"), head_dim=16)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model with two cache groups."""
    return make_small("gemma3", tmp_path_factory.mktemp("windowed"), head_dim=16)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def refused(small: Small, **flags: object) -> list[tuple[str, str, str]]:
    """What an engine with these arguments refuses: arguments, codes and reasons."""
    with pytest.raises(Refusal) as refusal, engine(small, page_size=16, **flags):
        pass
    return [(rejection.what, rejection.code, rejection.reason) for rejection in refusal.value.rejections]


# ---- capture


@covers("enable_graph_gc=false", "enable_graph_gc=true", platform="cpu")
def test_enable_graph_gc(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default no collection runs during a capture, and one that is asked for skips what existed before it."""
    seen: list[tuple[bool, bool]] = []
    capture = CpuGraphs.capture

    def watched(self: CpuGraphs, key: int, run: object) -> torch.Tensor:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return capture(self, key, run)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuGraphs, "capture", watched)
    for flags, collects, frozen in (({}, False, True), ({"enable_graph_gc": True}, True, False)):
        with engine(small, page_size=16, graph_batch_sizes="1,2", **flags):
            assert seen == [(collects, frozen)] * 2
        assert gc.isenabled()
        assert not gc.get_freeze_count()
        seen.clear()


@covers("enable_graph_profiling=false", "enable_graph_profiling=true", platform="cpu")
def test_enable_graph_profiling(small: Small, temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    def traces(**flags: object) -> list[Path]:
        with caplog.at_level("INFO", "srv.worker.capture"), engine(small, page_size=16, graph_batch_sizes=1, **flags):
            return list(temporary.glob("*-rank-0-graph-capture.trace.json.gz"))

    assert traces() == []
    (trace,) = traces(enable_graph_profiling=True)
    assert str(trace) in caplog.text
    assert "Self CPU" in caplog.text  # the table
    assert "aten::empty" in gzip.decompress(trace.read_bytes()).decode()


def test_options_of_capture_are_refused_without_graphs(small: Small) -> None:
    both = {"enable_graph_gc": True, "enable_graph_profiling": True}
    reason = "no step is captured (disable_graphs is true)"
    expected = [(name, "excluded", reason) for name in sorted(both)]
    assert sorted(refused(small, disable_graphs=True, **both)) == expected


# ---- compilation


@pytest.mark.slow
@covers("enable_torch_compile=false", "enable_torch_compile=true", "torch_compile_max_bs=32", platform="cpu")
def test_enable_torch_compile(small: Small, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps are not captured, give the same output, and are compiled before the first request."""
    calls: list[int] = []
    run_attention = OpaqueCalls.run_attention

    def counted(self: OpaqueCalls, q: Tensor, k: Tensor, v: Tensor, group: int, index: int) -> Tensor:
        calls.append(len(q))
        return run_attention(self, q, k, v, group, index)

    monkeypatch.setattr(OpaqueCalls, "run_attention", counted)
    for compiles, flags in ((False, {}), (True, {"enable_torch_compile": True})):
        with engine(small, page_size=16, max_running_requests=6, **flags) as served:
            calls.clear()
            assert [result.tokens for result in served.generate(messages(small.prompts))] == small.tokens
            assert bool({1, 2, 4} & set(calls)) is compiles  # rows of compiled steps
            assert (served.ready.graph_rows, served.stats().replayed_steps > 0) == (
                ([], False) if compiles else ([1, 2, 3, 4, 5, 6], True)
            )
            assert (served.stats().compiled_steps > 0) is compiles
            assert ("compiled" in dict(served.ready.budget)) is compiles
    assert "runs uncompiled" not in caplog.text


@pytest.mark.slow
@covers("torch_compile_max_bs=1", "torch_compile_max_bs=64", platform="cpu")
@covers("enable_torch_compile_debug_mode=false", "enable_torch_compile_debug_mode=true", platform="cpu")
def test_torch_compile_max_bs(small: Small, temporary: Path) -> None:
    """Larger steps than that are captured. In debug mode, a folder says what was compiled."""
    three = [message(str(number), [9 + number, 5, 6], 9, ignore_eos=True) for number in range(3)]

    def counts(**flags: object) -> tuple[list[int], int]:
        with engine(small, page_size=16, max_running_requests=6, enable_torch_compile=True, **flags) as served:
            served.generate(three)
            return served.ready.graph_rows, served.stats().replayed_steps

    assert counts(torch_compile_max_bs=64) == ([], 0)
    assert list(temporary.glob("srv-torch-compile-*")) == []
    assert counts(torch_compile_max_bs=1, enable_torch_compile_debug_mode=True) == ([2, 3, 4, 5, 6], 8)
    (folder,) = temporary.glob("srv-torch-compile-*")
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert texts.keys() == {"graph-1.txt", "guards-1.txt", "difference-of-1-rows.txt"}
    assert "torch.ops.srv.attend_" in texts["graph-1.txt"]
    assert "checked: TENSOR_MATCH tokens" in texts["guards-1.txt"]
    assert float(texts["difference-of-1-rows.txt"].split()[-1]) < 1e-4


@pytest.mark.slow
def test_steps_with_drafts_and_of_several_cache_groups_are_compiled(windowed: Small) -> None:
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3, "max_running_requests": 1}
    with engine(windowed, page_size=16, enable_torch_compile=True, **flags) as served:
        requests = messages(windowed.prompts)
        oracle(served, requests, windowed.tokens, wrong=5)
        assert [result.tokens for result in served.generate(requests)] == windowed.tokens
        assert served.ready.graph_rows == []
        assert served.stats().drafts_accepted > 0


def test_what_compilation_excludes_is_refused(small: Small) -> None:
    on: dict[str, object] = {"enable_torch_compile": True, "torch_compile_max_bs": 8}
    captured = "steps of up to 8 rows are compiled, not captured (enable_torch_compile is true)"
    for name, value in (("graph_batch_sizes", "8,16"), ("graph_max_batch_size", 8)):
        assert refused(small, **on, **{name: value}) == [(name, "excluded", captured)]
    ranks = "torch.compile cannot trace the collective operations of 2 ranks (tp_size x pp_size)"
    assert ("enable_torch_compile", "excluded", ranks) in refused(small, tp_size=2, **on)
    alone: dict[str, object] = {"torch_compile_max_bs": 8, "enable_torch_compile_debug_mode": True}
    reason = "it has no effect while enable_torch_compile is false"
    assert sorted(refused(small, **alone)) == [(name, "other_missing", reason) for name in sorted(alone)]
