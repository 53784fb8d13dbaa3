"""What `srv plan --fit` prints: the answer, how it was computed, and why the next candidate is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srv.args.statement import amount_text
from srv.planning.fit import Fit, FittedCard

_UNITS = {"context": "tokens", "concurrency": "requests", "devices": "devices"}


def fit_text(answer: Fit) -> str:
    """The answer as text."""
    if answer.goal == "card":
        served = sum(card.served for card in answer.cards)
        lines = [f"card  {served} of {len(answer.cards)} profiles serve one request as long as the context"]
        shared = [] if answer.found else _shared_lines(answer.cards)
        lines += [f"    {line}" for line in shared]
        return "\n".join([*lines, *(line for card in answer.cards for line in ("", *_card_lines(card, shared)))])
    lines = [f"{answer.goal}  {answer.answer} {_unit(answer.goal, answer.answer)}"]
    lines += [f"    {line}" for line in answer.lines]
    if answer.plan is not None and answer.plan.budget is not None:
        lines += [f"    {quantity}: {sentence}" for quantity, sentence in answer.plan.budget.breakdown]
    if answer.refused is not None:
        value, reasons = answer.refused
        lines += ["", f"{value} {_unit(answer.goal, value)} {'is' if value == 1 else 'are'} refused:"]
        lines += [f"    {line}" for reason in reasons for line in reason.splitlines()]
    return "\n".join(lines)


def _unit(goal: str, number: int | None) -> str:
    return _UNITS[goal][:-1] if number == 1 else _UNITS[goal]


def _shared_lines(cards: Sequence[FittedCard]) -> list[str]:
    """What all of several cards are refused for: a fault of the model or of arguments, said once."""
    first, *others = cards
    return [line for line in first.lines if others and all(line in other.lines for other in others)]


def _card_lines(card: FittedCard, shared: Sequence[str]) -> list[str]:
    verdict = "serves it" if card.served else "does not serve it"
    head = f"{card.device}, {amount_text(card.memory_bytes, 'bytes')}: {verdict}"
    return [head, *(f"    {line}" for line in card.lines if line not in shared)]


def fit_dict(answer: Fit) -> dict[str, Any]:
    """The answer as JSON-compatible values."""
    budget = answer.plan.budget if answer.plan is not None else None
    refused = answer.refused
    return {
        "accepted": answer.found,
        "fit": answer.goal,
        "answer": answer.answer,
        "unit": _UNITS.get(answer.goal),
        "because": list(answer.lines),
        "budget": None if budget is None else [list(line) for line in budget.breakdown],
        "refused": None if refused is None else {"value": refused[0], "reasons": list(refused[1])},
        "cards": [card._asdict() | {"lines": list(card.lines)} for card in answer.cards],
    }
