"""The command line: `srv launch | plan | args | platforms | doctor | plugin | conformance`.

A subcommand is a module with `add(subparsers)`, listed in `main.COMMANDS`. Importing it is fast: the dependencies of
the command (torch above all) are imported when it runs.
"""
