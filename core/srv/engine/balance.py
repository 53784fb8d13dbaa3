"""Which replica gets a request: by what the replicas have to do, and by the prefixes that they have cached.

    auto                 the one that has computed the longest prefix of the prompt, unless others have far less to do
    total_requests       the fewest requests that have not ended
    total_tokens         the fewest tokens, of prompts and outputs, of such requests
    round_robin          one after the other

The API process sees every request and every output, so that its counts are exact and nothing is polled. Must not know
how requests are sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from srv.io.messages import Output
from srv.types import RequestSpec

AUTO, REQUESTS, TOKENS, ROUND_ROBIN = "auto", "total_requests", "total_tokens", "round_robin"
# Names in other releases of SGLang. There, decode_round_robin differs from round_robin on servers that prefill only.
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {"shortest_queue": REQUESTS, "minimum_tokens": TOKENS, "decode_round_robin": ROUND_ROBIN}
)
_BLOCK = 64  # tokens of a prefix that are looked up together
_MOST_BLOCKS = 65_536  # whose replicas are remembered
_SLACK_REQUESTS, _SLACK_SHARE = 4, 1.5  # how much more a replica may have to do than another one, for its prefixes


class _Load:
    """What one replica has to do."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0


class Balance:
    """Chooses a replica for each request, and counts those that have not ended.

    `method`: a value of --load-balance-method. `prefix_cache`: whether replicas keep the prefixes of prompts.
    """

    def __init__(self, method: str, replicas: int, *, prefix_cache: bool) -> None:
        self._choose = self._method(SYNONYMS.get(method, method), prefix_cache)
        self._loads = [_Load() for _ in range(replicas)]
        self._placed: dict[str, tuple[int, int]] = {}  # by request: its replica, and its tokens so far
        self._blocks: OrderedDict[int, int] = OrderedDict()  # hashes of prefixes -> the replica that computed each last
        self._next = 0

    def _method(self, name: str, prefix_cache: bool) -> Callable[[RequestSpec], int]:
        if name == AUTO:
            return self._by_prefix if prefix_cache else self._fewest_requests
        methods = {REQUESTS: self._fewest_requests, TOKENS: self._fewest_tokens, ROUND_ROBIN: self._in_turn}
        return methods[name]

    def place(self, request: RequestSpec) -> int:
        """The replica that gets a request."""
        replica, tokens = self._choose(request), len(request.tokens)
        self._placed[request.id] = replica, tokens
        self._loads[replica].requests += 1
        self._loads[replica].tokens += tokens
        return replica

    def replica_of(self, request: str) -> int | None:
        """That of a request which has not ended."""
        placed = self._placed.get(request)
        return None if placed is None else placed[0]

    def count(self, output: Output) -> None:
        """Count the tokens of an output, and the end of its request."""
        if (placed := self._placed.get(output.request)) is None:
            return
        replica, tokens = placed
        self._loads[replica].tokens += len(output.tokens)
        self._placed[output.request] = replica, tokens + len(output.tokens)
        if output.finish is not None:
            self.end(output.request)

    def end(self, request: str) -> None:
        """A request has ended, or nobody waits for it."""
        if (placed := self._placed.pop(request, None)) is not None:
            replica, tokens = placed
            self._loads[replica].requests -= 1
            self._loads[replica].tokens -= tokens

    def _in_turn(self, request: RequestSpec) -> int:
        replica = self._next
        self._next = (replica + 1) % len(self._loads)
        return replica

    def _fewest_requests(self, request: RequestSpec) -> int:
        return self._least(lambda replica: (self._loads[replica].requests, self._loads[replica].tokens))

    def _fewest_tokens(self, request: RequestSpec) -> int:
        return self._least(lambda replica: (self._loads[replica].tokens, self._loads[replica].requests))

    def _least(self, load: Callable[[int], tuple[int, int]]) -> int:
        """Of several with the least, the one whose turn it is: idle replicas get requests one after the other."""
        count = len(self._loads)
        replica = min(range(count), key=lambda number: (load(number), (number - self._next) % count))
        self._next = (replica + 1) % count
        return replica

    def _by_prefix(self, request: RequestSpec) -> int:
        blocks = list(_blocks(request))
        known = (self._blocks[block] for block in reversed(blocks) if block in self._blocks)
        replica, fewest = next(known, None), min(load.requests for load in self._loads)
        if replica is None or self._loads[replica].requests > fewest * _SLACK_SHARE + _SLACK_REQUESTS:
            replica = self._fewest_requests(request)
        for block in blocks:
            self._blocks[block] = replica
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)
        return replica


def _blocks(request: RequestSpec) -> Iterator[int]:
    """A hash of each prefix of whole blocks; requests of other namespaces share none."""
    prefix = hash(request.namespace)
    for begin in range(0, len(request.tokens) - _BLOCK + 1, _BLOCK):
        prefix = hash((prefix, tuple(request.tokens[begin : begin + _BLOCK])))
        yield prefix
