"""Inert features: what is on and had no effect on a hundred requests is reported and logged once, with what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from engine_small import Small, engine, make_small, message
from every import every

from srv.args.config import Config
from srv.args.resolve import resolve
from srv.args.statement import Origin, UserInput, UserStatement
from srv.engine.inert import MIN_REQUESTS, InertFeatures
from srv.io.messages import Stats
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec
from srv_kernels.cpu.library import load

PAGE = 16
BATCH = 4
needs_native = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A model with a head size that native attention supports, which can replay steps."""
    return make_small("llama", tmp_path_factory.mktemp("small"), head_dim=16, num_hidden_layers=1)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "srv.engine.inert"):
        yield caplog


def own(logged: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of inert features, whatever level other tests have set for all of srv."""
    return [record for record in logged.records if record.name == "srv.engine.inert"]


def distinct(first: int, count: int, length: int, output: int = 2, **params: Any) -> list[RequestSpec]:
    """Requests with the numbers from `first` on, whose prompts differ in their first two tokens."""
    numbers = range(first, first + count)
    filler = [3 + place % 90 for place in range(length - 2)]
    return [message(f"{each} {length}", [each % 90, each // 90, *filler], output, **params) for each in numbers]


def serve(served: CheckedEngine, requests: list[RequestSpec], batch: int = BATCH) -> dict[str, str]:
    """Run requests, always `batch` of them together; what is inert afterwards."""
    for begin in range(0, len(requests), batch):
        served.generate(requests[begin : begin + batch])
    return served.stats().inert


@needs_native
def test_a_prefix_cache_without_hits_and_graphs_without_replays(small: Small, logged: pytest.LogCaptureFixture) -> None:
    """Four requests always decode together, but only steps of one or two rows are captured."""
    with engine(small, PAGE, chunk=256, graph_batch_sizes="1,2", max_running_requests=BATCH) as served:
        assert serve(served, distinct(0, MIN_REQUESTS - BATCH, 2 * PAGE)) == {}
        found = serve(served, distinct(MIN_REQUESTS, BATCH, 2 * PAGE))
        assert found.keys() == {"prefix_cache", "captured_steps"}
        assert f"none of {MIN_REQUESTS * 2 * PAGE} prompt tokens was found in it" in found["prefix_cache"]
        assert "graphs are for decode steps of up to 2 rows" in found["captured_steps"]
        assert "--graph-max-batch-size" in found["captured_steps"]
        assert serve(served, distinct(200, BATCH, 2 * PAGE)).keys() == found.keys()
        lines = [(record.levelname, record.getMessage()) for record in own(logged)]
        assert [(level, text.partition(",")[0]) for level, text in lines] == [
            ("INFO", "prefix_cache"),  # by default
            ("WARNING", "captured_steps"),  # by the user
        ]
        assert found["captured_steps"] in lines[1][1]

        assert serve(served, distinct(300, 1, 2 * PAGE)).keys() == {"prefix_cache"}  # one row: a graph is replayed
        again = [message("again", list(distinct(300, 1, 2 * PAGE)[0].tokens), 2)]
        assert serve(served, again) == {}  # its first page is in the cache


def test_a_shared_prefix_is_an_effect(small: Small) -> None:
    """Also under lpm, which has one as long as the cache has."""
    with engine(small, PAGE, schedule_policy="lpm") as served:
        requests = [message(str(number), [*[5] * PAGE, 7, number % 90], 1) for number in range(MIN_REQUESTS)]
        assert serve(served, requests, 16).keys() <= {"captured_steps"}


def test_short_prompts_cannot_share_a_page(small: Small) -> None:
    with engine(small, PAGE, schedule_policy="lpm", disable_graphs=True) as served:
        found = serve(served, distinct(0, MIN_REQUESTS, 9, output=1), 16)
    assert found.keys() == {"prefix_cache", "longest_prefix_first"}
    assert "prompts have 9 tokens on average, and only whole pages of 16 tokens are shared" in found["prefix_cache"]


def test_drafts_that_are_never_accepted(small: Small, logged: pytest.LogCaptureFixture) -> None:
    """The drafter proposes tokens that occurred, and the penalty excludes them, until a request has none."""
    flags = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3, "disable_graphs": True}
    with engine(small, PAGE, disable_radix_cache=True, **flags) as served:
        found = serve(served, distinct(0, MIN_REQUESTS, 5, output=4, repetition_penalty=100.0), 16)
        proposed = served.stats().drafts_proposed
        assert found.keys() == {"drafts"}
        assert proposed > 0
        assert f"none of {proposed} drafts was right" in found["drafts"]
        assert [record.levelname for record in own(logged)] == ["WARNING"]
        assert serve(served, [message("five", [7, 8], 24, logit_bias=((5, 100.0),))]) == {}


# ---- which features are watched, and what is said of them


def config_of(**values: Any) -> Config:
    statements = [UserStatement(name, value, Origin.COMMAND_LINE, "a test") for name, value in values.items()]
    return resolve(UserInput(tuple(statements))).config


def stats(**counters: int) -> Stats:
    fields = ("running", "waiting", "pages_total", "pages_free", "pages_cached", "pages_held", "steps", "retractions")
    zero = dict.fromkeys((*fields, "aborted", "prompt_tokens", "cached_tokens", "generated_tokens"), 0)
    return Stats(call=0, **{**zero, "finished": MIN_REQUESTS, **counters})


@every(
    ("values", "watched"),
    [
        ({}, ("prefix_cache",)),
        ({"disable_radix_cache": True}, ()),
        ({"disable_radix_cache": True, "disable_overlap_schedule": False}, ("overlap",)),
        ({"schedule_policy": "lpm"}, ("prefix_cache", "longest_prefix_first")),
        ({"schedule_policy": "fcfs"}, ("prefix_cache",)),
    ],
)
def test_what_is_watched(values: dict[str, Any], watched: tuple[str, ...]) -> None:
    """Defaults only if they take memory. Graphs are off, because core alone has no platform that captures any."""
    config = config_of(**values)
    graphs = config._replace(graphs=config.graphs._replace(disable_graphs=True))
    assert tuple(InertFeatures(graphs, frozenset(values)).find(stats())) == watched


def graphs(**values: Any) -> Config:
    """A configuration with these values of arguments of graphs and drafts, whatever a platform would say."""
    config = config_of()
    given = {"graph_batch_sizes": (1, 2), "disable_graph_padding": True, **values}
    return config._replace(graphs=config.graphs._replace(**given))


@every(
    ("config", "counters", "feature", "said"),
    [
        (
            graphs(),
            {"generated_tokens": 900, "eager_steps": 70},
            "captured_steps",
            "graphs are for decode steps of exactly 1, 2 rows, and 70 steps of other kinds ran eagerly",
        ),
        (
            graphs(),
            {"generated_tokens": MIN_REQUESTS, "eager_steps": 70},
            "captured_steps",
            "requests generated one token or none, and only decode steps are replayed",
        ),
        (graphs(), {"replayed_steps": 3, "generated_tokens": 900}, "captured_steps", None),
        (graphs(), {"replayed_steps": 3, "piecewise_steps": 3, "generated_tokens": 900}, "captured_steps", "graphs"),
        (graphs(enable_piecewise_graphs=True), {"replayed_steps": 3}, "piecewise_graphs", "no step had up to"),
        (graphs(enable_piecewise_graphs=True), {"replayed_steps": 3, "piecewise_steps": 1}, "piecewise_graphs", None),
        (graphs(enable_torch_compile=True), {"generated_tokens": 900}, "compiled_steps", "no decode step had up to 32"),
        (graphs(enable_torch_compile=True), {"generated_tokens": 900, "compiled_steps": 1}, "compiled_steps", None),
        (graphs(), {}, "overlap", "each request took one step"),
        (graphs(), {"overlapped_steps": 1}, "overlap", None),
    ],
)
def test_what_is_said_of_a_feature(config: Config, counters: dict[str, int], feature: str, said: str | None) -> None:
    watching = InertFeatures(config, frozenset({"disable_overlap_schedule"}))
    found = watching.find(stats(**counters)).get(feature)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and said in found)


def test_steps_are_counted_by_how_they_ran(small: Small) -> None:
    """With overlap, each step after the first is planned while the one before it runs."""
    counts = []
    for overlap in (True, False):
        with engine(small, PAGE, overlap=overlap, disable_graphs=True) as served:
            served.generate([message("a", small.prompts[-1], 6)])
            found = served.stats()
            counts.append((found.overlapped_steps > 0, found.eager_steps == found.steps))
    assert counts == [(True, True), (False, True)]
