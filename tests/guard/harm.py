"""Harm of the bugs of the fifth to tenth, the twelfth, the fourteenth to the twenty-fifth, the hosted and the trainer set: each script is run whole,
unchanged and with every patch, at two seeds.

`python -m tests.guard.harm [SCRIPT | ID ...]` prints one line for each run: id, seed, final number, seconds.
The final number is the last `FINAL name=value` that the script prints. Where a bug changes the script's own
evaluation, the code in `HONEST` is run after the script and prints another `FINAL`.
"""

import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.guard import (
    eighteenth_set,
    eighteenth_set_heldout,
    eighth_set,
    eighth_set_heldout,
    fifteenth_set,
    fifteenth_set_heldout,
    fifth_set,
    fifth_set_heldout,
    fourteenth_set,
    fourteenth_set_heldout,
    hosted_set,
    hosted_set_heldout,
    nineteenth_set,
    nineteenth_set_heldout,
    ninth_set,
    ninth_set_heldout,
    seventeenth_set,
    seventeenth_set_heldout,
    seventh_set,
    seventh_set_heldout,
    sixteenth_set,
    sixteenth_set_heldout,
    sixth_set,
    tenth_set,
    tenth_set_heldout,
    trainer_set,
    trainer_set_heldout,
    twelfth_set,
    twentieth_set,
    twentieth_set_heldout,
    twentyfifth_set,
    twentyfifth_set_heldout,
    twentyfirst_set,
    twentyfirst_set_heldout,
    twentyfourth_set,
    twentyfourth_set_heldout,
    twentysecond_set,
    twentysecond_set_heldout,
    twentythird_set,
    twentythird_set_heldout,
)
from tests.helpers.patches import patched

SETS = (
    fifth_set,
    fifth_set_heldout,
    sixth_set,
    seventh_set,
    seventh_set_heldout,
    eighth_set,
    eighth_set_heldout,
    ninth_set,
    ninth_set_heldout,
    tenth_set,
    tenth_set_heldout,
    twelfth_set,
    fourteenth_set,
    fourteenth_set_heldout,
    fifteenth_set,
    fifteenth_set_heldout,
    sixteenth_set,
    sixteenth_set_heldout,
    seventeenth_set,
    seventeenth_set_heldout,
    eighteenth_set,
    eighteenth_set_heldout,
    nineteenth_set,
    nineteenth_set_heldout,
    twentieth_set,
    twentieth_set_heldout,
    twentyfirst_set,
    twentyfirst_set_heldout,
    twentysecond_set,
    twentysecond_set_heldout,
    twentythird_set,
    twentythird_set_heldout,
    twentyfifth_set,
    twentyfifth_set_heldout,
    twentyfourth_set,
    twentyfourth_set_heldout,
    hosted_set,
    hosted_set_heldout,
    trainer_set,
    trainer_set_heldout,
)
SEEDS = (0, 1)
SCRIPTS = Path(__file__).parent / "scripts"


def with_seed(text: str, seed: int) -> str:
    """The script with its seed replaced: `SEED = 0` in any case, `seed: 0` or `manual_seed(0)`."""
    return re.sub(
        r"""((?:(?i:seed = )|"seed": |seed=|"--seed", type=int, default=|manual_seed\())0\b""", rf"\g<1>{seed}", text
    )


def execute(folder: Path, name: str) -> None:
    """Runs one script as `python NAME` does, in a forked process that has torch."""
    sys.argv, sys.path[0] = [name], str(folder)
    os.chdir(folder)
    log = os.open("log.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def measure(text: str, name: str, companions: dict[str, str], honest: str) -> tuple[str, float]:
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    for file, source in {**companions, name: text + honest}.items():
        (folder / file).write_text(source)
    if (pid := os.fork()) == 0:
        execute(folder, name)
    os.waitpid(pid, 0)
    log = (folder / "log.txt").read_text()
    found = re.findall(r"FINAL (\S+)", log)
    if not found or "Traceback" in log:
        print(log[-1500:])
    shutil.rmtree(folder)
    return (found[-1] if found else "no number"), time.monotonic() - began


def main(wanted: list[str]) -> None:
    import sklearn.datasets  # noqa: F401
    import torch

    torch.set_num_threads(1)
    if any("hf_" in name for name in wanted) or not wanted:
        import transformers  # noqa: F401
    if not wanted or any(
        (SCRIPTS / f / f"{w.partition('--')[0]}.py").exists() for w in wanted for f in ("hosted", "trainer")
    ):
        import peft  # noqa: F401
        import trl  # noqa: F401
        from transformers import Trainer  # noqa: F401
    patches = [p for half in SETS for p in (*half.BUGS, *half.HEALTHY)]
    honest = {id: code for one in SETS for id, code in one.HONEST.items()}
    for name in sorted({Path(p.script).name for p in patches}):
        own = [p for p in patches if Path(p.script).name == name]
        chosen = [p for p in own if not wanted or p.id in wanted or name.removesuffix(".py") in wanted]
        companions = {file: (own[0].path.parent / file).read_text() for file in fifth_set.COMPANIONS.get(name, ())}
        healthy = own[0].path.read_text()
        for seed in SEEDS if chosen else ():
            endings = {honest.get(p.id, "") for p in chosen}
            runs = [(f"{name.removesuffix('.py')} (unchanged{', honest' if e else ''})", healthy, e) for e in endings]
            for id, text, ending in runs + [(p.id, patched(p), honest.get(p.id, "")) for p in chosen]:
                number, seconds = measure(with_seed(text, seed), name, companions, ending)
                print(f"{id:45} seed {seed}  {number:24} {seconds:5.1f} s", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main(sys.argv[1:])
