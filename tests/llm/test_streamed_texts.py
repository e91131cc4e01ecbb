"""Texts that are read while they are trained on: no token lost, the same row wherever one begins to read, little in hand."""

import http.server
import json
import shutil
import threading
import urllib.request
from collections import Counter
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.validation_split import is_held_out
from trainworthy.recipes.llm.data import documents, streaming
from trainworthy.recipes.llm.data.packing import IGNORED, windows

from tests.helpers import language
from tests.helpers.commands import trainworthy

LANES, ROWS, CONTEXT = 4, 6, 32


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Few rows to a stretch, blocks of a few documents."""
    monkeypatch.setenv("TRAINWORTHY_CACHE", str(tmp_path / "cache"))
    for name, value in {"LANES": LANES, "ROWS": ROWS, "BLOCK": 900, "SAMPLE": 24000}.items():
        monkeypatch.setattr(streaming, name, value)


def written(folder: Path, n: int = 240) -> Path:
    """Documents of a few words to several rows, one object a line, in letters of one byte and of more."""
    draw = np.random.default_rng(0)
    letters = ["".join(draw.choice(list(["abcdefgh", "клмнопрс"][i % 2]), draw.integers(5, 180))) for i in range(n)]
    texts = [f"{i}: {letter}" for i, letter in enumerate(letters)]
    texts[7] = "".join(draw.choice(list("ijkl"), 1000))
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"n": i, "text": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts)))
    return path


def data(path: Path | str, net: Path, **more) -> streaming.Streamed:
    for cached in (streaming.blocks, streaming._lanes, documents._read):
        cached.cache_clear()
    source = documents.Source(path=str(path), tokenizer=str(net), context=CONTEXT, stride=16, streaming=True, **more)
    corpus = documents.read(source, streaming.sample)
    return streaming.Streamed(corpus, source, context=CONTEXT, tokenizer=corpus.tokenizer, sizes=corpus.sizes)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A token for every byte."""
    return language.write(tmp_path / "net")


def row(sample: dict) -> tuple:
    return tuple(sample["input_ids"].tolist()), tuple(sample["labels"].tolist()), tuple(sample["position_ids"].tolist())


def test_a_missing_shard_is_noted(small, net: Path, tmp_path: Path):
    path = written(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        (folder / f"train-{i:05}-of-00003.jsonl").write_text("".join(lines[i::3]))
    assert "missing" not in data(folder, net).notes
    (folder / "train-00001-of-00003.jsonl").unlink()
    assert data(folder, net).notes["missing"].endswith("count: train-00001-of-00003.jsonl")
    assert streaming.absent(["a/x-1-of-3.zst", "b/x-1-of-1", "y.jsonl"]) == ["x-0-of-3.zst", "x-2-of-3.zst"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_lane_is_its_documents_window_by_window(kind: str, small, net: Path, tmp_path: Path):
    """Stretch behind stretch, over the end of the lane and on: nothing is lost, nothing comes twice, nothing held out comes."""
    path = written(tmp_path)
    if kind == "parquet":
        import datasets

        path.with_suffix("").mkdir()
        table = datasets.load_dataset("json", data_files=str(path), split="train")
        table.to_parquet(path.with_suffix("") / "train-00000-of-00001.parquet", batch_size=17)
        path = path.with_suffix("")
    made = data(path, net)
    lanes, seen = made.lanes, Counter()
    assert lanes.n == LANES
    assert len(lanes.blocks) > 2 * LANES
    for lane in range(LANES):
        mine = [t for b in lanes.blocks[lane::LANES] for _, t in streaming.texts(b, "text")]
        seen.update(mine)
        due = (t[w.start : w.end].tolist() for t in (lanes.tokens(x) for x in 2 * mine if not is_held_out(x, 0.05))
               for w in windows([len(t)], CONTEXT, CONTEXT - 1))  # fmt: skip
        for number in range(9):
            piece = lanes.stretch(lane, number)
            got = [piece.documents[w.document][w.start : w.end].tolist() for w in piece.windows]
            assert got == list(islice(due, len(got)))
            assert len(piece) == ROWS
            assert sum(map(len, got)) > 0.7 * ROWS * CONTEXT
    assert seen == Counter(json.loads(line)["text"] for line in written(tmp_path).read_text().splitlines())


class Bucket(AbstractFileSystem):
    """Object storage for fsspec: files of an HTTP server that answers requests for ranges."""

    protocol, server = "bucket", ""
    cachable = False

    def info(self, path, **_):
        with urllib.request.urlopen(
            urllib.request.Request(f"{self.server}/{self._strip_protocol(path)}", method="HEAD")
        ) as answer:
            return {"name": self._strip_protocol(path), "size": int(answer.headers["Content-Length"]), "type": "file"}

    def ls(self, path, detail=True, **_):
        with urllib.request.urlopen(f"{self.server}/?list") as answer:
            names = [n for n in json.loads(answer.read()) if n.startswith(self._strip_protocol(path).rstrip("/"))]
        return [self.info(n) for n in names] if detail else names

    def _open(self, path, mode="rb", block_size=4096, **_):
        return Ranges(self, path, mode, block_size=block_size)


class Ranges(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        asked = urllib.request.Request(f"{self.fs.server}/{self.path}", headers={"Range": f"bytes={start}-{end - 1}"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 206
            return answer.read()


@pytest.fixture
def bucket(tmp_path: Path):
    """A local server of what is in tmp_path/store; {file: number of its ranges that were asked for}."""
    store, given = tmp_path / "store", Counter()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(200, b"", (store / self.path[1:]).stat().st_size)

        def do_GET(self):
            if self.path == "/?list":
                found = json.dumps([str(p.relative_to(store)) for p in store.rglob("*") if p.is_file()]).encode()
                return self.answer(200, found, len(found))
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part = (store / self.path[1:]).read_bytes()[first : last + 1]
            given[self.path] += 1
            self.answer(206, part, len(part))

        def answer(self, status, content, length):
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Bucket.server = f"http://127.0.0.1:{server.server_port}"
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    yield store, given
    server.shutdown()
    server.server_close()


def test_texts_of_an_object_storage_are_those_of_a_disk(bucket, small, net: Path, tmp_path: Path):
    """Two uneven files behind a pattern, read over HTTP by ranges: the same rows, shared out over three processes."""
    store, given = bucket
    (store / "texts").mkdir(parents=True)
    lines = written(tmp_path).read_text().splitlines(keepends=True)
    for name, part in (("a.jsonl", lines[:200]), ("b.jsonl", lines[200:])):
        (store / "texts" / name).write_text("".join(part))
    local = data(store / "texts", net)
    rows = [row(local.get(i, None)) for i in range(len(local))]
    remote = data("bucket://texts/*.jsonl", net)
    assert len(remote) == len(local)
    order = remote.order(0, "order", 0).tolist()
    mine = [order[rank::3] for rank in (0, 1, 2)]
    assert sorted(i for part in mine for i in part) == list(
        range(len(rows))
    )  # none lost, none twice, though 3 does not divide them
    assert [row(remote.get(i, None)) for part in mine for i in part] == [rows[i] for part in mine for i in part]
    assert given.keys() == {"/texts/a.jsonl", "/texts/b.jsonl"}
    with pytest.raises(UserError, match="cannot be read"):
        data("bucket://texts/*.parquet", net)


def test_a_row_is_the_same_wherever_reading_begins(small, net: Path, tmp_path: Path):
    """In order, backwards, in a process that finds the notes of another, and in one that finds none."""
    path = written(tmp_path)
    made = data(path, net)
    rows = [row(made.get(i, None)) for i in made.order(0, "order", 0).tolist()]
    assert len({r for r in rows if any(x != IGNORED for x in r[1])}) > 0.9 * len(rows)
    for notes in (True, False):
        if not notes:
            shutil.rmtree(made.lanes.folder)
        again = data(path, net)
        backwards = again.order(0, "order", 0).tolist()[::-1]
        assert [row(again.get(i, None)) for i in backwards] == rows[::-1]


def test_a_resumed_run_reads_on_from_where_it_was(small, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the notes: the stretches it needs, not all before them. And what is in hand stays little."""
    path, read = written(tmp_path), Counter()
    made = data(path, net)
    for i in range(len(made)):
        made.get(i, None)
    assert made.lanes.stretch.cache_info().currsize <= 3 * streaming.LANES
    again, plain = data(path, net), streaming.Lanes._stretch
    monkeypatch.setattr(streaming.Lanes, "_stretch",
                        lambda self, lane, number: read.update([number]) or plain(self, lane, number))  # fmt: skip
    again.lanes.stretch = lambda lane, number: streaming.Lanes._stretch(again.lanes, lane, number)
    again.get(len(again) - 1, None)
    assert read == {(len(again) - 1) // LANES // ROWS: 1}


def test_processes_read_documents_of_their_own(small, net: Path, tmp_path: Path):
    """Of two processes each takes every second sample of a step; of four, too. An epoch has each row once, in an
    order of its own."""
    made = data(written(tmp_path), net)
    orders = [made.order(3, "order", epoch).tolist() for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(len(made)))
    for world in (2, 4):
        lanes = [{i % LANES for i in orders[0][rank::world]} for rank in range(world)]
        assert sum(map(len, lanes)) == len(set().union(*lanes)) == LANES
    for place, i in enumerate(orders[0]):  # a window of stretches is left before the next begins
        assert i // LANES // ROWS == place // LANES // ROWS


def test_bad_documents_of_a_stream(small, net: Path, tmp_path: Path):
    """A few are left out; a block of them ends the run where it is met."""
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, b'{"text": ""}\n', b'{"text": "caf\xe9"}\n']))
    made = data(path, net, max_bad=0.02)
    assert len([made.get(i, None) for i in range(len(made))]) == len(made)
    path.write_bytes(b"".join([*lines, *[b'{"text": "caf\xe9"}\n'] * 40]))
    streaming.blocks.cache_clear()
    again = streaming.Lanes(made.lanes.source, made.lanes.tokenizer, made.lanes.sizes)
    with pytest.raises(UserError, match=r"documents in one block cannot be learnt from(.|\n)*no valid UTF-8"):
        [again.stretch(lane, number) for lane in range(LANES) for number in range(12)]


@pytest.mark.parametrize(("name", "content", "argv", "words"), [
    ("a.csv", b"text\nx\n", (), ("a.csv cannot be streamed", ".jsonl or .parquet", "leave --data.streaming out")),
    ("a.jsonl", b'{"body": "x"}\n', (), ("byte 0 of a.jsonl", "body (str)", "'text' (str)", "--data.column")),
    ("a.jsonl", b"", (), ("no documents",)),
    ("a.jsonl", b"no json\n", (), ("byte 0 of a.jsonl is not JSON",)),
    ("a.parquet", b"PAR1 no more", (), ("a.parquet cannot be read", "unfinished download")),
    ("", b"", (), ("cannot be streamed", "hub:owner/name")),
])  # fmt: skip
def test_what_cannot_be_streamed(name: str, content: bytes, argv: tuple, words: tuple, tmp_path: Path):
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / name
    if name:
        path.write_bytes(content)
    with pytest.raises(UserError) as told:
        streaming.sample(str(path), "text", 0.01)
    assert not [w for w in words if w not in str(told.value)], told.value


@pytest.mark.parametrize(("argv", "words"), [
    (("--data.streaming",), ("--data.streaming reads files", "--data.path")),
    pytest.param(("--data.rows", "9"), ("--data.rows is for streams",), marks=pytest.mark.verify),
])  # fmt: skip
def test_settings_of_streams_are_told(argv: tuple, words: tuple, launch):
    done = launch("check", "llm/pretrain", *argv)
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr


@pytest.mark.verify
def test_the_gates_of_a_streamed_run(tmp_path: Path):
    """The real command, resume and the order of reading among what it proves."""
    path = written(tmp_path, 900)
    done = trainworthy("check", "llm/pretrain", "--data.path", path, "--data.streaming", "--data.vocabulary", "300",
                       "--data.context", "32", "--data.stride", "16", "--hidden-size", "32", "--num-hidden-layers", "2", "--loader.threads", "2",
                       "--only", "schema,data,leakage,initial-loss,asked,isolation,perplexity,loader,resume",
                       cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
