"""`python -m bench.online`."""

from bench.online.cli import main

# Guarded: client processes import this module again.
if __name__ == "__main__":
    main()
