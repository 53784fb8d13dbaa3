"""What a grammar allows next, and which tokens it forces before the model has sampled any.

Where a mask allows a single token, that token is known, and so is the mask after it. `next_masks` follows such tokens,
so that they need no step each (`srv.sched.late`), as far as the budget of a step goes (`srv.grammar.budget`). No text
is split into tokens here: a token counts as forced only if no other one is allowed, so that an output is the same as if
each of its tokens had been sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from srv.grammar.backend import GrammarBackend, Masks, Matcher, mask_of
from srv.grammar.budget import AheadBudget, MaskTime, fill_needed

MOST_FORCED = 32  # tokens that are followed at a time; what is forced after them, in the next step


class Progress:
    """How far one output is in its grammar. `ahead`: the forced tokens that `matcher` has got and the output has not.

    `jumps`: whether forced tokens are looked for. `grammar`: the same object for outputs of one grammar (None: there
    are no others). `slow`: whether its first mask may be. `stuck`: no token is allowed next.
    """

    __slots__ = ("_mask", "ahead", "grammar", "jumps", "matcher", "stuck", "time")

    def __init__(self, matcher: Matcher, *, jumps: bool, grammar: object = None, slow: bool = False) -> None:
        self.matcher, self.jumps = matcher, jumps
        self.grammar = self if grammar is None else grammar
        self.stuck, self.time = False, MaskTime(slow)
        self.ahead: list[int] = []
        self._mask: npt.NDArray[np.int32] | None = None  # after `ahead`, if it is known

    @property
    def failure(self) -> str:
        """Why the output cannot go on; "" if it can."""
        return self.matcher.failure or self.time.excess or ("no token is allowed next" if self.stuck else "")

    def accept(self, tokens: Sequence[int]) -> bool:
        """The output has these tokens more. False if the grammar does not allow one of them."""
        count = 0
        while count < min(len(tokens), len(self.ahead)) and tokens[count] == self.ahead[count]:
            count += 1
        del self.ahead[:count]
        if count == len(tokens):
            return True
        self.ahead, self._mask = [], None
        return self.matcher.accept(tokens[count:])

    def known_mask(self, words: int) -> npt.NDArray[np.int32] | None:
        """The mask of the next token, int32 [words]; None if the backend has to make it."""
        return mask_of(self.ahead[:1], words) if self.ahead else self._mask

    def remember(self, mask: npt.NDArray[np.int32]) -> None:
        """`mask` is that of the next token, int32 [words]."""
        if not self.ahead:
            self._mask = mask.copy()

    def look_ahead(self, token: int | None, mask: npt.NDArray[np.int32]) -> bool:
        """`mask` is the one after `ahead`, and `token` the only one that it allows: go on by it.

        Returns whether the next mask is needed, too.
        """
        if token is not None and self.matcher.accept((token,)):
            self.ahead.append(token)
            return len(self.ahead) < MOST_FORCED
        if token is not None or self.ahead:
            self._mask = mask.copy()
        return False


def next_masks(backend: GrammarBackend, outputs: Sequence[Progress], end_tokens: Sequence[int]) -> Masks:
    """The mask of the next token of each output, [outputs, words]. Follows what is forced, but not an end token.

    Of an output that cannot go on, which `Progress.failure` says, it allows end tokens.
    """
    masks = np.empty((len(outputs), backend.words), dtype=np.int32)
    missing = []
    for index, output in enumerate(outputs):
        mask = output.known_mask(backend.words)
        if mask is None:
            missing.append(index)
        else:
            masks[index] = mask
    if missing:
        rows = masks if len(missing) == len(outputs) else np.empty((len(missing), backend.words), dtype=np.int32)
        needed = [outputs[index] for index in missing]
        fill_needed(backend, needed, rows)
        _mark_stuck(needed, rows, end_tokens)
        if rows is not masks:
            masks[missing] = rows
        _look_ahead(backend, needed, rows, end_tokens)
    return masks


def _mark_stuck(outputs: Sequence[Progress], masks: Masks, end_tokens: Sequence[int]) -> None:
    """Allow end tokens where no token may follow."""
    for row in np.flatnonzero(~masks.any(axis=1)).tolist():
        outputs[row].stuck = True
        masks[row] = mask_of(end_tokens, masks.shape[1])


def _look_ahead(backend: GrammarBackend, outputs: Sequence[Progress], masks: Masks, end_tokens: Sequence[int]) -> None:
    """Follow what is forced in all outputs, whose next masks are given: masks are still made for many at a time."""
    budget = AheadBudget()
    while outputs:
        going = []
        for output, token, mask in zip(outputs, only_tokens(masks), masks, strict=True):
            forced = None if token in end_tokens or output.failure else token
            if output.jumps and output.look_ahead(forced, mask) and not output.time.timed:
                going.append(output)
        masks = np.empty((len(going), backend.words), dtype=np.int32)
        count = budget.fill(backend, going, masks)
        outputs, masks = going[:count], masks[:count]
        _mark_stuck(outputs, masks, end_tokens)


def only_tokens(masks: Masks) -> list[int | None]:
    """The token of each mask that allows a single one; None for the others."""
    used = masks != 0
    tokens: list[int | None] = [None] * len(masks)
    for row in np.flatnonzero(np.count_nonzero(used, axis=1) == 1).tolist():
        word = int(used[row].argmax())
        bits = int(masks[row, word]) & 0xFFFFFFFF
        if bits & (bits - 1) == 0:
            tokens[row] = 32 * word + bits.bit_length() - 1
    return tokens
