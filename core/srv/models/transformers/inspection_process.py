"""The process that `srv.models.inspection` asks: reads ModelFacts from standard input, writes an Inspection."""

from __future__ import annotations

import sys

import msgspec

from srv.errors import ModelError
from srv.models.inspection import Inspection, Refused
from srv.specs import ModelFacts


def main() -> int:
    facts = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelFacts)
    try:
        from srv.models.transformers.hf_model import check_without_weights
    except ImportError as error:
        answer = Inspection(unknown=f"torch and transformers cannot be imported ({error})")
    else:
        try:
            _, skeleton = check_without_weights(facts)
            layers = () if skeleton is None else skeleton.attention_layers
            answer = Inspection(layers=layers, unknown="" if layers else "its attention only shows with its weights")
        except ModelError as error:
            answer = Inspection(refused=Refused(error.code, error.what, error.reason, error.remedy))
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
