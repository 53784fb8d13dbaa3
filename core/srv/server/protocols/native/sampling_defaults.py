"""Sampling parameters that apply to requests without them: those of the model's files, and those of the operator.

    generation_config.json (--sampling-defaults model) ──► --preferred-sampling-params ──► fields of the request
                                                  the later one wins

Must not know tokens or HTTP.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from srv.args.statement import Resolved
from srv.errors import Refusal, Rejection, RequestError
from srv.server.protocols.native.fields import NativeSampling
from srv.specs import ModelFacts

# Of generation_config.json: those that describe how the model's authors sample. Lengths and beams are not among them.
MODEL_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NO_GRAMMAR = "only a client knows the form of the output that it reads"
_OF_REQUESTS = {
    "n": "only a client knows how many outputs it reads",
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _NO_GRAMMAR),
    "custom_params": "it belongs to the logit processor that a request names",
}
logger = logging.getLogger(__name__)


def sampling_defaults(resolved: Resolved, facts: ModelFacts) -> dict[str, Any]:
    """The defaults, by field of `Sampling`. Raises Refusal for --preferred-sampling-params that no request may have."""
    model = resolved.config.model
    defaults = _of_model(Path(facts.path)) if model.sampling_defaults == "model" else {}
    return {**defaults, **_preferred(resolved)}


def _of_model(path: Path) -> dict[str, Any]:
    """A value that no request may have is left out, with a warning: the model works without it."""
    file = path / "generation_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8")) if path.is_dir() and file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is ignored: it cannot be read (%s)", file, error)
        return {}
    defaults: dict[str, Any] = {}
    for name in MODEL_FIELDS:
        if isinstance(config, dict) and config.get(name) is not None:
            try:
                defaults |= _parsed({name: config[name]})
            except RequestError as error:
                logger.warning("%s: %s; requests without the field get the default of the API", file, error.message)
    return defaults


def _preferred(resolved: Resolved) -> dict[str, Any]:
    preferred = resolved.config.model.preferred_sampling_params
    if preferred is None:
        return {}
    fields = json.loads(preferred)
    try:
        if field := next((name for name in _OF_REQUESTS if name in fields), None):
            raise RequestError(f"{field} is refused: {_OF_REQUESTS[field]}", code="invalid_value")
        return _parsed(fields)
    except RequestError as error:
        owner = resolved.provenance["preferred_sampling_params"].owner
        remedy = "Give sampling_params of /generate, such as temperature, top_p and max_new_tokens."
        raise Refusal(
            [Rejection("bad_sampling_params", "preferred_sampling_params", preferred, owner, error.message, remedy)]
        ) from None


def _parsed(fields: dict[str, Any]) -> dict[str, Any]:
    sampling = NativeSampling.parse(fields).sampling()
    return {name: getattr(sampling, name) for name in sampling.given or ()}
