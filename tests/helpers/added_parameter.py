"""A program that declares the sampling parameter `typical_p` in the source of `srv.types`, and serves requests with it.

    python added_parameter.py '[["/v1/completions", {"prompt": "a", "typical_p": 0.5}]]'

It prints the error of each request, or null, and the values that reached the engine's side of the channel.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

NEXT_LINE = "    logprobs: int | None = None\n"
DECLARATION = """\
    typical_p: Annotated[float, Meta(gt=0, le=1, description="Typical sampling.", extra={"native": "typical"})] = 1.0
"""


def declare() -> Any:
    """Import `srv.types` from its source with one declaration more, before anything else imports it."""
    spec = importlib.util.find_spec("srv.types")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(NEXT_LINE) == 1
    module = importlib.util.module_from_spec(spec)
    sys.modules["srv.types"] = module
    exec(compile(source.replace(NEXT_LINE, DECLARATION + NEXT_LINE), spec.origin, "exec"), module.__dict__)
    return module


async def serve(requests: list[tuple[str, dict[str, Any]]], types: Any) -> None:
    from server_support import serving

    problems = []
    async with serving() as server:
        for path, body in requests:
            answer = (await server.post(path, **body)).json()
            problems.append(answer["error"]["message"] if "error" in answer else None)
        sent = [message for message in server.engine.received if isinstance(message, types.RequestSpec)]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=list[types.RequestSpec])
    print(json.dumps([problems, [spec.params.typical_p for spec in received]]))


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1]), declare()))
