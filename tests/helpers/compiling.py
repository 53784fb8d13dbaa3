"""The time limit of tests that compile native code.

That takes from one minute to many, by what else runs on the machine. So the limit only ends a hang.
"""

COMPILING_S = 3600.0
