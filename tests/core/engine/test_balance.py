"""Which replica gets a request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from every import every

from srv.engine.balance import Balance
from srv.io.messages import Output
from srv.types import FinishReason, RequestSpec, SamplingParams
from srv_matrix.pytest_plugin import covers

COUNTING = ("round_robin", "decode_round_robin", "total_requests", "shortest_queue", "total_tokens", "minimum_tokens")
PARAMS = SamplingParams(max_tokens=4)


def request(name: str, tokens: Sequence[int], namespace: str = "") -> RequestSpec:
    return RequestSpec(id=name, tokens=tuple(tokens), params=PARAMS, namespace=namespace)


def places(balance: Balance, prompts: Sequence[Sequence[int]]) -> list[int]:
    return [balance.place(request(str(number), prompt)) for number, prompt in enumerate(prompts)]


@every("method", [*COUNTING, "auto"])
def test_idle_replicas_get_equal_requests_one_after_the_other(method: str) -> None:
    balance = Balance(method, 3, prefix_cache=False)
    assert places(balance, [[number] * 5 for number in range(6)]) == [0, 1, 2] * 2


@covers(*(f"load_balance_method={method}" for method in COUNTING), platform="cpu")
@every(
    ("method", "expected"),
    [
        ("round_robin", [0, 1, 0, 1]),
        ("decode_round_robin", [0, 1, 0, 1]),
        ("shortest_queue", [0, 1, 1, 0]),
        ("total_requests", [0, 1, 1, 0]),
        ("minimum_tokens", [0, 1, 1, 1]),
        ("total_tokens", [0, 1, 1, 1]),
    ],
)
def test_what_counts(method: str, expected: list[int]) -> None:
    assert places(Balance(method, 2, prefix_cache=True), [[1] * 100, [2] * 10, [3] * 10, [4] * 10]) == expected


def test_ends_and_outputs_are_counted() -> None:
    balance = Balance("total_tokens", 2, prefix_cache=True)
    assert places(balance, [[1] * 10, [2] * 10]) == [0, 1]
    balance.count(Output("0", [5] * 30))
    assert balance.place(request("next", [3])) == 1
    balance.count(Output("0", [], FinishReason.STOP))
    assert balance.replica_of("0") is None
    assert balance.place(request("last", [4])) == 0
    for name in ("1", "next", "last", "unknown"):
        balance.end(name)
        balance.count(Output(name, [7]))  # late, of a request for which nobody waits
    assert [(load.requests, load.tokens) for load in balance._loads] == [(0, 0)] * 2


@covers("load_balance_method=auto", platform="cpu")
def test_prompts_go_where_their_prefix_is_cached() -> None:
    balance, system = Balance("auto", 4, prefix_cache=True), [9] * 200
    first = balance.place(request("first", [*system, 1]))
    for number in range(3):
        assert balance.place(request(f"other {number}", [number] * 200)) != first
        assert balance.place(request(f"same {number}", [*system, *[number] * 300])) == first
    assert balance.place(request("another tenant", system, namespace="b")) != first


def test_a_prefix_does_not_overload_its_replica() -> None:
    balance = Balance("auto", 4, prefix_cache=True)
    chosen = places(balance, [[9] * 200] * 400)
    counts = [chosen.count(replica) for replica in range(4)]
    assert max(counts) <= 1.5 * min(counts) + 5


def test_prefixes_are_remembered_up_to_a_bound() -> None:
    balance, source = Balance("auto", 2, prefix_cache=True), random.Random(1)
    for number in range(100):
        balance.place(request(str(number), [source.randrange(1000) for _ in range(64 * 1000)]))
        balance.end(str(number))
    assert len(balance._blocks) == 65_536
