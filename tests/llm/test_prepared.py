"""Rows that are kept between processes: read again, made anew when anything differs."""

import json
from pathlib import Path

import pytest
from trainworthy.recipes.llm.data import files, pairs, prepared
from trainworthy.recipes.llm.models import loading

from tests.helpers import language

N = 40


@pytest.fixture(scope="module")
def net(tmp_path_factory) -> Path:
    return language.write(tmp_path_factory.mktemp("net"))


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(prepared, "LEAST", 10)
    monkeypatch.setenv("TRAINWORTHY_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "rows.jsonl", "word")
    return tmp_path / "rows.jsonl"


def write(file: Path, word: str) -> None:
    turns = [{"role": "user", "content": "say {}"}, {"role": "assistant", "content": f"{word} {{}}"}] * 2
    lines = [json.dumps({"messages": turns}).replace("{}", str(i)) for i in range(N)]
    file.write_text("\n".join(lines))


def another_process() -> None:
    for cached in (pairs._read, files.tables, pairs.lengths, pairs._answer_tokens):
        cached.cache_clear()


def prepare(net: Path, file: Path, monkeypatch, **how) -> tuple[tuple, list[int], int]:
    """(rows, lengths, conversations that were rendered) in a new process."""
    another_process()
    rendered, own = [], pairs.Chat.rows
    with monkeypatch.context() as patch:
        patch.setattr(pairs.Chat, "rows", lambda chat, row: rendered.append(1) or own(chat, row))
        source = pairs.Source(path=str(file), **how)
        chat = pairs.chat(loading.tokenizer(str(net)), source)
        rows = pairs.read(source, chat)
        sizes = pairs.lengths(tuple((r["prompt"], r["completion"]) for r in rows[0]), chat)
    return rows, sizes, len(rendered)


def test_another_process_reads_what_the_first_one_prepared(net, file, monkeypatch):
    first, sizes, rendered = prepare(net, file, monkeypatch)
    assert rendered == N
    again, same, none = prepare(net, file, monkeypatch)
    assert (again, same, none) == (first, sizes, 0)
    write(file, "other")
    changed, _, rendered = prepare(net, file, monkeypatch)
    assert rendered == N
    assert "other" in changed[0][0]["completion"]
    assert prepare(net, file, monkeypatch, system="be brief")[2] == N
    assert prepare(net, file, monkeypatch)[2] == 0


def test_few_rows_leave_nothing(net, file, monkeypatch, tmp_path):
    monkeypatch.setattr(prepared, "LEAST", N + 1)
    prepare(net, file, monkeypatch)
    assert not (tmp_path / "cache").exists()
