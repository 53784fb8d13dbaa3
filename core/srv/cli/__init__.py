"""The command line: `srv launch | plan | args | platforms | doctor | plugin | conformance`.

A subcommand is a module with `add(subparsers)`, listed in `main.COMMANDS`. It is light: what the command
needs (torch above all) is imported when it runs.
"""
