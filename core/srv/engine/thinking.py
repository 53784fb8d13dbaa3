"""Limits on reasoning: a mask forces the end of the reasoning where a request's budget is used up.

A `LateInputMaker` around that of grammars, which begin behind the reasoning. A request without a grammar settles where
its answer begins. The place of an output is a function of its tokens, so that one which was forgotten is found again.
Markers are looked for in the bytes of the tokens, because a model may write them in other tokens than those that are
forced, such as one for `>` and the line break behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from srv.grammar.backend import mask_of
from srv.sched.late import LateInputMaker, LateInputs, LateRow
from srv.types import RequestSpec, SamplingParams, ThinkingBudget, TokenSequence

BytesOf = Callable[[int], bytes]
MAX_PLACES = 4096  # outputs that are followed; of a request that ends, nothing is heard


def budget_of(request: RequestSpec) -> ThinkingBudget | None:
    return request.params.thinking if isinstance(request.params, SamplingParams) else None


class _Place:
    """Where one output is. `count`: its tokens of reasoning, with those of a marker that has not ended. `answers`: no
    reasoning may begin any more."""

    def __init__(self, request: RequestSpec, budget: ThinkingBudget, bytes_of: BytesOf) -> None:
        self.request, self._budget, self._bytes_of = request, budget, bytes_of
        self._begins = [mark.encode() for mark in budget.begins]
        self._ends = [mark.encode() for mark in budget.ends]
        self._width = max(map(len, (*self._begins, *self._ends)))
        self.consumed = self.count = 0
        self.inside = budget.inside
        self.answers = False
        self._since = 0  # tokens before this reasoning
        self._tail = b""  # the last bytes, behind the last marker

    def follow(self, output: Sequence[int]) -> None:
        for token in output[self.consumed :]:
            self.consumed += 1
            counted = self.inside
            self._tail += self._bytes_of(token)
            while mark := self._marker():
                self._cross(self._tail.index(mark) + len(mark))
            self._tail = self._tail[-self._width :]
            if self.inside and self._last(output) == self._budget.end:  # whatever its bytes are
                self._cross(len(self._tail))
            self.count += counted and self.inside

    def _marker(self) -> bytes:
        """The first marker in the tail that ends the reasoning or begins it; b"" if there is none."""
        if not self.inside and not self._budget.anywhere:
            return self._marker_at_start()
        marks = self._ends if self.inside else self._begins
        found = [(place, -len(mark), mark) for mark in marks if (place := self._tail.find(mark)) >= 0]
        return min(found)[2] if found else b""

    def _marker_at_start(self) -> bytes:
        start = self._tail.lstrip()
        if self.answers or not start:
            return b""
        found = max((mark for mark in self._begins if start.startswith(mark)), key=len, default=b"")
        self.answers = not found and not any(mark.startswith(start) for mark in self._begins)
        return found

    def _cross(self, position: int) -> None:
        """Behind a marker that ends here in the tail."""
        self.inside, self._tail = not self.inside, self._tail[position:]
        self._since = self.consumed
        self.answers = not self.inside and not self._budget.anywhere

    def _last(self, output: Sequence[int]) -> TokenSequence:
        return tuple(output[max(self._since, self.consumed - len(self._budget.end)) : self.consumed])

    def forced(self, output: Sequence[int]) -> int | None:
        """The only token that may follow: of the end of the reasoning, of which the output may have the first ones."""
        if not self.inside or self.count < self._budget.tokens:
            return None
        end, last = self._budget.end, self._last(output)
        begun = (size for size in range(len(end) - 1, 0, -1) if last[-size:] == end[:size])
        return end[next(begun, 0)]


class ThinkingBudgets:
    """`inner`: makes the late inputs of grammars. `vocab_size`: the width of the logits. `bytes_of`: of a token."""

    def __init__(self, inner: LateInputMaker, vocab_size: int, bytes_of: BytesOf) -> None:
        self._inner, self._words, self._bytes_of = inner, -(-vocab_size // 32), bytes_of
        self._places: OrderedDict[str, _Place] = OrderedDict()

    def concerns(self, request: RequestSpec) -> bool:
        return budget_of(request) is not None or self._inner.concerns(request)

    def make(self, rows: Sequence[LateRow]) -> LateInputs:
        made = self._inner.make([row for row in rows if self._inner.concerns(row.request)])
        masked = {slot for slot, _ in made.masks}
        ends: list[tuple[int, bytes]] = []
        settled: list[str] = []
        for row in rows:
            budget = budget_of(row.request)
            if budget is None or row.slot in masked:
                continue
            place = self._place(row, budget)
            if (token := place.forced(row.output)) is not None:
                ends.append((row.slot, mask_of((token,), self._words).tobytes()))
            elif place.answers and not self._inner.concerns(row.request):
                settled.append(row.request.id)
                del self._places[row.request.id]
        return made._replace(masks=(*made.masks, *ends), settled=tuple(settled)) if ends or settled else made

    def _place(self, row: LateRow, budget: ThinkingBudget) -> _Place:
        place = self._places.get(row.request.id)
        if place is None or place.request is not row.request or place.consumed > len(row.output):
            place = self._places[row.request.id] = _Place(row.request, budget, self._bytes_of)
        self._places.move_to_end(row.request.id)
        while len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        place.follow(row.output)
        return place
