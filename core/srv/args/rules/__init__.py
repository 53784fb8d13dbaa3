"""Core's rules for the arguments of single features: defaults, constraints and contributions.

One module per feature, each with up to four tables that `srv.args.defaults` collects. These modules must not name a
platform: a rule of one platform belongs into the facts of that platform.
"""
