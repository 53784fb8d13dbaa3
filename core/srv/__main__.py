"""`python -m srv` runs the same command line as `srv`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `python -m` puts the working directory first. A model's folder may have a file with the name of any module.
        del sys.path[0]
    from srv.cli.main import console

    raise SystemExit(console())
