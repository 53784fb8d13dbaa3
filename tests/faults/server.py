"""Faults of the API server: requests, streams, text, health, shutdown."""

from fault import Fault

_OPENAI = "tests/core/server/protocols/test_openai.py"
_ADMIN = "tests/core/server/protocols/test_admin.py"
_EMBEDDINGS = "tests/core/server/protocols/test_embeddings.py"
_WIRE = "tests/core/server/http/test_wire.py"
_BAD_INPUT = "tests/core/server/protocols/test_bad_input.py"
_INERT = "tests/core/engine/test_inert.py"
_CLIENT = "tests/core/server/test_client.py"
_DETOKENIZE = "tests/core/server/text/test_detokenize.py"
_OFFLINE = "tests/core/test_offline.py"
_TEXT_WORK = "tests/core/server/test_text_work.py"
_RATES = "tests/core/server/http/test_rate_limiter.py"

FAULTS = (
    Fault(
        name="text-work-dropped-without-an-answer",
        file="core/srv/server/text_work.py",
        text="if task is None or not task.cancelling():",
        planted="if task is None:",
        effect="Clients whose text waits for a thread while the server shuts down get status 500.",
        tests=(f"{_TEXT_WORK}::test_a_shutdown_ends_text_work_with_the_status_of_a_shutdown",),
    ),
    Fault(
        name="probes-are-not-paced",
        file="core/srv/server/http/auth.py",
        text='elif scope["path"] in OPEN_PATHS:',
        planted='elif scope["path"] in ():',
        effect="A flood of /metrics, which needs no key, delays all streams.",
        tests=(f"{_RATES}::test_the_rate_of_probes_is_limited_only_while_requests_run",),
    ),
    Fault(
        name="healthy-without-an-engine",
        file="core/srv/server/lifecycle.py",
        text="return self._client.alive and not self.draining",
        planted="return not self.draining",
        effect="/health says ok when the engine is dead, and nothing restarts the server.",
        tests=(_ADMIN,),
    ),
    Fault(
        name="a-piece-counts-as-a-captured-step",
        file="core/srv/engine/inert.py",
        text="effects=lambda stats: stats.replayed_steps - stats.piecewise_steps,",
        planted="effects=lambda stats: stats.replayed_steps,",
        effect="Graphs that no step replays are not reported while piecewise graphs are replayed.",
        tests=(_INERT,),
    ),
    Fault(
        name="inert-feature-logged-every-second",
        file="core/srv/engine/inert.py",
        text="                self._logged.add(feature.name)\n",
        planted="",
        effect="The log has a line for each inert feature every second.",
        tests=(_INERT,),
    ),
    Fault(
        name="stream-without-its-end",
        file="core/srv/server/protocols/openai.py",
        text="        yield DONE\n",
        planted="",
        effect="Streams do not end with [DONE], and clients wait for more.",
        tests=(_OPENAI,),
    ),
    Fault(
        name="unknown-field-accepted",
        file="core/srv/server/fields.py",
        text="        cls._refuse_unknown(body, where)\n",
        planted="        body = {name: value for name, value in body.items() if name in cls.model_fields}\n",
        effect="A misspelt field of a request is silently ignored.",
        tests=(_BAD_INPUT,),
    ),
    Fault(
        name="refused-field-accepted",
        file="core/srv/server/fields.py",
        text="cls._is_implemented(name) or not is_neutral(name, value)",
        planted="cls._is_implemented(name) or name not in cls.model_fields",
        effect="A field that is not implemented is accepted and has no effect.",
        tests=(_BAD_INPUT,),
    ),
    Fault(
        name="stop-string-begins-too-late",
        file="core/srv/server/text/detokenize.py",
        text="safe_end = min(safe_end, position)",
        planted="safe_end = min(safe_end, position + 1)",
        effect="The first character of a stop string is sent before the string is complete.",
        tests=(_DETOKENIZE,),
    ),
    Fault(
        name="later-stop-string-wins",
        file="core/srv/server/text/detokenize.py",
        text="elif found is None or (position, len(stop)) < found:",
        planted="elif found is None:",
        effect="The text is cut at the first stop string of the list instead of the first one in the text.",
        tests=(_DETOKENIZE,),
    ),
    Fault(
        name="abandoned-request-goes-on",
        file="core/srv/server/client.py",
        text="                self._outbox.put_nowait(Abort([spec.id]))\n",
        planted="",
        effect="Requests of disconnected clients are generated to their end.",
        tests=(_CLIENT,),
    ),
    Fault(
        name="waiting-requests-outlive-the-engine",
        file="core/srv/server/client.py",
        text="            inbox.fail(failure)\n",
        planted="            pass\n",
        effect="When the engine dies, open requests hang until their clients time out.",
        tests=(_CLIENT,),
        hangs=True,
    ),
    Fault(
        name="all-outputs-have-one-seed",
        file="core/srv/server/generation.py",
        text=".seeds[self.output_index]",
        planted=".seeds[0]",
        effect="All n outputs of a request are the same.",
        tests=(_OPENAI,),
    ),
    Fault(
        name="prompt-counted-for-each-output",
        file="core/srv/server/generation.py",
        text=" if sequence.output_index == 0]",
        planted="]",
        effect="usage counts the prompt n times.",
        tests=(_OPENAI,),
    ),
    Fault(
        name="full-queue-is-an-internal-error",
        file="core/srv/server/engine_errors.py",
        text='    "queue_full": 503,\n',
        planted="",
        effect="A full queue is reported as a bug of the server, and clients do not retry.",
        tests=(_ADMIN,),
    ),
    Fault(
        name="any-key-of-the-right-length",
        file="core/srv/server/access.py",
        text="hmac.compare_digest(given, key)",
        planted="len(given) == len(key)",
        effect="Any API key of the right length is accepted.",
        tests=(_ADMIN,),
    ),
    Fault(
        name="salts-share-a-cache",
        file="core/srv/server/generation.py",
        text="            namespace=self.prompt.namespace,\n",
        planted="",
        effect="Requests with different cache_salt share cached prompts, which their timing reveals.",
        tests=("tests/core/server/protocols/test_foreign_fields.py",),
    ),
    Fault(
        name="special-tokens-twice",
        file="core/srv/server/protocols/chat.py",
        text="special=False,",
        planted="special=True,",
        effect="Chat prompts begin with two begin-of-text tokens, and answers get worse.",
        tests=(_OPENAI,),
    ),
    Fault(
        name="drained-server-accepts",
        file="core/srv/server/lifecycle.py",
        text="    def check_accepting(self) -> None:\n",
        planted="    def check_accepting(self) -> None:\n        return\n\n    def _check_accepting(self) -> None:\n",
        effect="A server that shuts down accepts requests and cuts them off.",
        tests=(_ADMIN,),
    ),
    Fault(
        name="offline-outputs-in-order-of-their-end",
        file="core/srv/offline.py",
        text="return await asyncio.gather(*tasks)",
        planted="return [await task for task in asyncio.as_completed(tasks)]",
        effect="LLM.generate returns the shortest outputs first, and they are assigned to the wrong prompts.",
        tests=(_OFFLINE + "::test_outputs_are_in_the_order_of_the_prompts_though_the_last_end_first",),
    ),
    Fault(
        name="offline-batch-fills-the-queue",
        file="core/srv/offline.py",
        text="sequences // max(1, most)",
        planted="sequences",
        effect="LLM.generate with n > 1 sends more sequences than the queue holds, and the batch fails.",
        tests=(_OFFLINE + "::test_a_batch_never_fills_the_engines_queue",),
    ),
    Fault(
        name="embedding-of-an-aborted-request",
        file="core/srv/server/service.py",
        text="        self.lifecycle.check_complete([embedding.finish for embedding in embeddings])\n",
        planted="",
        effect="An aborted request is a success whose embeddings are empty.",
        tests=(_EMBEDDINGS,),
    ),
    Fault(
        name="embedding-disconnect-ignored",
        file="core/srv/server/protocols/embeddings.py",
        text="await while_connected(request.receive, work)",
        planted="await work",
        effect="The prompts of a client that has disconnected are still computed.",
        tests=(_WIRE,),
    ),
    Fault(
        name="hidden-states-past-the-stop-string",
        file="core/srv/server/protocols/native.py",
        text="entries = range(max(1, sequence.completion_tokens))",
        planted="entries = range(max(1, len(states) // size - len(prompt) + 1))",
        effect="The hidden states include those of tokens after the stop string, and do not match the output ids.",
        tests=("tests/core/server/protocols/test_native.py",),
    ),
)
