# ruff: noqa: E501
"""Scripts that are hard to rehearse: name -> (source, what a guard must answer)."""

TRAIN = """
import os, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def data():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())

def main(workers=0, steps=10**9, model=None, rank=0, **more):
    torch.manual_seed(rank)
    train, val = torch.utils.data.random_split(data(), [192, 64], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(train, 16, shuffle=True, num_workers=workers, **more)
    model = model or nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(40):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            print("acc", sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(val, 32)) / 64)
"""

RANKS = """
def rank(r):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="12397")
    torch.distributed.init_process_group("gloo", rank=r, world_size=2)
    main(model=torch.nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))), rank=r)

"""

ODD = {
    "quiet": (TRAIN + "main()\n", 0, ""),
    "workers": (TRAIN + "if __name__ == '__main__':\n    main(workers=2)\n", 0, ""),
    "persistent": (TRAIN + "if __name__ == '__main__':\n    main(workers=2, persistent_workers=True)\n", 0, ""),
    "spawn": (TRAIN + "if __name__ == '__main__':\n    main(workers=1, multiprocessing_context='spawn')\n", 0, ""),
    "stubborn": (TRAIN + "import signal\ndef deaf(i):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                 "if __name__ == '__main__':\n    main(workers=2, worker_init_fn=deaf)\n", 0, ""),
    "chdir": (TRAIN + "os.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')\nopen('log.txt', 'w').write('x')\nmain()\n", 0, ""),
    "sys-exit": (TRAIN + "main()\nsys.exit(0)\n", 0, ""),
    "exit-code": (TRAIN + "main()\nsys.exit('done')\n", 0, ""),
    "compiled": (TRAIN + "main(model=torch.compile(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))))\n", 0, "torch.compile"),
    "catches-all": (TRAIN + "while True:\n    try:\n        main()\n        break\n    except BaseException:\n        time.sleep(0.1)\n", 0, ""),
    "slow-load": (TRAIN + "time.sleep(3)\nmain()\n", 0, ""),
    "progress-bar": (TRAIN + "for i in range(300):\n    print('\\r' + '#' * (i % 50), end='', flush=True)\nmain()\n", 0, ""),
    "overwrites": (TRAIN + "open('mine.txt', 'w').write('lost')\nos.remove('other.txt')\nimport shutil\nshutil.rmtree('folder')\n"
                   "torch.save({}, 'weights.pt')\nassert not os.path.exists('other.txt')\nassert open('mine.txt').read() == 'lost'\n"
                   "from pathlib import Path\nPath('new').mkdir()\nPath('new/a.txt').write_text('a')\nassert os.listdir('new') == ['a.txt']\n"
                   "os.replace('new/a.txt', 'mine.txt')\nassert Path('mine.txt').read_text() == 'a'\nmain()\n", 0, "scratch"),
    "arguments": ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()\n", 2, "needs other arguments"),
    "crash": (TRAIN + "main(steps=1 / 0)\n", 2, "fails by itself: ZeroDivisionError"),
    "crash-late": (TRAIN + "main(collate_fn=lambda rows: {}[1])\n", 2, "fails by itself: KeyError"),
    "never-steps": ("import torch\nprint('only data')\n", 2, "without an optimiser step"),
    "syntax": ("def f(:\n", 2, "fails by itself: SyntaxError"),
    "no-module": ("import a_module_that_is_nowhere\n", 2, "ModuleNotFoundError"),
    "kills-itself": ("import os\nos._exit(7)\n", 2, "ended its own process (exit code 7)"),
    "own-processes": ("import subprocess, sys\nif 'child' not in sys.argv:\n    subprocess.run([sys.executable, __file__, 'child'])\n", 2, "its own process"),
    "needs-ranks": (TRAIN + "torch.distributed.init_process_group('gloo')\nmain()\n", 2, "guard --nproc 2"),
    "local-rank": (TRAIN + "rank = int(os.environ['LOCAL_RANK'])\nmain()\n", 2, "guard --nproc 2"),
    "spawns-ranks": (TRAIN + RANKS + "if __name__ == '__main__':\n    torch.multiprocessing.spawn(rank, nprocs=2)\n", 0, "2 ranks hold the same weights"),
    "rank-crashes": (TRAIN + RANKS.replace("    main(", "    1 / (1 - r)\n    main(") + "if __name__ == '__main__':\n    torch.multiprocessing.spawn(rank, nprocs=2)\n",
                     2, "fails by itself (rank 1): ZeroDivisionError"),
    "trains-in-a-child": (TRAIN + "import multiprocessing\nif __name__ == '__main__':\n    p = multiprocessing.Process(target=main)\n    p.start()\n    p.join()\n", 2, "its own process"),
    "pool": (TRAIN + "import multiprocessing\ndef square(i):\n    return i * i\nif __name__ == '__main__':\n"
             "    with multiprocessing.Pool(2) as pool:\n        assert pool.map(square, range(4)) == [0, 1, 4, 9]\n    main()\n", 0, ""),
    "reads-stdin": (TRAIN + "input('overwrite? ')\nmain()\n", 2, "reads from the terminal: EOFError"),
    "skips-bad-batches": (TRAIN.replace("            loss = F.cross_entropy(model(x), y)\n", "            try:\n                loss = F.cross_entropy(model(x), y)\n"
                          "            except Exception:\n                continue\n") + "main()\n", 0, ""),
    "exits-early": ("import sys\nsys.exit('no data at ./data')\n", 2, "no data at ./data"),
}  # fmt: skip
"""Exit code and words of the answer."""
