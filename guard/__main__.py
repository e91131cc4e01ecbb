"""`python -m trainworthy.guard train.py -- ARGS`: the same as `trainworthy guard`."""

import sys

from trainworthy.core.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["guard"]
    main()
