"""Gate of recipes whose settings say how many held-out rows are read: the splits are not exchanged."""

from typing import Any

from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext


def held_out(source: Any) -> Gate:
    """Return the gate. `source`: settings with `held_out` (number of validation rows; 0: all), `path` and `val`."""
    most = source.held_out
    by_us = source.path == "docstrings" or source.val.replace(".", "", 1).isdigit()  # a share: the smaller part

    @gate(
        "splits", rows="C6", title="validation and test are as large as the settings say", reads="data", explains=True
    )
    def check(context: GateContext) -> Finding:
        """Checks the sizes of the splits: exchanged splits have no row in common, so `leakage` does not notice."""
        data = context.look()[1].data
        sizes = {name: len(one) for name, one in data.items()}
        held, train = {k: n for k, n in sizes.items() if k in ("val", "test")}, sizes.get("train", 0)
        large = [f"{name} has {n:,} samples" for name, n in held.items() if most and n > most]
        if by_us and not large:
            large = [f"{name} has {n:,} samples, train {train:,}" for name, n in held.items() if n > train]
        exchanged = large and (train <= most or train < max(held.values()))
        return Finding(
            not large, "; ".join(large) or ", ".join(f"{n:,} {name}" for name, n in sizes.items()),
            (f"at most {most:,} held-out samples in a split (--data.held-out)" if most else "any size (--data.held-out 0)")
            + ", and fewer than in training" * by_us,
            (f"training and held-out rows are exchanged: train has {train:,} samples\n" if exchanged else "")
            + "splits are unpacked in another order than they are returned (unpacking, zip, sorting by name)\n"
            "held-out rows are not limited to --data.held-out, so an evaluation takes longer than intended",
            evidence={"sizes": sizes, "most": most},
        )  # fmt: skip

    return check
