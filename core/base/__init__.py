"""What every other room uses: errors and exit codes, console, settings, seeds, the machine, verdicts."""

import logging

# peft and diffusers import bitsandbytes, which on some processors looks for a kernel on the hub and warns that there is none
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
