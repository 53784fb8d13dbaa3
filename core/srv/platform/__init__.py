"""The platform contract, version 1.

    facts        device facts, statements (defaults, constraints), backend specs: data, torch-free
    manifest     what a plugin's entry point gives: pure data and pure functions
    interface    the live objects that `create` returns (the one module here that knows torch's types)
    registry     discovery through entry points, contract checks
    probe        asking a plugin about this machine, in a child process
    choose       command line > environment > config file > automatic
"""

API_VERSION = (1, 0)
