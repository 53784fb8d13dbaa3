"""Starts the engine for `srv launch` and `srv.LLM`, and derives the settings of the API process."""

from __future__ import annotations

import time
from dataclasses import asdict

from srv import __version__
from srv.engine.supervisor import EngineProcess
from srv.executor.spec import engine_spec
from srv.io.messages import Ready
from srv.planning.resolution import LaunchContext
from srv.platform.manifest import worker_environment
from srv.server.settings import ServerSettings
from srv.server.text.processor import TextProcessor
from srv.types import Pooling


def start_engine(engine: EngineProcess, context: LaunchContext) -> TextProcessor:
    """Start the process and send it its spec; the tokenizer loads while the engine imports its modules.

    An invalid tokenizer or chat template raises an error before weights are read. Await `engine.ready` next.
    """
    ranks = context.resolved.config.parallel.tp_size
    engine.start(worker_environment(context.manifest, context.device), ranks)
    from srv.server.text.tokenizer import load_text_processor  # a slow import, during which the engine process starts

    model = context.resolved.config.model
    template = None if model.chat_template is None else str(model.chat_template)
    text = load_text_processor(context.model, model.tokenizer_path, template)
    engine.send_spec(lambda to_engine, from_engine: engine_spec(context, to_engine, from_engine))
    return text


def server_settings(context: LaunchContext, ready: Ready, vocab_size: int) -> ServerSettings:
    """The settings of the API process, once the engine is ready. `vocab_size` is the tokenizer's."""
    config, model = context.resolved.config, context.model
    return ServerSettings(
        model_name=config.model.served_model_name or model.name,
        context_length=config.model.context_length or model.context_length,
        max_request_tokens=ready.max_request_tokens,
        vocab_size=min(vocab_size, model.vocab_size),
        hidden_size=model.hidden_size,
        pooling=Pooling(config.model.pooling) if config.model.is_embedding else None,
        return_hidden_states=config.server.enable_return_hidden_states,
        api_key=config.server.api_key,
        max_request_bytes=config.server.max_request_bytes,
        max_stop_strings=config.server.max_stop_strings,
        random_seed=config.model.random_seed,
        created=int(time.time()),
        model_info={
            "model_path": model.path,
            "architecture": model.architecture,
            "format": model.format,
            "quantization": model.quantization,
            "parameters": model.parameters,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "end_tokens": list(model.end_tokens),
        },
        server_info={
            "version": __version__,
            "platform": context.platform,
            "device": asdict(context.device),
            "chosen_because": context.reason,
            "arguments": context.resolved.describe(),
            "backends": {slot: str(choice) for slot, choice in context.resolved.backends.items()},
            "quantities": {name: str(quantity) for name, quantity in context.resolved.quantities.items()},
            "budget": dict(ready.budget),
            "pages": ready.pages,
            "page_size": ready.page_size,
            "graph_rows": ready.graph_rows,
            "load_seconds": round(ready.load_seconds, 3),
        },
    )
