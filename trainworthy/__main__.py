"""`python -m trainworthy`: the command."""

from trainworthy.core.cli import main

if __name__ == "__main__":
    main()
