"""What is counted in the data, through the real command; texts that two splits share, the lists of them, and the gate."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from trainworthy.core.base.console import Console
from trainworthy.core.base.verdict import Skip
from trainworthy.core.commands.data import show
from trainworthy.core.data import contents, inventory, texts
from trainworthy.core.gates.checks.fabricated import fabricated
from trainworthy.core.gates.checks.repeats import alike_naturally

from tests.conftest import ROOT, patched
from tests.core.planted_fabricated import made_up
from tests.helpers.commands import assert_refused, holds
from tests.vision.planted_classify import STAGES
from trainworthy import core

PROSE = (ROOT / "tests" / "fixtures" / "prose.py").read_text()
VAL = "val_data = Paragraphs(val_rows)\n"
EDITED = """edited = [(" ".join("something" if i % 9 == 8 else w for i, w in enumerate(words(t))), y) for t, y in train_rows[::4]]
    val_data = Paragraphs(edited)
"""
WINDOWS = """found = []
    for label, chapter in enumerate(CHAPTERS):
        all_words = words(topics[chapter])
        found += [(" ".join(all_words[i : i + 40]), label) for i in range(0, len(all_words) - 40, 20)]
    return found
"""
LEAKS = {
    "edited copies": (VAL, EDITED),  # one word in nine replaced
    "overlapping windows": ("return list(found.values())\n", WINDOWS),  # cut first, split afterwards
    "other punctuation": (VAL, 'val_data = Paragraphs([(t.upper() + " !", y) for t, y in train_rows[::4]])\n'),
}


@pytest.fixture
def prose(tmp_path: Path):
    """`prose((old, new), ...)`: a patched copy of the recipe on texts."""

    def write(*hunks: tuple[str, str]) -> str:
        (tmp_path / "prose.py").write_text(patched(PROSE, *hunks))
        return "prose.py"

    return write


# ------------------------------------------------------------------------------------------------------------ the command
def test_data_of_pictures_is_printed_and_kept(launch):
    done = launch("data", "vision/classify", code=0)
    holds(done.stdout, "4,000", "1x28x28", "0 to 1", "400 · 400 · 400", "█" * 30, "closest 0.9765", "--only data,leakage")  # fmt: skip
    assert max(map(len, done.stdout.splitlines())) <= 120, "a column for each of three splits"
    found = json.loads((done.folder() / "data.json").read_text())
    assert found["splits"]["train"]["fields"]["label"]["classes"] == {str(i): 400 for i in range(10)}
    assert found["splits"]["train"]["fields"]["image"]["unique"] == 4000
    assert found["splits"]["val"]["repeats"] == {"exact": 0, "near": 0, "compared": 1000, "near_pairs": []}
    page = (done.folder() / "report.html").read_text()
    assert "The data, described: no gate was run" in page
    assert "the gates did not finish" not in page


def test_data_of_a_recipe_that_makes_its_own_samples(launch):
    """The gates `data` and `leakage` skip there."""
    done = launch("data", "rl/ppo", code=0)
    assert "next   trainworthy check rl/ppo\n" in done.stdout, done.shown


def test_what_was_made_up_is_counted(launch, fork):
    """A declared share is printed and kept by split and class; one that is not a share is refused."""
    fork((STAGES, made_up("image[:, :label] = 0", "label / 28")))
    done = launch("data", "mine.py")
    assert "fabricated: min · mean · max  0.0% · 16.1% · 32.1%  0.0% · 16.1% · 32.1%" in done.stdout, done.shown
    found = json.loads((done.folder() / "data.json").read_text())["splits"]["val"]["fields"]["image"]["fabricated"]
    assert found["classes"] == pytest.approx({str(i): i / 28 for i in range(10)})
    fork((STAGES, made_up("image[:, :label] = 0", "label")))
    assert_refused(launch("data", "mine.py", "--sample", "300"), "the fabricated share of 'image' is not a share")


def test_json_and_sample(launch):
    done = launch("data", "vision/classify", "--sample", "300", "--json", "--run.seed", "1")
    found = json.loads(done.stdout)
    assert (found["splits"]["train"]["samples"], found["splits"]["train"]["read"]) == (4000, 300)
    assert found == json.loads((done.folder() / "data.json").read_text())


def test_copies_inside_a_split_and_uneven_classes(launch, fork):
    fork(
        (
            "val_data = Images(images[held_out], labels[held_out], classes)\n",
            "rows = torch.cat([held_out[100:], held_out[-30:]])\n    val_data = Images(images[rows], labels[rows], classes)\n",
        )
    )
    done = launch("data", "mine.py", "--json")
    val = json.loads(done.stdout)["splits"]["val"]
    assert (val["repeats"]["exact"], val["repeats"]["near"]) == (30, 60)  # each near copy has one, too
    assert val["fields"]["label"]["per_class"]["min"] < 100


def test_texts_their_lists_and_a_recipe_that_honours_them(launch, prose):
    recipe = prose(LEAKS["edited copies"])
    done = launch("data", recipe, code=0)
    folder = done.folder()
    found = json.loads((folder / "data.json").read_text())
    lengths = found["splits"]["train"]["fields"]["text"]["lengths"]
    assert list(lengths) == ["characters", "words"]
    assert lengths["words"]["min"] >= 8
    text = found["overlap"]["texts"]["text"]
    assert text["near"] > 0.8 * text["texts"]
    lists = texts.load_exclusions(folder)
    assert found["exclusions"]["chunks"] == sum(map(len, lists.chunks.values())) > 30
    assert f"they take {found['exclusions']['training_samples']} of 151" in done.stdout
    launch("check", recipe, "--only", "leakage", "--lists", str(folder), code=0)


@pytest.mark.parametrize("leak", LEAKS)
def test_known_texts_are_a_leak(leak: str, launch, prose):
    done = launch("check", prose(LEAKS[leak]), "--only", "leakage", code=3)
    (verdict,) = done.verdicts()
    assert "near duplicates" in verdict["measured"]
    assert "rare chunks" in verdict["needed"]
    assert (done.folder() / "gates" / "leakage" / "repro.py").exists()


ALIKE = """rows = list(found.values())
    again = [(" ".join("something" if i % 9 == 8 else w for i, w in enumerate(words(t))), y) for t, y in rows[::30]]
    return [(rows + again)[i] for i in torch.randperm(len(rows) + len(again), generator=torch.Generator().manual_seed(0))]
"""  # pages that are alike, and a random split of all
FEW = """again = [(" ".join("something" if i % 9 == 8 else w for i, w in enumerate(words(t))), y) for t, y in train_rows[::30]]
    val_data = Paragraphs(val_rows + again)
"""  # as many, but training texts are not alike


def test_texts_that_are_alike_everywhere_are_no_leak(launch, prose):
    done = launch("check", prose(("return list(found.values())\n", ALIKE)), "--only", "leakage", code=0)
    assert "training texts are similar to each other, too" in done.verdicts()[0]["measured"]
    done = launch("check", prose((VAL, FEW)), "--only", "leakage", code=3)
    assert "near ones are expected of a random split" in done.verdicts()[0]["measured"]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_split_of_a_manual_is_no_leak(seed: int):
    """Paragraphs that occur once, of a manual that says things twice."""
    rows = sorted({texts.normal(t): t for page in topics.values() for t in page.split("\n\n") if len(t) > 200}.values())
    random.Random(seed).shuffle(rows)
    found = texts.shared(rows[200:], rows[:200])
    near = len(found.near) - len(found.exact)
    assert near <= 1 or alike_naturally(found.report(), near, 200)[0], (near, found.expected)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_edited_copies_of_a_manual_are_a_leak(share: float):
    rows = sorted({texts.normal(t): t for page in topics.values() for t in page.split("\n\n") if len(t) > 200}.values())
    random.Random(0).shuffle(rows)
    copies = [
        " ".join("it" if i % 9 == 8 else w for i, w in enumerate(t.split())) for t in rows[200:][: int(200 * share)]
    ]
    found = texts.shared(rows[200:], rows[: 200 - len(copies)] + copies)
    assert not alike_naturally(found.report(), len(found.near) - len(found.exact), 200)[0], found.expected


def test_the_recipe_on_texts_is_healthy(launch, prose):
    launch("check", prose(), code=0)


def test_a_group_field_decides_what_is_one_source(launch, prose):
    grouped = ('"text": core.Field("input"), ', '"text": core.Field("input"), "page": core.Field("group"), ')
    apart = ('return {"text": text, ', 'return {"text": text, "page": f"{len(self.rows)}-{index}", ')
    launch("check", prose(LEAKS["edited copies"], grouped, apart), "--only", "leakage", code=0)
    shared = ('return {"text": text, ', 'return {"text": text, "page": f"{label}", ')
    done = launch("check", prose(grouped, shared), "--only", "leakage")
    assert (done.returncode, "shared groups page" in done.stdout) == (3, True), done.shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("data",), ("data what?",)),
        (("data", "vision/clasify"), ("unknown recipe", "vision/classify")),
        (("data", "vision/classify", "--sample", "none"), ("--sample needs a number", "none")),
        (("data", "vision/classify", "--sampel", "5"), ("unknown setting --sampel",)),
    ],
)
def test_bad_usage(argv: tuple[str, ...], words: tuple[str, ...], launch):
    done = launch(*argv, code=2)
    assert not [w for w in words if w not in done.stderr], done.shown


def test_a_sample_that_cannot_be_read_is_named(launch, fork):
    line = "        image = self.images[index].float() / 255\n"
    fork((line, '        if index == 777:\n            raise OSError("truncated file 777.png")\n' + line))
    assert_refused(launch("data", "mine.py"), "sample 777 of train cannot be read", "truncated file 777.png")


# ------------------------------------------------------------------------------------------------------------- the pieces
@pytest.mark.parametrize("seed", range(5))
def test_sentences_made_of_known_words_are_no_copies(seed: int):
    draw = random.Random(seed)
    slots = ("bin lay place set", "blue green red white", "at by in with", "a b c d e f g h i j k l m n o p q r s t u v x y z",
             "zero one two three four five six seven eight nine", "again now please soon")  # fmt: skip
    rows = list(dict.fromkeys(" ".join(draw.choice(s.split()) for s in slots) for _ in range(1250)))
    assert not texts.shared(rows[:1000], rows[1000:]).near
    scene = "the {} {} {} stands {} the {} {} {} now"
    size, colour, thing = (
        ["small", "large", "old", "new"],
        ["red", "blue", "green", "white", "black"],
        ["cube", "ball", "cone", "ring", "box"],
    )
    where = ("left of", "behind", "in front of")
    rows = list(dict.fromkeys(scene.format(*map(draw.choice, (size, colour, thing, where, size, colour, thing)))
                              for _ in range(3000)))  # fmt: skip
    assert not texts.shared(rows[:2000], rows[2000:]).near


def test_chunks_are_longest_runs_in_one_text_and_common_ones_do_not_count():
    rule = "please answer the following question in one word"
    train = [f"{rule} what is the name of thing {i}" for i in range(9)] + [
        "the quick brown fox jumps over a lazy dog today"
    ]
    found = texts.shared(train, [f"{rule} who saw The quick, brown FOX jumps over it", "nothing that is known here"])
    assert found.chunks == ["the quick brown fox jumps over"]
    assert found.common == 5  # of the rule
    assert found.near == []


def test_an_answer_is_a_copy_only_if_it_identifies_its_sample():
    train = ["yes", "no"] * 50 + ["a text of the class weather"] * 9 + ["the one answer that nobody else would give"]
    val = ["Yes.", "a text of the class weather", "the one answer that nobody else would give"]
    found = texts.shared(train, val, whole=False)
    assert (found.texts, found.usual, len(found.near)) == (["the one answer that nobody else would give"], 2, 1)
    assert len(texts.shared(train, val).exact) == 3  # as inputs they are copies


def test_exclusions(tmp_path: Path):
    assert not texts.load_exclusions(tmp_path)("anything at all is let through")
    with pytest.raises(core.UserError, match="no folder"):
        texts.load_exclusions(tmp_path / "elsewhere")
    (tmp_path / "exclude_texts.json").write_text('["Yes, it is."]')
    (tmp_path / "exclude_chunks_min4.json").write_text('["brown fox jumps over the dog"]')
    skip = core.load_exclusions(tmp_path)
    assert skip("yes it is")
    assert not skip("yes it is not")
    assert skip("A quick Brown fox jumps, over the dog!")
    assert not skip("a brown fox jumps over a dog")
    for bad in ("{}", "[1]", "not json"):
        (tmp_path / "exclude_texts.json").write_text(bad)
        with pytest.raises(core.UserError, match=r"exclude_texts\.json"):
            texts.load_exclusions(tmp_path)


class Rows(core.Data):
    """Given rows of numbers."""

    def __init__(self, rows: torch.Tensor):
        self.rows, self.fields = rows, {"x": core.Field("input"), "y": core.Field("target")}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return {"x": self.rows[index], "y": self.rows[index].sum()}


class Skies(Rows):
    """Windows of sky (3, side, side): each gets brighter from the top to the bottom, by an amount of its own, with a camera's noise."""

    def __init__(self, n: int, seed: int, side: int = 64):
        g = torch.Generator().manual_seed(seed)
        down = torch.linspace(0, 1, side)[:, None]
        base, rise = 0.3 + 0.3 * torch.rand(n, 3, 1, 1, generator=g), 0.05 + 0.2 * torch.rand(n, 1, 1, 1, generator=g)
        bend = 0.3 * torch.rand(n, 1, 1, 1, generator=g)
        tint = torch.tensor([1, 0.9, 0.8])[:, None, None]
        noise = 0.01 * torch.randn(n, 3, side, side, generator=g)
        super().__init__((base + rise * tint * (down + bend * down**2) + noise).clamp(0, 1))


def test_pictures_alike_in_their_smooth_parts_are_no_copies():
    """Every window of sky has a cosine above the limit with another one. A copy that was made brighter is still found."""
    train, val = Skies(200, 0), Skies(60, 1)
    scans = [inventory.scan(name, one) for name, one in (("train", train), ("val", val))]
    found = inventory.overlap(*scans)
    assert found["largest_similarity"] > found["limit"]
    assert (found["near"], found["smooth"] > 20) == (0, True), found
    assert inventory.repeats(scans[0])["near"] == 0
    val.rows[:10] = 0.8 * train.rows[30:40] + 0.05
    found = inventory.overlap(scans[0], inventory.scan("val", val))
    assert found["near_pairs"] == [(i, 30 + i) for i in range(10)]


def test_grey_pictures_in_three_channels_are_as_small_as_in_one():
    """Ones of different writers at 16x16 pixels reach 0.992. In three equal channels they were compared by the limit of larger pictures."""
    pixels = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    grey, colour = (inventory.scan("train", Rows(x)) for x in (pixels, pixels.expand(-1, 3, -1, -1)))
    assert inventory.limit(grey) == inventory.limit(colour) == 0.993
    assert inventory.limit(inventory.scan("train", Rows(torch.rand(40, 3, 32, 32)))) == 0.985


@pytest.mark.parametrize(
    ("answers", "classes"), [([f"answer {i}" for i in range(16)], False), (["yes", "no"] * 8, True)]
)
def test_answers_that_are_all_different_are_no_classes(answers: list[str], classes: bool):
    """The gate `data` printed "per class 1-1" of 16 held-out answers."""

    class Answers(Rows):
        def get(self, index, generator):
            return {"x": self.rows[index], "y": answers[index]}

    found = inventory.scan("val", Answers(torch.randn(16, 64)))
    assert ("per_class" in found.fields["y"]) is classes


class Answers(Rows):
    """Texts of several lengths with answers that no list of classes declares."""

    def __init__(self, answers: list):
        super().__init__(torch.randn(len(answers), 64))
        self.answers = answers

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return {"x": "word " * (1 + index % 5) + str(index), "y": self.answers[index]}


def test_answers_that_repeat_in_one_split_only(capsys):
    """289 answers, 73 of them different, and 13 to 68 held-out ones, most of them different: `data` crashed (KeyError 'classes'), and the
    gate `fabricated` failed (KeyError 'invalid')."""
    splits = {"train": ["They are grey.", "Bob has 9."] * 40, "val": [f"Bob has {i}." for i in range(40)]}
    for order in (["train", "val"], ["val", "train"]):
        scans = {name: inventory.scan(name, Answers(splits[name])) for name in order}
        found = inventory.report(scans)
        for name, scan in scans.items():
            found["splits"][name]["repeats"] = inventory.repeats(scan)
        show(found, Console(), None)
        shown = capsys.readouterr().out
        assert "y · target · 2 classes" in shown, order
        assert "Bob has 9." in shown, order
        stage_of = SimpleNamespace(data=scans)
        context = SimpleNamespace(scans=scans, look=lambda stage_of=stage_of: (None, stage_of))
        with pytest.raises(Skip, match="no target is a class"):
            fabricated.check(context)


@pytest.mark.parametrize("answers", [["no", "yes"], [3, 2_000_000_000]])
def test_an_entry_that_gives_a_target_of_any_values_is_found(answers: list):
    """A pixel that gives the answer in text: the comparison could not read texts, and numbered every value up to the largest."""

    class Marked(Answers):
        def get(self, index, generator):
            row = self.rows[index].clone()
            row[7] = index % 2
            return {"x": row, "y": self.answers[index]}

    train, val = (inventory.scan(name, Marked(answers * 40)) for name in ("train", "val"))
    assert inventory.target_in_input(train, val) == (1.0, 7, 0.5)


@pytest.mark.parametrize("side", [8, 28, 64])
def test_different_pictures_that_were_enlarged_are_no_copies(side: int):
    """1,797 digits of 8x8 pixels: at 64x64, 76 of them have another one above 0.985. Copies with a changed pixel are found at each size."""
    from sklearn.datasets import load_digits

    pixels = torch.from_numpy(load_digits().images).float()[:, None] / 16
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    train, val = pixels[order[:1400]], pixels[order[1400:]]
    val = torch.cat([val, train[:20] * 0.9])
    val[-20:, :, 3, 3] += 0.1
    splits = [
        inventory.scan(n, Rows(F.interpolate(x, size=side, mode="bilinear")))
        for n, x in (("train", train), ("val", val))
    ]
    found = inventory.overlap(*splits)
    assert len(found["near_pairs"]) == 20, found
    assert [v for v, _ in found["near_pairs"]] == list(range(len(val) - 20, len(val)))


def test_pairs_are_named_by_sample_where_only_some_are_compared(monkeypatch):
    monkeypatch.setattr(inventory, "COMPARED", 25)
    rows = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    held = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    held[8] = rows[40] * 1.01
    train, val = inventory.scan("train", Rows(rows)), inventory.scan("val", Rows(held))
    assert train.kept == list(range(0, 100, 4))
    assert inventory.overlap(train, val)["near_pairs"] == [(8, 40)]


@pytest.mark.parametrize("computed", [True, False])
def test_what_a_net_computes_is_not_compared_with_another_process(computed: bool):
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))

    class Encoded(Rows):
        def __init__(self, rows: torch.Tensor, rounding: float):
            super().__init__(rows)
            self.rounding, self.fields["y"] = rounding, core.Field("target", computed=computed)

        def get(self, index: int, generator: torch.Generator | None) -> dict:
            return {"x": self.rows[index], "y": self.rows[index].sum() * (1 + self.rounding)}

    then, now = ({"val": inventory.scan("val", Encoded(rows, r))} for r in (0.0, 2.0**-20))
    found = contents.changes(inventory.identity(then), inventory.identity(now))
    assert bool(found) != computed, found


def test_a_note_of_several_splits_is_one_line():
    notes = {
        "train": {"left out": "2 rows", "rate": "8 kHz"},
        "val": {"left out": "1 row", "rate": "8 kHz"},
        "test": {},
    }
    assert inventory.merge_notes(notes) == [
        "train: left out: 2 rows",
        "train, val: rate: 8 kHz",
        "val: left out: 1 row",
    ]


def test_what_conversations_share_is_their_words_and_not_the_names_of_json():
    """`role user content` was printed as the longest chunk that two splits share."""
    talk = lambda *said: json.dumps({"messages": [{"role": "user", "content": text} for text in said]})  # noqa: E731
    assert texts.words(talk("Is it Red?", "No, 7")) == ["is", "it", "red", "no", "7"]
    parts = json.dumps([{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "image"}]}])
    assert texts.words(parts + "\nlast line") == ["a", "b", "last", "line"]
    assert texts.words('{"role": "admin", "names": 3}') == ["role", "admin", "names", "3"]  # a text about JSON
    assert texts.words('{"role": broken') == ["role", "broken"]
    train = [talk(f"the {i} colours of a tower by the sea are {i}") for i in range(9)]
    found = texts.shared(train, [talk("what are the colours of a tower by night")])
    assert not [chunk for chunk in found.chunks if "role" in chunk or "content" in chunk]
