"""Every chat template that TRL ships: its examples are what it renders, scored where an answer is; or refused, and why."""

import json
from pathlib import Path

import pytest
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.data import formats, pairs, templates
from trainworthy.recipes.llm.gates import chat as gates
from trainworthy.recipes.llm.models import loading

from bench import chat_templates
from tests.helpers import language
from tests.llm import chat_models
from tests.llm.chat_models import names, tokenizer
from tests.llm.test_sft import QUICK, SMALL, written

THINKING = ("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training")
"""Their generation prompt opens a reasoning block, whatever the answer; all but one of them drop an answer's reasoning."""
KEEPS_IT = "deepseek_r1_distill_training"
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is one and one?"},
        {"role": "assistant", "content": "It is two."},
        {"role": "user", "content": "And one more?"},
        {"role": "assistant", "content": "Three."},
    ]
}


def as_template(chat: pairs.Chat, row: dict[str, str]) -> str:
    """What is wrong with an example against the template's own rendering; empty: nothing."""
    made = chat.example(row["prompt"], row["completion"])
    before, answer = gates.reference(chat, row["prompt"], row["completion"])
    if made["input_ids"] != before + answer:
        return f"{chat.tokenizer.decode(made['input_ids'])!r}, the template {chat.tokenizer.decode(before + answer)!r}"
    due = gates.answered(chat, row["prompt"], before) | set(range(len(before), len(before) + len(answer)))
    got = {i for i, label in enumerate(made["labels"]) if label != -100}
    return "" if got == due else f"scored at {sorted(got ^ due)} otherwise"


@pytest.mark.parametrize("name", names())
def test_every_template_of_trl_is_learnt_as_it_renders_or_refused_for_a_true_reason(name: str):
    tokens = tokenizer(name)
    single, talk = (pairs.Chat(tokens, "Be brief.", conversations=c) for c in (False, True))
    pair = {"prompt": "What is one and one?", "completion": "It is two.", "source": "a"}
    if name in THINKING:
        with pytest.raises(formats.BadRow, match="generation prompt ends with '<think>"):
            single.rows(pair)
        thought = pair | {"completion": "<think>\nOne and one.\n</think>\n\nIt is two."}
        if name != KEEPS_IT:
            with pytest.raises(formats.BadRow):
                single.rows(thought)
            return
        (row,) = single.rows(thought)
        assert as_template(single, row) == ""
        assert single.reply(row["completion"]) == "It is two."
        return
    (row,) = single.rows(pair)
    assert as_template(single, row) == ""
    text = tokens.decode([i for i in single.example(row["prompt"], row["completion"])["labels"] if i != -100])
    assert text.endswith(single.form.end)
    assert text.count("It is two.") == 1
    assert single.reply(text.removesuffix(single.form.end)) == "It is two."
    assert "Be brief." in tokens.decode(single.ask(single.turns(row["prompt"])))
    rows = talk.rows(TALK)
    assert [as_template(talk, row) for row in rows] == [""] * len(rows)
    scored = [i for row in rows for i in talk.example(row["prompt"], row["completion"])["labels"] if i != -100]
    said = tokens.decode(scored)
    assert said.count("It is two.") == said.count("Three.") == 1  # each answer is learnt once
    assert scored.count(talk.end) == 2


@pytest.mark.parametrize(("name", "key", "tag"), [("qwen3", "reasoning_content", "</think>"), ("gptoss", "thinking", "analysis"),
                                                  ("glm4moe", "reasoning_content", "</think>")])  # fmt: skip
def test_reasoning_is_learnt_once_and_stripped_from_what_is_judged(name: str, key: str, tag: str):
    """Of two answers with their reasoning each is learnt once, with its own reasoning before it."""
    chat = pairs.Chat(tokenizer(name), "", conversations=True)
    turns = [dict(turn) for turn in TALK["messages"][1:]]
    turns[1] |= {key: "Add them up."}
    turns[3] |= {key: "Two and one."}
    rows = chat.rows({"messages": turns})
    said = [
        chat.tokenizer.decode([i for i in chat.example(r["prompt"], r["completion"])["labels"] if i != -100])
        for r in rows
    ]
    assert len(said) == 2
    assert all(tag in text for text in said)
    assert "".join(said).count("Add them up.") == "".join(said).count("Two and one.") == 1
    assert [chat.reply(r["completion"]) for r in rows] == ["It is two.", "Three."]


def test_a_call_that_ends_otherwise_keeps_its_own_end():
    """gpt-oss: <|call|> ends a turn that calls a tool, <|return|> an answer."""
    chat = pairs.Chat(tokenizer("gptoss"), "", conversations=True)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    asked = {"role": "user", "content": "How warm is Oslo?"}
    (row,) = chat.rows(
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}
    )
    made = chat.example(row["prompt"], row["completion"])
    text = chat.tokenizer.decode([i for i in made["labels"] if i != -100])
    assert text.endswith("<|call|>")
    assert "<|return|>" not in text
    assert '{"city": "Oslo"}' in text


def test_the_page_is_what_the_command_writes():
    assert chat_templates.page() == chat_templates.PAGE.read_text()


def test_a_template_is_read_from_a_file_or_by_its_name_and_an_end_must_be_a_token(tmp_path: Path):
    net = str(language.write(tmp_path / "net"))
    (tmp_path / "own.jinja").write_text(language.TEMPLATE.replace("assistant", "bot"))
    assert "bot" in loading.tokenizer(net, str(tmp_path / "own.jinja")).chat_template
    assert loading.tokenizer(net, "trl:qwen2_5").chat_template == templates.read("trl:qwen2_5")
    assert loading.tokenizer(net).chat_template == language.TEMPLATE
    assert loading.tokenizer(net, "", "<|im_end|>").eos_token == "<|im_end|>"
    (tmp_path / "open.jinja").write_text(language.TEMPLATE.replace("<|im_end|>", ""))
    assert loading.tokenizer(net, str(tmp_path / "open.jinja"), "<|endoftext|>").eos_token == "<|endoftext|>"
    for wrong, words in (
        (("trl:no-such", ""), "qwen2_5"),
        (("", "<|no|>"), "no token of"),
        (("", "<|endoftext|>"), "the chat template ends answers with <|im_end|>"),  # it would have no effect
        ((str(tmp_path / "no"), ""), "no such"),
    ):
        with pytest.raises(UserError, match=words):
            loading.tokenizer(net, *wrong)


def test_a_template_that_asks_for_the_date_gets_the_same_one_on_every_day(tmp_path: Path):
    net = str(language.write(tmp_path / "net"))
    head = "{{- 'Today: ' + strftime_now('%d %b %Y') + strftime_now(\"/%Y-%m-%d\") if strftime_now is defined }}"
    (tmp_path / "own.jinja").write_text(head + language.TEMPLATE)
    tokenizer = loading.tokenizer(net, str(tmp_path / "own.jinja"))
    asked = [{"role": "user", "content": "How?"}]
    plain = loading.tokenizer(net).apply_chat_template(asked, tokenize=False)
    assert tokenizer.apply_chat_template(asked, tokenize=False) == f"Today: 26 Jul 2024/2024-07-26{plain}"
    tokenizer.save_pretrained(tmp_path / "export")
    assert loading.tokenizer(str(tmp_path / "export")).chat_template == tokenizer.chat_template
    assert not templates.dated(language.TEMPLATE)
    assert not templates.dated("{{ strftime_now(format) }}")


def gemma(folder: Path) -> Path:
    """A random model with Gemma's tokens and template: no system role, <end_of_turn> ends a turn and <eos> a text."""
    tokens = tokenizer("gemma")
    language.torch.manual_seed(0)
    model = language.model(vocab_size=len(tokens), eos_token_id=tokens.eos_token_id)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


def test_a_model_like_gemma_passes_and_its_export_stops_at_the_end_of_turn(tmp_path: Path, launch):
    net = gemma(tmp_path / "net")
    done = launch("check", "llm/sft", "--model", str(net), *SMALL, "--only", "template,scored,objective,prompts")
    assert done.returncode == 0, done.shown
    rows = {v["id"]: v for v in done.verdicts()}
    assert [rows[k]["verdict"] for k in ("template", "scored", "objective", "prompts")] == ["pass"] * 4
    assert rows["template"]["evidence"]["example"].endswith("<end_of_turn>]]")
    done = launch("run", "llm/sft", "--model", str(net), *QUICK, "--train.epochs", "0.005", "--metric", "rouge,chrf")
    assert done.returncode == 0, done.shown
    summary = json.loads((done.folder() / "summary.json").read_text())
    assert {"rouge", "chrf", "f1", "exact", "perplexity", "stops"} <= summary["metrics"].keys()
    ends = json.loads((done.folder() / "export" / "generation_config.json").read_text())["eos_token_id"]
    assert chat_models.tokenizer("gemma").convert_tokens_to_ids("<end_of_turn>") in ends


NO_END = """    def unended(prompt, completion, made=chat.example):
        row = made(prompt, completion)
        return {**row, "labels": [-100 if i == chat.end else i for i in row["labels"]]}

    object.__setattr__(chat, "example", unended)
"""
TWICE = """    lead = "<think>\\n\\n</think>\\n\\n"
    object.__setattr__(chat, "framed", lambda text: lead + pairs.Chat.framed(chat, text))
"""
READ = "    data = read(cfg, chat)\n"
ASKED = "inputs = [chat.ask(chat.turns(p, before), p) for p in prompts]"
UNASKED = "inputs = [chat.ids(chat.render(chat.turns(p, before), p, tokenize=False)) for p in prompts]"


@pytest.mark.parametrize(("name", "old", "new", "gate", "words"), [
    ("gemma", READ, NO_END + READ, "scored", ("the one that ends it",)),
    ("qwen3", READ, TWICE + READ, "template", ("differs from token", "</think>")),
    ("qwen3", ASKED, UNASKED, "prompts", ("the generation prompt",)),
], ids=["end-never-scored", "reasoning-twice", "no-generation-prompt"])  # fmt: skip
def test_bugs_where_templates_differ_are_stopped(name, old, new, gate, words, tmp_path: Path, fork, launch):
    net = gemma(tmp_path / "net") if name == "gemma" else language.write(tmp_path / "net")
    more = () if name == "gemma" else ("--chat-template", f"trl:{name}")
    fork((old, new), recipe="llm/sft")
    done = launch("check", "mine.py", "--model", str(net), *SMALL, *more, "--only", gate)
    assert done.returncode == 3, done.shown
    assert not [w for w in words if w not in done.stdout], done.shown


@pytest.mark.parametrize(("body", "words"), [
    ('labels = batch["labels"]; labels[labels != -100] = 7', ()),
    ('batch["labels"][:, 0] = 7; batch["labels"][batch["labels"] != -100] += 1', ()),
], ids=["one-constant-id", "other-ids"])  # fmt: skip
def test_scored_tokens_that_are_other_ids_are_stopped_by_the_objective(body, words, tmp_path: Path, fork, launch):
    """The gradient is where it should be: only the number tells."""
    from tests.llm.planted_sft import COLLATOR, collated

    fork((COLLATOR, collated(*body.split("; "))), recipe="llm/sft")
    done = launch(
        "check", "mine.py", "--model", str(language.write(tmp_path / "net")), *SMALL, "--only", "scored,objective"
    )
    assert done.returncode == 3, done.shown
    assert "FAIL   objective" in done.stdout
    assert "all the same id" in done.stdout


def test_rows_as_people_have_them_train(tmp_path: Path, launch):
    """ShareGPT with bad rows among good ones: counted, named, left out; lengths and generation follow the data."""
    rows = [
        {"conversations": [{"from": "human", "value": f"number {i}?"}, {"from": "gpt", "value": f"It is {i * i}."}]}
        for i in range(80)
    ]
    rows[7]["conversations"][1]["value"] = " "
    rows[9]["conversations"].pop()
    path = str(written(tmp_path / "rows.jsonl", rows))
    asked = (
        "check",
        "llm/sft",
        "--model",
        str(language.write(tmp_path / "net")),
        "--lora-rank",
        "0",
        "--data.path",
        path,
    )
    done = launch(*asked, "--only", "template")
    assert done.returncode == 2, done.shown
    assert "2 of 80 rows" in done.stderr
    assert "line 8: its last answer is empty" in done.stderr
    assert "line 10: no answer to learn" in done.stderr
    assert "--data.max-bad 0.026" in done.stderr
    done = launch(*asked, "--data.max-bad", "0.03", "--data.val", "0.2", "--only", "template,scored")
    assert done.returncode == 0, done.shown
    assert "2 of 80 rows" in done.stdout
    assert "tokens a row (median)" in done.stdout


@pytest.mark.verify
def test_scaled_positions_are_trained_with_and_exported(tmp_path: Path, fork, launch):
    """A folder whose configuration scales its positions (YaRN); one that is exported without the scaling is stopped. No tensor differs."""
    scaled = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    net = str(language.write(tmp_path / "net", max_position_embeddings=256, rope_parameters=scaled))
    asked = ("--model", net, *SMALL, "--lora-rank", "0", "--only", "exported")
    done = launch("check", "llm/sft", *asked)
    assert done.returncode == 0, done.shown
    assert "pass   exported" in done.stdout
    saved = "        loading.export(trainer.model, tokenizer, folder)\n"
    plain = "        config = trainer.model.config\n        own = config.rope_parameters\n        config.rope_parameters = {'rope_type': 'default', "
    plain += f"'rope_theta': 10000.0}}\n{saved}        config.rope_parameters = own\n"
    fork((saved, plain), recipe="llm/sft")
    done = launch("check", "mine.py", *asked)
    assert done.returncode == 3, done.shown
    assert "FAIL   exported" in done.stdout


@pytest.mark.parametrize("lora", ["4", pytest.param("0", marks=pytest.mark.verify)], ids=["adapters", "whole"])
def test_an_export_of_other_weights_is_stopped(lora: str, tmp_path: Path, fork, launch):
    """The trained adapters (or weights) are drawn anew before they are written."""
    net = str(language.write(tmp_path / "net"))
    asked = ("--model", net, *SMALL, "--lora-rank", lora, "--only", "exported")
    saved = "        loading.export(trainer.model, tokenizer, folder)\n"
    fresh = "        loading.export(make_trainer(cfg, run, path).model, tokenizer, folder)\n"
    fork((saved, fresh), recipe="llm/sft")
    done = launch("check", "mine.py", *asked)
    assert done.returncode == 3, done.shown
    assert "FAIL   exported" in done.stdout
    done = launch("check", "llm/sft", *asked)
    assert done.returncode == 0, done.shown
    assert "pass   exported" in done.stdout


def test_conversations_that_become_several_rows_are_counted():
    """Qwen3 drops the reasoning of earlier answers: two answers are two rows, and the note says so. One answer is one row."""
    chat = pairs.Chat(tokenizer("qwen3"), "", conversations=True)
    said = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [{"conversations": said}, {"conversations": said * 2}, {"conversations": said[:1]}]

    def taken(rows: list[dict]) -> tuple[list[list[dict]], list[str]]:
        return formats.sorted_out(
            [("chats.jsonl", rows)], chat.rows, what="conversation", needed="messages", max_bad=0.5
        )

    (good,), (left_out, split) = taken(rows)
    assert len(good) == 3
    assert left_out.startswith("1 of 3 rows of chats.jsonl left out")
    assert split.startswith("2 conversations of chats.jsonl are 3 rows, one for each answer")
    assert taken(rows[:1])[1] == []
