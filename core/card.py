"""card.md: what this model is, which weights these are, against which baseline, over how many seeds."""

import json
from pathlib import Path


def write_card(folder: Path) -> Path:
    """Write card.md from the files of a finished run folder."""
    summary, args, gates = (json.loads((folder / f"{n}.json").read_text()) for n in ("summary", "args", "gates"))
    name, reported = summary["metric"], summary["reported"]
    lines = [
        f"# {summary['recipe']}: {summary['question']}",
        "",
        f"**{name} {reported[name]:.4f}** on held-out data: the {reported['weights']} weights, step {reported['step']:,}, "
        f"seed {args['settings']['run']['seed']}.",
        "",
        "This is one seed: differences between single seeds are not results."
        + (" The weights were chosen on the same validation set that gives the number, so it flatters."
           if reported["weights"] == "best" else " The weights were not chosen on the validation set."),
        "",
        "| | " + name + " |",
        "|---|---|",
        f"| final weights, step {summary['final']['step']:,} | {summary['final']['val/' + name]:.4f} |",
        *(f"| {'best' if i == 0 else f'{i + 1}. best'} of the evaluations, step {b['step']:,} | {b[name]:.4f} |"
          for i, b in enumerate(summary["n_best"])),
        *(f"| {k} | {v[name]:.4f} |" for k, v in summary["baselines"].items() if name in v),
        f"| chance | {summary['floor']:.4f} |",
        "",
        f"Best known: {summary['best_known'] or 'not stated'}.",
        "",
        f"{summary['parameters']:,} parameters, {summary['trained_parameters']:,} trained "
        f"({summary['parameters_per_sample']} per training sample), {summary['steps']:,} "
        + (f"of {summary['planned_steps']:,} steps (stopped early), " if summary["steps"] < summary["planned_steps"] else "steps, ")
        + f"{summary['train_seconds']:.0f} s of training, {len(summary['skipped_steps'])} non-finite steps skipped.",
        "",
        "## Gates",
        "",
    ]  # fmt: skip
    if not gates["enabled"]:
        lines.append("**Switched off: nothing about this run was proved.**")
    for v in gates["gates"]:
        lines.append(f"- {v['verdict']}: {v['id']} ({v['rows']}): {v['measured'] or v['reason']}"
                     + (f"; waived: {v['reason']}" if v["verdict"] == "waived" else ""))  # fmt: skip
    path = folder / "card.md"
    path.write_text("\n".join(lines) + "\n")
    return path
