"""The process that `srv.models.inspection` asks: reads a Question from standard input, writes an Inspection."""

from __future__ import annotations

import sys

import msgspec

from srv.errors import ModelError
from srv.models.choice import LayerChoice
from srv.models.inspection import ClassRefused, Inspection, Question
from srv.quantization.method import QuantMethod
from srv.quantization.registry import find, of_form
from srv.specs import ModelFacts


def main() -> int:
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    facts = question.facts
    try:
        from srv.models.transformers.hf_model import check_without_weights
    except ImportError as error:
        answer = Inspection(unknown=f"torch and transformers cannot be imported ({error})")
    else:
        try:
            method, dequantized = _method(facts, question.method), _method(facts, question.dequantized)
            choice = LayerChoice(None, method, facts.format, dequantized=dequantized)
            _, skeleton, modules = check_without_weights(facts, choice)
            layers = () if skeleton is None else skeleton.attention_layers
            unknown = "" if layers else "its attention only shows with its weights"
            quantized = str(modules) if modules else ""
            answer = Inspection(layers=layers, quantized=quantized, ops=modules.ops(), unknown=unknown)
        except ModelError as error:
            answer = Inspection(refused=ClassRefused(error.code, error.what, error.reason, error.remedy))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))
    return 0


def _method(facts: ModelFacts, name: str) -> QuantMethod | None:
    return of_form(find(name), facts)


if __name__ == "__main__":
    sys.exit(main())
