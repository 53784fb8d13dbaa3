"""What core says of arguments of features that bring rules of their own: defaults, constraints, contributions.

A module a concern, each with up to four tables that `srv.args.defaults` gathers. They name no platform: what only one
platform says belongs into its own facts.
"""
