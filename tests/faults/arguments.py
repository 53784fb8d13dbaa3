"""Faults of the server arguments and of the budget of `srv plan`."""

from fault import Fault

_BACKENDS = "tests/core/args/test_backends.py"
_RESOLVE = "tests/core/args/test_resolve.py"
_SOURCES = "tests/core/args/test_sources.py"
_BUDGET = "tests/core/planning/test_budget.py"

FAULTS = (
    Fault(
        name="plan-accepts-what-cannot-be-built",
        file="core/srv/planning/launchable.py",
        text="refusals = refusals if is_refused else (*refusals, _of_model(resolved, error))",
        planted="pass",
        effect="`srv plan` accepts FP8 and AWQ checkpoints, which every launch refuses.",
        tests=("tests/core/planning/test_launchable.py",),
    ),
    Fault(
        name="hub-sends-whole-shards",
        file="core/srv/models/hub.py",
        text="end = min(8 + length, size) if length <= MAX_HEADER_BYTES else len(prefix)",
        planted="end = size",
        effect="`srv plan` of a model on a hub downloads the weights.",
        tests=("tests/core/planning/test_hub.py",),
    ),
    Fault(
        name="inert-default-refused",
        file="core/srv/args/rules/inert.py",
        text='if chunk <= 0 or context["max_prefill_tokens"] == _DEFAULT_PREFILL:',
        planted="if chunk <= 0:",
        effect="Setting an argument to its default is refused.",
        tests=("tests/core/args/test_inert.py",),
    ),
    Fault(
        name="environment-outranks-command-line",
        file="core/srv/args/statement.py",
        text="ENVIRONMENT = 1\n    COMMAND_LINE = 2",
        planted="ENVIRONMENT = 2\n    COMMAND_LINE = 1",
        effect="A flag on the command line is ignored if an environment variable sets the same argument.",
        tests=(_SOURCES, _RESOLVE),
    ),
    Fault(
        name="platform-default-beats-user",
        file="core/srv/args/statement.py",
        text="    PLATFORM = 2\n",
        planted="    PLATFORM = 5\n",
        effect="A value that the user sets is overwritten by the platform's default.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="auto-does-not-cancel-the-file",
        file="core/srv/args/resolve.py",
        text="below = [lower for lower in ranked[position:] if lower.layer < Layer.USER]",
        planted="below = ranked[position:]",
        effect='"auto" on the command line leaves the value of the config file in force.',
        tests=(_RESOLVE,),
    ),
    Fault(
        name="unknown-flag-accepted",
        file="core/srv/args/sources.py",
        text='    rejections += unknown_flags(getattr(namespace, "unknown", ()))\n',
        planted="",
        effect="A misspelt flag is silently ignored.",
        tests=(_SOURCES,),
    ),
    Fault(
        name="config-file-refusal-swallowed",
        file="core/srv/args/sources.py",
        text="read_file(Path(config))\n        statements, rejections = statements + more, rejections + rejected",
        planted="read_file(Path(config))\n        statements = statements + more",
        effect="A misspelt key of the config file is silently ignored.",
        tests=(_SOURCES,),
    ),
    Fault(
        name="platform-constraints-not-checked",
        file="core/srv/args/resolve.py",
        text="for constraint in (*manifest.facts.constraints, *declared)]",
        planted="for constraint in declared]",
        effect="Values that the platform cannot serve are accepted, and fail when the first request runs.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="one-refusal-at-a-time",
        file="core/srv/args/resolve.py",
        text=(
            "raise Refusal(list(dict.fromkeys([*carried, *(reworded(rejection, used) for rejection in"
            " state.rejections)])))"
        ),
        planted="raise Refusal([*carried, *(reworded(each, used) for each in state.rejections)][:1])",
        effect="An operator sees one wrong value per start instead of all of them.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="planned-value-accepted",
        file="core/srv/args/resolve.py",
        text="argument.planned_reason(value)",
        planted="argument.planned_reason(argument.default)",
        effect="A flag whose feature does not exist is accepted and has no effect.",
        tests=("tests/core/args/test_declared.py",),
    ),
    Fault(
        name="secret-in-the-report",
        file="core/srv/args/statement.py",
        text="return argument.show(value) if argument.arg.secret and value is not None else argument.kind.dump(value)",
        planted="return argument.kind.dump(value)",
        effect="The API key is in the start-up log and in /get_server_info.",
        tests=(_RESOLVE,),
    ),
    Fault(
        name="page-zero-not-in-the-budget",
        file="core/srv/planning/pools.py",
        text="return sum((count + 1) * size for",
        planted="return sum(count * size for",
        effect="The pool is one page larger than the memory that is left for it.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="reserved-memory-ignored",
        file="core/srv/planning/budget.py",
        text="pool = min(static - own_weights, free_bytes - reserved_bytes)",
        planted="pool = min(static - own, free_bytes)",
        effect="A high --mem-fraction-static leaves no memory for activations.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="page-zero-missing-in-the-ledger",
        file="core/srv/planning/ledger.py",
        text="return sum((group.pages + 1) * size for",
        planted="return sum(group.pages * size for",
        effect="The memory ledger predicts a pool that is one page smaller than it is.",
        tests=("tests/core/planning/test_ledger.py",),
    ),
    Fault(
        name="fit-counts-one-request",
        file="core/srv/planning/fit.py",
        text="return self.requests * self.per_request + min(",
        planted="return self.per_request + min(",
        effect="`srv plan --fit concurrency` promises requests that the pool cannot hold.",
        tests=("tests/core/planning/test_fit.py",),
    ),
    Fault(
        name="wrong-item-size",
        file="core/srv/dtypes.py",
        text='"bfloat16": 2',
        planted='"bfloat16": 4',
        effect="Weights and pool of bfloat16 count twice, so that only half of the pages fit.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="one-scale-per-token-not-counted",
        file="core/srv/specs.py",
        text="return elements + SCALE_BYTES if",
        planted="return elements + SCALE_BYTES // 2 if",
        effect="A pool of int8 is larger than its budget.",
        tests=(_BUDGET,),
    ),
    Fault(
        name="backends-asked-about-the-whole-model",
        file="core/srv/args/backends.py",
        text="    return rank_facts(model, ranks)\n",
        planted="    return model\n",
        effect="A plan for several ranks accepts a backend that cannot compute the heads of one rank.",
        tests=(_BACKENDS,),
    ),
)
