"""`python -m srv` runs the same command line as `srv`."""

from srv.cli.main import console

if __name__ == "__main__":
    raise SystemExit(console())
