"""Whether a request may have the logit processor that it names. Must not know what a processor does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from srv.errors import RequestError

if TYPE_CHECKING:
    from srv.sample.third_party import ProcessorFacts

MAX_PARAMS_BYTES = 16_384


def check_processor(
    name: str, params: str, processors: Mapping[str, ProcessorFacts] | None, field: Callable[[str], str]
) -> None:
    """Raises RequestError unless the processor is known and takes these parameters (JSON).

    processors: None: the server was started without --enable-custom-logit-processor.
    """
    if not name:
        if params:
            where = field("custom_params")
            raise _refused(f"{where} is refused: it needs custom_logit_processor; send both or neither", where)
        return
    if processors is None:
        raise _refused(
            "custom_logit_processor is refused: start the server with --enable-custom-logit-processor",
            "custom_logit_processor",
            "custom_processors_disabled",
        )
    if name not in processors:
        names = ", ".join(sorted(processors)) or "none; installed distributions provide them"
        raise _refused(
            f'custom_logit_processor = "{name[:80]}" is refused: it must be the name of one of these: {names}',
            "custom_logit_processor",
        )
    if (size := len(params.encode())) > MAX_PARAMS_BYTES:
        where = field("custom_params")
        raise _refused(f"{where} is refused: it has {size} bytes of JSON, the limit is {MAX_PARAMS_BYTES}", where)
    reason = processors[name].refusal(msgspec.json.decode(params or "{}"))
    if reason is not None:
        where = field("custom_params")
        raise _refused(f"{where} is refused: {reason}", where)


def _refused(message: str, param: str, code: str = "invalid_value") -> RequestError:
    return RequestError(message, code=code, param=param)
