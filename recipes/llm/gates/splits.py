"""Gate of recipes whose settings say how many held-out rows are read: the splits are not exchanged."""

from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof


def held_out(most: int) -> Gate:
    """Return the gate. `most`: number of validation rows in the settings; 0: all."""

    @gate(
        "splits", rows="C6", title="validation and test are as large as the settings say", reads="data", explains=True
    )
    def prove(proof: Proof) -> Finding:
        """Checks the sizes of the splits: exchanged splits have no row in common, so `leakage` does not notice."""
        data = proof.look()[1].data
        sizes = {name: len(one) for name, one in data.items()}
        large = [
            f"{name} has {n:,} samples" for name, n in sizes.items() if name in ("val", "test") and most and n > most
        ]
        exchanged = large and sizes.get("train", most + 1) <= most
        return Finding(
            not large, "; ".join(large) or ", ".join(f"{n:,} {name}" for name, n in sizes.items()),
            f"at most {most:,} held-out samples in a split (--data.held-out)" if most else "any size: --data.held-out 0",
            (f"training and held-out rows are exchanged: train has {sizes.get('train', 0):,} samples\n" if exchanged else "")
            + "splits are taken in another order than they are returned in (unpacked, zipped, sorted by name)\n"
            "held-out rows are not cut to --data.held-out: an evaluation takes longer than the settings say",
            evidence={"sizes": sizes, "most": most},
        )  # fmt: skip

    return prove
