"""Starts the engine for `srv launch` and `srv.LLM`, and derives the settings of the API process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from srv import __version__
from srv.args.statement import Resolved
from srv.dist.mesh import mesh_of
from srv.engine.replicas import Engine
from srv.executor.spec import engine_spec
from srv.io.messages import Ready
from srv.io.phases import Phases
from srv.models.score_template import read_score_template
from srv.planning.grammars import grammar_choice
from srv.planning.resolution import LaunchContext
from srv.platform.manifest import worker_environment
from srv.reply.formats import ReplyFormat, choose
from srv.sample.third_party import processors
from srv.server.http.access import Access
from srv.server.http.client_keys import ClientKey
from srv.server.http.keys import is_loopback
from srv.server.observe.metric_aliases import PoolShape
from srv.server.protocols.native.sampling_defaults import sampling_defaults
from srv.server.protocols.openai.fingerprint import system_fingerprint
from srv.server.settings import GrammarSettings, ServerSettings
from srv.server.text.checks import check_case
from srv.server.text.encoded_template import EncodedTemplate, encoded_template
from srv.server.text.fill_in import FillIn, read_fill_in
from srv.server.text.options import TextOptions
from srv.server.text.processor import TextProcessor
from srv.server.text.token_ids import TokenIdsOnly
from srv.types import Pooling

logger = logging.getLogger(__name__)


def start_engine(engine: Engine, context: LaunchContext, phases: Phases) -> TextProcessor:
    """Start the engine and send it its spec; the tokenizer loads while the engine imports its modules.

    `phases`: those of this process. An invalid tokenizer or chat template raises an error before weights are read.
    Await `engine.ready` next.
    """
    sampling_defaults(context.resolved, context.model)  # these raise before anything is started
    if context.resolved.config.server.enable_custom_logit_processor:
        processors()
    ranks = mesh_of(context.resolved.config.get).ranks_per_replica
    _fill_in(context.resolved)  # refused before anything slow
    engine.start(partial(worker_environment, context.manifest, context.device), ranks)
    with phases.run("tokenizer", does="importing and building it"):
        from srv.server.text.tokenizer import load_text_processor  # slow; meanwhile, the engine process starts

        model = context.resolved.config.model
        template = None if model.chat_template is None else str(model.chat_template)
        text: TextProcessor = (
            TokenIdsOnly(context.model.vocab_size)
            if model.skip_tokenizer_init
            else load_text_processor(context.model, model.tokenizer_path, template, model.tokenizer_worker_num)
        )
        check_case(context.model.head, text)
        _score_template(context, text)  # answers that are not tokens end the start here
    engine.send_spec(lambda to_engine, from_engine: engine_spec(context, to_engine, from_engine))
    return text


def reply_format(context: LaunchContext, text: TextProcessor) -> ReplyFormat:
    """How the model writes reasoning and tool calls. Raises PluginError for a faulty row of another distribution."""
    server = context.resolved.config.server
    return choose(server.tool_call_parser, server.reasoning_parser, text.templates)


def server_settings(
    context: LaunchContext,
    ready: Ready,
    text: TextProcessor,
    phases: Phases,
    key: str | None = None,
    clients: tuple[ClientKey, ...] = (),
) -> ServerSettings:
    """The settings of the API process, once the engine is ready.

    text: of the model. phases: those of this process, which go on. key: that clients must send.
    clients: those with keys of their own.
    """
    config, model = context.resolved.config, context.model
    _log_slow_paths(context, ready)
    replies, defaults = reply_format(context, text), sampling_defaults(context.resolved, model)
    for reason in replies.reasons:
        logger.info("%s", reason)
    return ServerSettings(
        model_name=config.model.served_model_name or model.name,
        context_length=config.model.context_length or model.context_length,
        max_request_tokens=ready.max_request_tokens,
        vocab_size=min(text.vocab_size, model.vocab_size),
        hidden_size=model.hidden_size,
        generates=model.generates,
        headless=model.headless,
        head=model.head,
        score_template=_score_template(context, text),
        pooling=Pooling(config.model.pooling) if config.model.is_embedding else None,
        return_hidden_states=config.server.enable_return_hidden_states,
        access=_access(context.resolved, key, clients),
        max_held_request_bytes=config.server.max_held_request_bytes,
        body_seconds=config.server.connection_timeout_seconds,
        max_request_bytes=config.server.max_request_bytes,
        max_stop_strings=config.server.max_stop_strings,
        random_seed=config.model.random_seed,
        system_fingerprint=system_fingerprint(model, context.resolved),
        created=int(time.time()),
        model_info=_model_info(context, defaults),
        server_info=_server_info(context, ready, replies),
        slow_paths=context.kernels.slow_paths(ready.kernels),
        memory=ready.memory,
        counts_peak=ready.counts_peak,
        measures_experts=config.experts.enable_expert_distribution_metrics,
        startup=lambda: {"api": phases.done, **ready.phases},
        sensors=partial(context.manifest.sensors, context.device),
        reply_format=replies,
        fill_in=_fill_in(context.resolved),
        grammars=grammar_settings(context),
        observe=config.observe,
        pool=PoolShape(sum(ready.pages), ready.page_size, max(1, len(ready.pages))),
        cache_report=config.server.enable_cache_report,
        stream_interval=config.schedule.stream_interval,
        stream_segments=config.schedule.stream_output,
        sampling_defaults=defaults,
        root_path=config.server.root_path,
        access_log=config.server.access_log,
        ui=config.server.ui,
        file_storage_path=config.server.file_storage_path,
        trust_request_chat_template=config.server.trust_request_chat_template,
        custom_processors=processors() if config.server.enable_custom_logit_processor else None,
        text=TextOptions(
            config.model.enable_tokenizer_batch_encode,
            config.model.enable_dynamic_batch_tokenizer,
            config.model.dynamic_batch_tokenizer_batch_size,
            config.model.dynamic_batch_tokenizer_batch_timeout,
            config.model.tokenizer_worker_num,
        ),
    )


def _model_info(context: LaunchContext, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What `/get_model_info` returns."""
    model = context.model
    return {
        "model_path": model.path,
        "architecture": model.architecture,
        "format": model.format,
        "quantization": model.quantization,
        "parameters": model.parameters,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "end_tokens": list(model.end_tokens),
        "sampling_defaults": defaults,
        "preferred_sampling_params": context.resolved.config.model.preferred_sampling_params,
    }


def _server_info(context: LaunchContext, ready: Ready, replies: ReplyFormat) -> dict[str, Any]:
    """What `/get_server_info` returns of a launch."""
    resolved = context.resolved
    return {
        "version": __version__,
        "platform": context.platform,
        "device": asdict(context.device),
        "chosen_because": context.reason,
        "arguments": resolved.describe(),
        "backends": {slot: str(choice) for slot, choice in resolved.backends.items()},
        "quantities": {name: str(quantity) for name, quantity in resolved.quantities.items()},
        "budget": dict(ready.budget),
        "pages": ready.pages,
        "page_size": ready.page_size,
        "graph_rows": ready.graph_rows,
        "kernels": context.kernels.to_dicts(ready.kernels),
        "load_seconds": round(ready.load_seconds, 3),
        "reply_format": list(replies.reasons),
    }


def grammar_settings(context: LaunchContext) -> GrammarSettings:
    """How the outputs of a launch are constrained."""
    platform, model = context.resolved.config.platform, context.model
    choice = grammar_choice(context.resolved.config, model)
    return GrammarSettings(
        backend=choice.backend,
        why=choice.why,
        vocab_size=model.vocab_size,
        end_tokens=model.end_tokens,
        whitespace_pattern=platform.constrained_json_whitespace_pattern,
        no_whitespace=platform.constrained_json_disable_any_whitespace,
    )


def _fill_in(resolved: Resolved) -> FillIn | None:
    template = resolved.config.model.completion_template
    return None if template is None else read_fill_in(template)


def _score_template(context: LaunchContext, text: TextProcessor) -> EncodedTemplate | None:
    template = context.resolved.config.model.score_template
    return None if template is None else encoded_template(read_score_template(template), context.model.head, text)


def _log_slow_paths(context: LaunchContext, ready: Ready) -> None:
    for key, difference in context.kernels.differences(ready.kernels).items():
        logger.warning("%s: %s", key, difference)
    for kernel in context.kernels.kernels:
        if kernel.slower:
            logger.info("slower path: %s: %s (%s)", kernel.what, kernel.name, kernel.slower)


def _access(resolved: Resolved, key: str | None, clients: tuple[ClientKey, ...]) -> Access:
    server = resolved.config.server
    return Access(
        key=key,
        admin_key=server.admin_api_key,
        clients=clients,
        share_cache=server.share_cache,
        loopback=server.uds is None and is_loopback(server.host),
        hosts=server.allowed_hosts or (),
        origins=server.allowed_origins or (),
    )
