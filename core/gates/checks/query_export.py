"""python query_export.py READER EXPORT SAMPLES ANSWERS: load an export as a user would, and store its answers.

It imports nothing of this project."""

import importlib.util
import sys

import torch

OURS = ("core", "recipes", "trainworthy")


def main(reader: str, folder: str, samples: str, answers: str) -> None:
    """Load `reader`, ask the export in `folder` each sample, store the answers."""
    spec = importlib.util.spec_from_file_location("reader", reader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.load(folder)
    with torch.no_grad():
        found = [module.answer(loaded, one) for one in torch.load(samples, weights_only=True)]
    ours = sorted({name.partition(".")[0] for name in sys.modules} & {*OURS})
    if ours:
        raise SystemExit(f"the reader imports {', '.join(ours)}, which no user has")
    torch.save([{way: value.detach().float().cpu() for way, value in one.items()} for one in found], answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
