"""Faults of structured output: masks made apart from the loop, UTF-8, languages, and the grammars of forced calls."""

from fault import Fault

_ENGINE = "tests/core/engine/test_grammars.py"
_SCHEDULER = "tests/core/sched/test_scheduler.py"
_FORCED = "tests/core/reply/test_forced.py"
_BACKENDS = "tests/core/grammar/test_other_backends.py"

FAULTS = (
    Fault(
        name="suspended-requests-get-rows",
        file="core/srv/sched/planner.py",
        text="if request.state is not running or request.suspended or (",
        planted="if request.state is not running or (",
        effect="All streams wait for each mask of a slow grammar.",
        tests=(f"{_ENGINE}::test_other_streams_go_on_while_a_slow_mask_is_made",),
    ),
    Fault(
        name="resumed-requests-stay-suspended",
        file="core/srv/sched/scheduler.py",
        text="            request_.suspended = False\n",
        planted="            pass\n",
        effect="A request whose mask was slow once never ends.",
        tests=(f"{_ENGINE}::test_other_streams_go_on_while_a_slow_mask_is_made",),
        hangs=True,
    ),
    Fault(
        name="retracted-requests-count-as-suspended",
        file="core/srv/sched/scheduler.py",
        text="return sum(request.state is State.RUNNING for request in self._suspended.values())",
        planted="return len(self._suspended)",
        effect="The engine waits for a mask of a request that waits for pages, and neither goes on.",
        tests=(f"{_SCHEDULER}::test_a_suspended_request_that_is_retracted_is_not_counted_until_it_runs_again",),
    ),
    Fault(
        name="settled-requests-keep-waiting",
        file="core/srv/sched/scheduler.py",
        text="                request.waits_for_late_inputs = False\n                self._late_live -= 1\n",
        planted="",
        effect="Requests whose thinking budget is over never speculate.",
        tests=("tests/core/engine/test_thinking.py", _SCHEDULER),
    ),
    Fault(
        name="first-mask-in-the-loop",
        file="core/srv/engine/grammars.py",
        text="compiled.exception() is None and not request.grammar.slow:",
        planted="compiled.exception() is None:",
        effect="All streams wait for the first mask of a grammar that is known to be slow.",
        tests=(f"{_ENGINE}::test_other_streams_go_on_while_the_first_mask_of_a_slow_grammar_is_made",),
    ),
    Fault(
        name="prepared-mask-is-made-again",
        file="core/srv/engine/grammars.py",
        text="output.remember(next_masks(backend, [output], self._end_tokens)[0])",
        planted="next_masks(backend, [output], self._end_tokens)",
        effect="The mask that a thread has made is made again in the engine's loop, where all streams wait for it.",
        tests=(_ENGINE,),
    ),
    Fault(
        name="growing-masks-are-not-suspect",
        file="core/srv/grammar/budget.py",
        text="                    output.time.suspect()\n",
        planted="                    pass\n",
        effect="The masks of an ambiguous grammar with several outputs are made in the loop until they are slow.",
        tests=("tests/core/grammar/test_budget.py",),
    ),
    Fault(
        name="surrogates-are-text",
        file="core/srv/grammar/utf8.py",
        text="    ((0x80, 0x9F, 1),),\n",
        planted="    ((0x80, 0xBF, 1),),\n",
        effect="With a token per byte, a constrained answer has bytes that no client can decode.",
        tests=(f"{_BACKENDS}::test_tokens_of_bytes_form_utf_8",),
    ),
    Fault(
        name="token-of-a-cut-character-ends-it",
        file="core/srv/grammar/utf8.py",
        text="return self._cut.get(token, START) if state == START else",
        planted="return START if state == START else",
        effect="Behind a token that ends within a character, a constrained answer goes on with another character.",
        tests=(f"{_BACKENDS}::test_a_token_may_end_within_a_character_and_another_may_go_on_there",),
    ),
    Fault(
        name="outlines-prefers-the-first-alternative",
        file="core/srv/grammar/outlines_backend.py",
        text='f"{_BEGIN}(?:{text})$"',
        planted='f"{_BEGIN}(?:{text})"',
        effect="A choice of `a` and `ab` is always `a`.",
        tests=("tests/core/grammar/test_languages.py",),
    ),
    Fault(
        name="lists-with-bare-keys-have-one-item",
        file="core/srv/reply/bare_values.py",
        text='elements": [one, behind]}',
        planted='elements": [one]}',
        effect="A forced call of Gemma has no list of two elements.",
        tests=(f"{_FORCED}::test_arguments_with_bare_keys_follow_their_schema",),
    ),
    Fault(
        name="references-with-bare-keys-do-not-end",
        file="core/srv/reply/bare_values.py",
        text="        self._count += 1\n",
        planted="",
        effect="A tool whose schema refers to itself ends the API process's work with a RecursionError.",
        tests=(f"{_FORCED}::test_arguments_that_bare_keys_cannot_write_are_refused_by_name",),
    ),
    Fault(
        name="nested-members-are-all-optional",
        file="core/srv/reply/nested_values.py",
        text="one_of(tags) if name in required else optional(tags)",
        planted="optional(tags)",
        effect="A forced call of MiniMax M3 lacks members that its schema requires.",
        tests=(f"{_FORCED}::test_arguments_of_nested_tags_follow_their_schema",),
    ),
    Fault(
        name="members-of-alternatives-are-strings",
        file="core/srv/reply/typed_values.py",
        text='    return {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else None\n',
        planted="    return None\n",
        effect="The numbers in an argument that is an object or null are strings in calls of MiniMax M3.",
        tests=(f"{_FORCED}::test_nested_tags_say_what_was_called_however_they_are_cut",),
    ),
)
