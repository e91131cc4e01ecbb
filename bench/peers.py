"""Other tools on the everyday bugs that guard is scored on: those of the eighth and ninth set that do harm, both halves.

    python3 -m venv /tmp/peers && . /tmp/peers/bin/activate
    pip install torch torchvision scikit-learn scipy gymnasium transformers accelerate tqdm
    pip install torchtest2==0.1.0 torch-audit==0.3.0 preflight-ml==0.1.1 lightning==2.6.6 traincheck==0.2.0
    python bench/peers.py run
    python bench/peers.py traincheck digits_cnn    # minutes a case
    python bench/peers.py table

A script runs until its first optimiser step (torch-audit: 100 steps). The names in its scope there are what a user would pass to a tool;
`PARTS` says which. A tool stops a bug if it reports something on it that it does not report on the healthy script. TrainCheck learns from
the healthy script's first 10 steps, checks 10 steps of a bug at the same seed, and 10 of the healthy script at another seed. With a CUDA
build of torch and no driver it needs `RuntimeError` next to `AssertionError` in `safe_getattr` of traincheck/utils.py.
"""

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.guard.score import cases  # noqa: E402

SETS, AUDITED_STEPS, TRACED_STEPS = ("eighth", "ninth"), 100, 10


class Parts(NamedTuple):
    """What a user of the tools takes from a script: expressions over the names in scope at the first step."""

    inputs: str
    targets: str = "None"
    loss: str = "None"
    model: str = "model"
    optimizer: str = "optimizer"
    train: str = "train_loader"
    val: str = "test_loader"
    pairs: bool = True
    """Batches of `train` are (what the model takes, what the loss takes), so that preflight-ml can run both."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Further arguments of torchtest2's check_model."""
    when: str = "True"
    """Holds at the first step of the training that is checked (there may be a pretraining)."""


CROSS_ENTROPY = "lambda o, t: F.cross_entropy(o.view(-1, o.size(-1)), t.view(-1))"
TRAIN, VAL = (f"[get_batch('{k}') for _ in range(20)]" for k in ("train", "val"))
DATES = "[(encode([a for a, _ in p]), encode([b for _, b in p])) for p in ([random_pair() for _ in range(64)] for _ in range(20))]"
SIXTEEN = "[trainer.train_dataset[i] for i in range(16)]"
CRITIC = {k: lambda m, x, *_: (m(x)[0].logits, m(x)[1]) for k in ("forward_fn", "eval_forward_fn")}
PARTS = {
    "box_regression": Parts("images", "(labels, boxes)", "lambda o, t: class_loss_func(o[0], t[0]) + 5 * bbox_loss_func(o[1], t[1])",
        pairs=False),
    "char_lm": Parts("(data, model.init_hidden(args.batch_size))", "targets", "lambda o, t: criterion(o[0], t)", options={"batch_dim": 1},
        train="[get_batch(train_data, i) for i in range(0, 800, 40)]", val="[get_batch(val_data, i) for i in range(0, 800, 40)]", pairs=False),
    "denoise": Parts("noisy", "img", "criterion", train="[(add_noise(x), x) for x, in train_loader]"),
    "diabetes_mlp": Parts("xb", "yb", "criterion", val="val_loader"),
    "digits_cnn": Parts("data", "target", "F.cross_entropy"),
    "imbalanced": Parts("X_batch", "y_batch", "lambda o, t: criterion(o, t.unsqueeze(1))"),
    "lm_transformer": Parts("x", "y", CROSS_ENTROPY, train=TRAIN, val=VAL),
    "lstm_docs": Parts("(text, lengths)", "labels", "criterion", train="[(t, y) for t, _, y in train_loader]",
        val="[(t, y) for t, _, y in test_loader]", pairs=False),
    "reinforce": Parts("torch.randn(16, 4)", model="policy", train="None"),
    "resnet_onecycle": Parts("images", "labels", "criterion"),
    "transfer": Parts("images", "labels", "criterion", when="'few' in globals()"),
    "unet_digits": Parts("x", "y", "loss_fn", val="val_loader"),
    "a2c_cartpole": Parts("torch.as_tensor(obs, dtype=torch.float32)", train="None", options=CRITIC),
    "accelerate_pieces": Parts("ids", "labels", "lambda o, t: loss_fct(o.flatten(0, 1), t.flatten())", optimizer="optimizer.optimizer",
        train="train_dataloader", val="eval_dataloader"),
    "audio_tags": Parts("x", "target", "criterion", train="train_dl", val="test_dl"),
    "churn_embed": Parts("(x_cat, x_num)", "target", "criterion", train="[(x, t) for _, x, t in train_dl]",
        val="[(x, t) for _, x, t in test_dl]", pairs=False),
    "clip_halves": Parts("(upper, lower)", loss="lambda o: clip_loss(*o)", pairs=False),
    "finetune_groups": Parts("inputs", "labels", "criterion", train="dataloaders['train']", val="dataloaders['val']",
        when="'exp_lr_scheduler' in globals()"),
    "flow_digits": Parts("(xt, t.view(-1, 1))", "target", "F.mse_loss", model="net", train="data.split(64)",
        val="torch.tensor(test * 2 - 1, dtype=torch.float32).split(64)", pairs=False),
    "forecast_scaled": Parts("x", "y", "criterion", val="val_loader"),
    "gpt_memmap": Parts("(X, Y)", loss="lambda o: o[1]", train=TRAIN, val=VAL, pairs=False),
    "hf_modules": Parts("{k: v for k, v in collate(" + SIXTEEN + ").items() if k != 'labels'}",
        "collate(" + SIXTEEN + ")['labels']", model="trainer.model",
        loss="lambda o, t: F.cross_entropy(o.logits, t)", optimizer="getattr(trainer.optimizer, 'optimizer', trainer.optimizer)",
        train="[(b['input_ids'], b['labels']) for b in trainer.get_train_dataloader()]", pairs=False, options={"plugin": "huggingface"},
        val="[(b['input_ids'], b['labels']) for b in trainer.get_eval_dataloader()]"),
    "seq2seq_dates": Parts("(src, trg, teacher_forcing_ratio)", "trg", "lambda o, t: criterion(o.reshape(-1, VOCAB), t.reshape(-1))",
        train=DATES, val=DATES, pairs=False, options={"eval_forward_fn": lambda m, x: m(x[0], x[1], 1)}),
    "vit_mixup": Parts("images", "(y_a, y_b, lam)", "lambda o, t: t[2] * criterion(o, t[0]) + (1 - t[2]) * criterion(o, t[1])", pairs=False),
}  # fmt: skip
CHANGED = {
    "denoise--noisy_target": {"targets": "noisy", "train": "[(x, x) for x in (add_noise(x) for x, in train_loader)]"},
    "digits_cnn--smoothing_and_weights": {
        "loss": "lambda o, t: F.cross_entropy(o, t, weight=1 + 0.1 * torch.arange(10.0), label_smoothing=0.1)"},
    "unet_digits--dice": {"loss": "lambda o, t: loss_fn(o, t) + 1 - "
        "(2 * (torch.sigmoid(o) * t).sum() + 1) / (torch.sigmoid(o).sum() + t.sum() + 1)"},
}  # fmt: skip
"""Cases that change the very line of the loop from which a user would copy the target or the loss."""


class Enough(BaseException):
    """Ends a script."""


Value = Callable[[str], Any]  # evaluates a field of `Parts`
Found = tuple[list[str], list[str]]  # what a tool reports as failures and as warnings


def run_script(script: Path, when: str, at_step: Callable[[dict[str, Any]], None]) -> None:
    """Run a script; `at_step` gets the names in scope before each optimiser step for which `when` holds. `Enough` ends the script."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    own: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    busy = False

    def look(*_: Any) -> None:
        nonlocal busy
        frame, scopes = sys._getframe().f_back, []
        while frame:
            scopes += [frame.f_locals] * (frame.f_code.co_filename == str(script))
            frame = frame.f_back
        if scopes and not busy and eval(when, own):
            names = {k: v for scope in reversed(scopes) for k, v in scope.items()}
            busy = True  # the tools make steps of their own
            at_step({"torch": torch, "F": torch.nn.functional, **own, **names})
            busy = False

    handle = register_optimizer_step_pre_hook(look)
    sys.argv = [str(script)]
    try:
        exec(compile(script.read_text(), str(script), "exec"), own)
    except Enough:
        pass
    finally:
        handle.remove()


def torchtest2(p: Value, parts: Parts) -> Found:
    """Every check with the defaults, but for `gradcheck` (own autograd functions) and `gpu`. The rate is that before any schedule."""
    from torchtest2 import check_model

    for group in p("optimizer").param_groups:
        group["lr"] = group.get("max_lr", group.get("initial_lr", group["lr"]))
    report = check_model(
        p("model"), p("inputs"), p("targets"), loss_fn=p("loss"), optimizer=p("optimizer"), **parts.options
    )
    print(report)
    return [c.name for c in report.failures], [c.name for c in report.warnings]


def preflight_ml(p: Value, parts: Parts) -> Found:
    """Every check with the defaults. Model (in eval mode: it gets one sample) and loss are given where they take the loader's batches."""
    from preflight.reporter import print_results
    from preflight.runner import run_checks

    model, loss = (p("model").eval(), p("loss")) if parts.pairs else (None, None)
    results = run_checks(p("train"), model, loss, {"val_dataloader": p("val")})
    print_results(results, fmt="terminal")
    wrong = [(r.severity.value, r.name) for r in results if not r.passed]
    return [n for s, n in wrong if s == "fatal"], [n for s, n in wrong if s == "warn"]


def fast_dev_run(p: Value, parts: Parts) -> Found:
    """One batch of training and one of validation. What fails is an exception."""
    import lightning
    from torch.utils.data import DataLoader

    inputs = p("inputs") if isinstance(p("inputs"), tuple) else (p("inputs"),)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = p("model")

        def training_step(self, batch: Any, _: int) -> Any:
            out = self.model(**inputs[0]) if isinstance(inputs[0], dict) else self.model(*inputs)
            return p("loss")(out) if p("targets") is None else p("loss")(out, p("targets"))

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return p("optimizer")

    lightning.Trainer(fast_dev_run=True, accelerator="cpu").fit(Module(), DataLoader([0]), DataLoader([0]))
    return [], []


def in_fork(work: Callable[[], Any], said: Path) -> tuple[Any, float]:
    """(the result of `work` in a fork of this process, None if it raised; CPU seconds). Its output is kept in `said`."""
    result = said.with_suffix(".json")
    result.unlink(missing_ok=True)
    if not (pid := os.fork()):
        output = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            result.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    usage = os.wait4(pid, 0)[2]
    return json.loads(result.read_text()) if result.exists() else None, usage.ru_utime + usage.ru_stime


def three_and_audit(script: Path, parts: Parts) -> dict[str, dict[str, Any]]:
    """What torchtest2, preflight-ml and fast_dev_run find before the first step, and torch-audit in the steps that follow: `autopatch` with
    static and initial checks and each step audited. It fails at ERROR, the documented level."""
    from torch_audit import autopatch

    os.chdir(script.parent)
    begun, results, auditors, steps = time.process_time(), {}, [], []
    needs = {
        "torchtest2": (torchtest2, ""),
        "preflight-ml": (preflight_ml, "train"),
        "lightning": (fast_dev_run, "loss"),
    }

    def at_step(names: dict[str, Any]) -> None:
        def value(field: str) -> Any:
            return eval(getattr(parts, field), names)

        if not auditors:
            ready = time.process_time() - begun
            for tool, (check, need) in needs.items():
                if need and getattr(parts, need) == "None":
                    continue
                found, seconds = in_fork(partial(check, value, parts), Path(f"{tool}.txt"))
                results[tool] = {"found": found or [["crash"], []], "seconds": ready + seconds}
            auditors.append(autopatch(value("model"), optimizer=value("optimizer"), every_n_steps=1))
        steps.append(1)
        if len(steps) > AUDITED_STEPS:
            raise Enough

    run_script(script, parts.when, at_step)
    named = [
        (f.severity.value, f"{f.rule_id} {f.module_path or f.entity or ''}") for f in auditors[0].finish().findings
    ]
    levels = [[f for s, f in named if s in level] for level in (("ERROR", "FATAL"), ("WARN",))]
    results["torch-audit"] = {"found": levels, "seconds": time.process_time() - begun}
    return results


def shortened(text: str, seed: int) -> str:
    """The script with a seed, ended after TRACED_STEPS passes of its loop of training."""
    text = re.sub(r"(?m)^SEED = 0$", f"SEED = {seed}", text).replace("int, default=0)", f"int, default={seed})")
    lines = text.splitlines()
    nodes = ast.walk(ast.parse(text))
    loops = [n for n in nodes if isinstance(n, ast.For | ast.While) and ".backward(" in ast.unparse(n)]
    loop = min(loops, key=lambda n: (n.end_lineno or 0) - n.lineno)
    space = " " * loop.body[0].col_offset
    end = ["steps_done.append(1)", f"if len(steps_done) >= {TRACED_STEPS}:", "    raise SystemExit(0)"]
    lines[loop.end_lineno : loop.end_lineno] = [space + line for line in end]
    lines[1:1] = ["", "steps_done = []"]
    return "\n".join(lines)


def traincheck(script: Path, id: str, parts: Parts) -> dict[str, Any]:
    """Collect, infer and check with the defaults. Failures: violated invariants; warnings: of the relations that its tutorial ignores."""
    home, reference = script.parent, script.parent.parent / f"{script.stem}.reference"
    invariants, found = reference / "invariants.json", home / "found"

    def tool(name: str, *options: str | Path) -> None:
        subprocess.run([f"traincheck-{name}", *map(str, options)], check=True, timeout=900)

    def collect(text: str, folder: Path, *options: str | Path) -> None:
        shutil.rmtree(folder / "trace", ignore_errors=True)
        (folder / "run").mkdir(parents=True, exist_ok=True)
        (short := folder / "run" / script.name).write_text(text)
        where = ("--models-to-track", parts.model, "--output-dir", folder / "trace")
        tool("collect", "--pyscript", short, *where, *options)

    begun = os.times()
    if not invariants.exists():
        healthy = next((ROOT / "tests/guard/scripts").glob(f"*th/{script.name}"))
        collect(shortened(healthy.read_text(), 0), reference)
        tool("infer", "-f", reference / "trace", "-o", invariants)
    learnt = os.times()
    collect(shortened(script.read_text(), 0 if "--" in id else 1), home, "--invariants", invariants)
    tool("check", "-f", home / "trace", "-i", invariants, "-o", found, "--no-html-report")
    violated = json.loads((found / "trace" / "violations_summary.json").read_text())["violations"]
    ignored = ("FunctionCoverRelation", "FunctionLeadRelation")
    names = [[v["display_name"] for v in violated if (v["relation_type"] in ignored) == x] for x in (False, True)]
    cpu = [t.children_user + t.children_system for t in (begun, learnt, os.times())]
    return {"traincheck": {"found": names, "seconds": cpu[2] - cpu[1], "learning": cpu[1] - cpu[0]}}


def table(out: Path) -> None:
    """Print for each tool: bugs stopped and alarms, by failures alone and with warnings, and the median of CPU seconds."""
    results = [json.loads(p.read_text()) for p in sorted(out.glob("*/*.found.json"))]
    for tool in sorted({tool for r in results for tool in r["tools"]}):
        ran = {r["id"]: (r["kind"], r["tools"][tool]) for r in results if tool in r["tools"]}
        print(
            f"\n{tool}: {len(ran)} cases, CPU seconds (median) {statistics.median(r['seconds'] for _, r in ran.values()):.1f}"
        )
        for title, levels in (("failures", 1), ("failures and warnings", 2)):
            said = {id: set().union(*r["found"][:levels]) for id, (_, r) in ran.items()}
            new = {
                id: said[id] - said[id.partition("--")[0]] if kind == "bugs" else said[id]
                for id, (kind, _) in ran.items()
            }
            for kind in ("bugs", "scripts", "healthy"):
                some = [id for id in ran if ran[id][0] == kind]
                print(f"  {title}: {sum(bool(new[id]) for id in some)} of {len(some)} {kind}")
                print(end="".join(f"    {id}: {'; '.join(sorted(new[id]))[:150]}\n" for id in some if new[id]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "traincheck", "table"])
    parser.add_argument("scripts", nargs="*", help="names of scripts (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    args = parser.parse_args()
    if args.what == "table":
        return table(args.out)
    modules = ("lightning", "preflight.runner", "sklearn.datasets", "torch_audit", "torchtest2", "torchvision")
    for module in modules if args.what == "run" else ():
        importlib.import_module(module)  # once, before the forks
    for kind, id, text in (c for name in SETS for c in cases(name, "both", "all")):
        folder = (args.out / id).resolve()
        script = folder / f"{id.partition('--')[0]}.py"
        said = folder / f"{args.what}.found.json"
        if (args.scripts and script.stem not in args.scripts) or said.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
        parts = PARTS[script.stem]._replace(**CHANGED.get(id, {}))
        work = partial(three_and_audit, script, parts) if args.what == "run" else partial(traincheck, script, id, parts)
        results, seconds = in_fork(work, folder / f"{args.what}.txt")
        results = results or {args.what: {"found": [["crash"], []], "seconds": seconds}}
        said.write_text(json.dumps({"kind": kind, "id": id, "tools": results}))
        print(kind, id, f"{seconds:.0f} s", results, sep="\t", flush=True)


if __name__ == "__main__":
    main()
