"""The gates for code that is not a recipe: plain scripts, and trainers of transformers and TRL."""

import logging

# peft imports bitsandbytes, which on some processors looks for a kernel on the hub and warns that there is none
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
