"""`trainworthy data vlm/instruct` describes lines and pictures; it trains none of the recipe's own models for that."""

import csv
import json
from pathlib import Path

from PIL import Image

from tests.helpers.commands import holds


def test_a_description_of_the_data_trains_no_model(tmp_path: Path, launch):
    """With an empty cache: the first user of the recipe waited two minutes for an encoder that no line of the output needs."""
    for split, first in (("train", 0), ("val", 8)):
        rows = []
        for i in range(first, first + 8):
            Image.new("RGB", (64, 64), (30 * i, 9 * i, 100)).save(tmp_path / f"{i}.png")
            rows.append({"image": f"{i}.png", "question": "what color", "answer": "red" if i % 2 else "blue"})
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = launch("data", "vlm/instruct", "--data.path", ".", code=0, TRAINWORTHY_CACHE=str(tmp_path / "cache"))
    holds(
        done.stdout,
        "`cells`, which the first check or run trains once",
        "`words`, which the first check or run trains once",
    )
    assert {p.name.rpartition("-")[0] for p in (tmp_path / "cache" / "built").iterdir() if p.is_dir()} == {
        "vlm-encoder-untrained",
        "vlm-words-untrained",
    }


def test_a_table_of_questions_is_read(tmp_path: Path, launch):
    for split, first in (("train", 0), ("val", 8)):
        rows = []
        for i in range(first, first + 8):
            Image.new("RGB", (64, 64), (30 * i, 9 * i, 100)).save(tmp_path / f"{i}.png")
            rows.append((f"{i}.png", "what color,\nplease", "red" if i % 2 else "blue"))
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("image", "question", "answer"), *rows])
    done = launch("data", "vlm/instruct", "--data.path", ".", code=0)
    holds(done.stdout, "  read                         8     8")
    with (tmp_path / "train.csv").open("a") as file:
        file.write("0.png,what,red,blue\n1.png,,red\n")
    done = launch("data", "vlm/instruct", "--data.path", ".", code=2)
    holds(done.stderr, "2 of 10 rows", "no question")
