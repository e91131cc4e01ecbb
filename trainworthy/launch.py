"""`accelerate launch -m trainworthy.launch RECIPE [settings]`: a run under any launcher."""

from trainworthy.core.launch import main

if __name__ == "__main__":
    main()
