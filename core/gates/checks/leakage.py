"""The gate `leakage`: no validation sample, and no part of one, is in the training set."""

from trainworthy.core.base.verdict import Finding
from trainworthy.core.data import alike, parts, plain_pictures, texts
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.checks.repeats import alike_naturally, repeat_naturally, repeated_before
from trainworthy.core.gates.gate import GateContext, fetch, train_set
from trainworthy.core.recipe.stage import Stage

TILES = "tiles of one picture that overlap were split tile by tile: put all tiles of a picture, or of a region, into one split"


def _compared(compared: dict[str, list[int]], exact: int, near: int) -> str:
    """Return how many copies were found among how many compared samples."""
    n_val, n_train = compared["of"]

    def among(kind: str) -> str:
        val, train = compared[kind]
        return f"{val:,} of {n_val:,} validation samples against {train:,} of {n_train:,} training samples"

    if compared["exact"] == compared["of"]:
        measured = f"{exact} exact"
    else:
        chance = compared["exact"][0] / n_val * compared["exact"][1] / n_train
        measured = f"{exact} exact ({among('exact')}: a copy is found with probability {chance:.2g}; `check --deep` compares all)"
    partial = any(compared["near"]) and compared["near"] != compared["of"]
    if not all(compared["near"]):
        return f"{measured} of {n_val:,} validation samples; near duplicates: these inputs cannot be compared"
    return measured + f", {near} near duplicates of " + (among("near") if partial else f"{n_val:,} validation samples")


@gate("leakage", rows="C6", title="no validation sample is also in the training set", reads="data", lasting=False)
def leakage(context: GateContext) -> Finding:
    """Finds exact and near duplicates by content or by text (core/data/texts.py), and group ids in two splits. Tolerates a few near
    ones, since two people do write the same digit, exact ones of short texts that repeat in training as often, and near ones of texts
    that are as near to each other in training. Texts with a group field are compared by group alone. Finds tiles that overlap
    (core/data/parts.py), too."""
    run, stage = context.look()
    train_set(stage)
    found = context.data_report["overlap"]
    n = found["compared"]["near"][0] or len(context.scans["val"].indices)
    shared = {k: v for k, v in found["groups"].items() if v}
    text = next((t for t in found.get("texts", {}).values() if t["whole_input"]), None)
    allowed = max(1, n // 200)
    plain = plain_pictures.Alike(**context.data_report.get("plain_pictures", {}))
    near = max(0, (text["near"] or 0) - found["exact"]) if text else found.get("near_only", 0)
    measured = _compared(found["compared"], found["exact"], near)
    if "largest_similarity" in found:
        measured += f" (closest pair {found['largest_similarity']:.3f})"
        measured += f"; {found['smooth']} are similar only in their smooth parts: not copies" * bool(found["smooth"])
    if text:
        measured += (
            f" (the closest has {text['closest']:.0%} of its rare chunks of {texts.MIN}+ words in one training text)"
        )
    by_key = text and found["groups"]  # the group field defines what one source is
    measured += "; shared groups " * bool(shared) + ", ".join(f"{k}: {' '.join(v[:5])}" for k, v in shared.items())
    series, cause = found.get("series"), ""
    if series and series["torn"]:
        measured += f"; names form series, and {series['nearest']:,} of {series['of']:,} validation samples are nearest to one of their own series"
        cause = "{} and {} are of one series: put each series as a whole into one split (a folder val/)".format(
            *series["pairs"][0]
        )
    repeat, remark = repeat_naturally(found)
    natural, why = alike_naturally(text or {}, near, n)
    measured += remark + why + plain.remark
    pairs = found["exact_pairs"] or [p[:2] for p in (text or found)["near_pairs"]]
    measured += _first_pair(stage, pairs)
    tested, remarks = _in_test(context.data_report["overlaps"])
    measured += "".join(f"; {remark}" for remark in (*tested, *remarks))
    if tested and not (cause or shared or found["exact"] > plain.blank or near > allowed):
        cause = "the test set shares samples with another split: draw it before the others, or remove what it shares"
    if part := context.data_report.get("shared_parts"):
        measured += f"; {parts.Shared(**part)}"
        cause = cause or TILES
    limit = f"{texts.KNOWN:.0%} of its rare chunks" if text else f"similarity {found.get('limit', alike.NEAR)}"
    batch = fetch(stage.data["val"], [v for v, _ in pairs], None, run.device) if pairs else None
    return Finding(
        (found["exact"] == plain.blank or repeat or plain.natural) and (near <= allowed or by_key or natural or plain.natural)
        and not (shared or tested or cause), measured,
        f"0 exact duplicates, at most {allowed} near ones ({limit}), no group, series or part of a picture in two splits",
        named.order_causes(
            (found["exact"] < near <= n // 10, "a few samples were saved again: keep one of each pair, or put both into one split"),
            (near > found["exact"], "data were augmented or duplicated before they were split"),
            (found["exact"] >= near, "the training loader reads the unsplit data"),
            (False, "frames, tiles or sentences of one source were split sample by sample: split by group"),
            (False, "the pairs in the report are similar, but not copies: --gates.waive leakage --gates.because 'REASON'")),
        evidence=found, batch=batch, cause=cause or repeated_before(found),
    )  # fmt: skip


def _first_pair(stage: Stage, pairs: list) -> str:
    """Return the names of the first pair of a validation and a training sample, where the data set names them."""
    data = (stage.data["val"], stage.data["train"])
    named_by = [[one.source_name(i) for one, i in zip(data, pair, strict=True)] for pair in pairs[:1]]
    return "".join("; the first pair: {}, in training {}".format(*names) for names in named_by if None not in names)


def _in_test(overlaps: dict[str, dict]) -> tuple[list[str], list[str]]:
    """Return (faults: exact copies of test samples in another split, groups that training shares; remarks: groups that
    validation shares, which no weight was trained on)."""
    wrong, remarks = [], []
    for between, found in overlaps.items():
        if between.startswith("test in "):
            shared = [f"{k}: {' '.join(v[:5])}" for k, v in found["groups"].items() if v]
            wrong += [f"{found['exact']} exact duplicates of {between}"] if found["exact"] else []
            where = remarks if between == "test in val" else wrong
            where += [f"shared groups of {between}: {', '.join(shared)}"] if shared else []
    return wrong, remarks
