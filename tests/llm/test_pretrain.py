"""llm/pretrain: its loss against a plain one, its packing token by token, what it writes, what it refuses."""

import json
import math
import random
from collections import Counter
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from trainworthy.core.base.config import Train
from trainworthy.core.base.errors import UserError
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.export_weights import export_to
from trainworthy.core.loop.run import Rehearsal
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm import pretrain
from trainworthy.recipes.llm.data import documents, packing, prose
from trainworthy.recipes.llm.evaluation import ngrams
from trainworthy.recipes.llm.gates import pretrain as pretrain_gates
from trainworthy.recipes.llm.models import loading

from tests.helpers import language
from tests.helpers.commands import read, run_folder, trainworthy
from trainworthy import core

SMALL = (
    "--data.vocabulary",
    "300",
    "--data.context",
    "32",
    "--data.stride",
    "16",
    "--hidden-size",
    "32",
    "--num-hidden-layers",
    "2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sections of Python's manual, a file each, and one in other letters."""
    made = tmp_path_factory.mktemp("texts")
    sections = [text for _, text in prose.manual()]
    for i, text in enumerate(islice(sections, 0, None, 3)):
        (made / f"{i:03}.txt").write_text(text[:600])
    (made / "greek.md").write_text("Πάντα ῥεῖ, said Heraclitus: 万物流转. <|end|> is no end here. 🙂\n" * 3)
    return made


def settings(folder: Path, **more) -> pretrain.Config:
    source = documents.Source(path=str(folder), vocabulary=300, context=32, stride=16)
    return pretrain.Config(
        data=source, hidden_size=32, num_hidden_layers=2, train=Train(epochs=1, batch_size=4, eval_batch_size=8), **more
    )


def staged(cfg: pretrain.Config) -> core.Stage:
    """The stage, with weights that make every token matter (an untrained one says the same whatever it reads)."""
    torch.manual_seed(0)
    stage = pretrain.pretrain(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    with torch.no_grad():
        for p in stage.model.parameters():
            p += 0.1 * torch.randn_like(p)
    return stage


# ----------------------------------------------------------------------------------------------------------------- chain
def test_pretrain_sft_and_dpo_by_init_from(folder: Path, tmp_path: Path):
    """One model from nothing to preferences: each stage begins with the very weights that the one before ended with."""
    quick = ("--gates.no-enabled", "--run.no-tensorboard", "--run.threads", "1")
    rows = [{"prompt": f"say {i}", "completion": f"{i}!", "chosen": f"{i}!", "rejected": "no"} for i in range(60)]
    data = tmp_path / "rows.jsonl"

    def stage(recipe: str, *argv: str) -> Path:
        done = trainworthy("run", recipe, *quick, *argv, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return next((tmp_path / "runs" / recipe.replace("/", "-")).glob("2*"))

    begun = stage("llm/pretrain", "--data.path", str(folder), *SMALL, "--data.context", "96", "--train.epochs", "0.1")
    model = ("--model", str(begun / "export"), "--lora-rank", "0", "--data.path", str(data), "--data.system", "")
    more = {
        "llm/sft": ("--train.epochs", "1", "--data.near", "0"),
        "llm/dpo": ("--train.epochs", "0.2", "--optim.lr", "1e-4"),
    }
    for recipe, columns in (("llm/sft", ("prompt", "completion")), ("llm/dpo", ("prompt", "chosen", "rejected"))):
        data.write_text("".join(json.dumps({k: row[k] for k in columns}) + "\n" for row in rows))
        before, begun = begun, stage(recipe, *model, "--init-from", str(begun), *more[recipe])
        start = read(begun / "args.json")["start"]
        assert str(before) in start["file"]
        assert start["share"] == 1.0


# ------------------------------------------------------------------------------------------------------------------ loss
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_the_loss_of_packed_rows_is_that_of_each_document_alone(folder: Path, backend: str):
    """Cross-entropy and z-loss through the recipe's own function, against torch's on each window by itself, to 1e-6."""
    stage = staged(settings(folder, z_loss=1e-2, attention=backend))
    assert stage.model.config._attn_implementation == backend
    data = stage.data["train"]
    batch = data.collate([data.get(i, None) for i in range(len(data))])
    terms, ce, z, tokens = stage.loss(stage.model, batch), 0.0, 0.0, 0
    for window in data.windows:
        ids = torch.from_numpy(data.documents[window.document][window.start : window.end].astype(np.int64))
        logits = stage.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        kept = slice(window.scored - window.start - 1, None)
        ce += F.cross_entropy(logits[kept], ids[1:][kept], reduction="sum").double()
        z += 1e-2 * torch.logsumexp(logits[kept], -1).square().sum().double()
        tokens += len(ids[1:][kept])
    assert tokens == int(stage.counts(batch)["*"]) == sum(len(d) - 1 for d in data.documents)
    assert terms["ce"].item() == pytest.approx(ce.item(), rel=1e-6)
    assert terms["z"].item() == pytest.approx(z.item(), rel=1e-6)


class Bigram(torch.nn.Module):
    """Scores of the next token from the last one alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 20)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum"), "label smoothing 0.1"),
        (lambda x, y: (nll := F.cross_entropy(x, y, reduction="none")).sum() + (1 - (-nll).exp()).sum(), "poly-1"),
        (
            lambda x, y: ((1 - (-(nll := F.cross_entropy(x, y, reduction="none"))).exp()) ** 2 * nll).sum(),
            "of the recipe's own",
        ),  # focal
        (lambda x, y: F.cross_entropy(x, y, weight=torch.linspace(0.5, 2, 20), reduction="sum"), "of the recipe's own"),
        (
            lambda x, y: (1 - (-F.cross_entropy(x, y, reduction="none")).exp()).sum(),
            "of the recipe's own",
        ),  # absolute error (Ghosh 2017)
        (lambda x, y: F.cross_entropy(x, y.roll(1), reduction="sum"), ""),
        (lambda x, y: -F.cross_entropy(x, y, reduction="none").sqrt().sum(), ""),
        (lambda x, y: F.cross_entropy(x, y, reduction="none").clamp_max(2.0).sum(), ""),
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.9, reduction="sum"), ""),
    ],
)
def test_published_losses_of_tokens_are_let_through(of, said: str):
    torch.manual_seed(0)
    ids, model = torch.randint(20, (8, 12)), Bigram()
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(12).expand(8, -1)}

    def loss(model, batch):
        return {"ce": of(model(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())}

    stage, run = SimpleNamespace(model=model, loss=loss), SimpleNamespace(autocast=nullcontext, precision="fp32")
    context = SimpleNamespace(cfg=SimpleNamespace())
    found = formula.compared(run, stage, batch, lambda: pretrain_gates.stated(context, stage, batch))
    assert bool(found.wrong) is not bool(said), found
    assert said in " ".join(found.remarks)


def test_the_first_loss_is_the_entropy_of_the_frequencies(folder: Path):
    """And log Z begins at 0, whatever is read."""
    torch.manual_seed(3)
    cfg = settings(folder)
    stage = pretrain.pretrain(cfg, core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1)))
    logits = stage.model(input_ids=torch.randint(3, 300, (2, 20)), use_cache=False).logits
    assert logits.logsumexp(-1).abs().max() < 1e-3  # the norm's epsilon
    p = logits[0, 0].softmax(-1).double()
    assert stage.expect.initial_loss == pytest.approx(-(p * p.log()).sum().item(), rel=1e-3)


def test_z_loss_shrinks_log_z_where_its_weight_lets_it_be_seen(folder: Path):
    """The recipe's own loss on logits shifted by 5, which cross-entropy does not feel: what the term adds to its gradient, and that
    a step down it brings log Z nearer to 0."""
    found = {}
    for weight in (0.01, 0.0):
        stage = staged(settings(folder, z_loss=weight))
        data = stage.data["train"]
        batch = data.collate([data.get(i, None) for i in range(4)])
        found[weight] = pretrain_gates.felt(stage, batch, 5.0)
    (logits, gradient, _), (_, plain, _) = found[0.01], found[0.0]
    asked = (batch["labels"][:, 1:] != packing.IGNORED).nonzero(as_tuple=True)
    logits, added = logits[:, :-1][asked], (gradient - plain)[:, :-1][asked]
    log_z = logits.logsumexp(-1, keepdim=True)
    assert log_z.mean() > 5
    assert torch.allclose(added, 2 * 0.01 * log_z * logits.softmax(-1), atol=1e-6)
    assert (logits - added).logsumexp(-1).square().mean() < log_z.square().mean()


# --------------------------------------------------------------------------------------------------------------- packing
@pytest.mark.parametrize(("context", "stride"), [(8, 7), (8, 4), (8, 1), (5, 3), (2, 1)])
def test_every_token_is_asked_for_once_with_enough_before_it(context: int, stride: int):
    lengths = [1, 2, 3, context - 1, context, context + 1, 2 * context, 5 * context + 1]
    asked = Counter()
    for w in packing.windows(lengths, context, stride):
        assert 0 <= w.start < w.scored < w.end <= lengths[w.document]
        assert w.end - w.start <= context
        for i in range(w.scored, w.end):
            asked[w.document, i] += 1
            assert i - w.start >= min(i, context - stride)
    assert asked == {(d, i): 1 for d, n in enumerate(lengths) for i in range(1, n)}


def test_best_fit_loses_nothing_and_fills_rows():
    draw = random.Random(0)
    lengths = [min(int(draw.expovariate(1 / 40)) + 1, 128) for _ in range(2000)]
    rows = packing.best_fit(lengths, 128)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 128
    assert sum(lengths) / (128 * len(rows)) > 0.98  # one document a row fills 30%
    assert rows == packing.best_fit(lengths, 128)


def test_rows_hold_the_documents_and_nothing_between_them(folder: Path):
    """What follows what, over all rows and labels, is what follows what in the documents."""
    corpus = documents.read(settings(folder).data)
    data = packing.Packed(corpus.train, context=32, stride=31, tokenizer=corpus.tokenizer, sizes=corpus.sizes)
    due = Counter(pair for d in corpus.train for pair in pairwise(d.tolist()))
    got: Counter = Counter()
    for i in range(len(data)):
        sample = data.get(i, None)
        ids, labels, positions = (sample[k].tolist() for k in ("input_ids", "labels", "position_ids"))
        got.update((ids[k - 1], labels[k]) for k in range(32) if labels[k] != packing.IGNORED)
        assert all(p in (0, q + 1) for q, p in pairwise(positions))
        # Nothing is asked of another document.
        assert all(positions[k] for k in range(32) if labels[k] != packing.IGNORED)
    assert got == due


def test_without_packing_each_window_has_its_own_row(folder: Path):
    corpus = documents.read(settings(folder).data)
    how = {"context": 32, "stride": 31, "tokenizer": corpus.tokenizer, "sizes": corpus.sizes}
    data, together = packing.Packed(corpus.train, packing=False, **how), packing.Packed(corpus.train, **how)
    assert len(data) == len(data.windows) > len(together)
    assert len(data.among(corpus.train[:5])) == len(packing.windows([len(d) for d in corpus.train[:5]], 32, 31))
    pairs = [Counter(zip(*(s[k].tolist()[i : 31 + i] for k, i in (("input_ids", 0), ("labels", 1))), strict=True))
             for s in (d.get(i, None) for d in (data, together) for i in range(len(d)))]  # fmt: skip
    scored = [{p: n for p, n in one.items() if p[1] != packing.IGNORED} for one in pairs]
    each = [sum((Counter(one) for one in part), Counter()) for part in (scored[: len(data)], scored[len(data) :])]
    assert each[0] == each[1], "the same targets after the same tokens"


def test_bytes_are_those_of_the_texts(folder: Path):
    """Whatever the letters; a text that spells a special token is read as it is spelled."""
    corpus = documents.read(settings(folder).data)
    for texts, rows in zip(corpus.texts, (corpus.train, corpus.val), strict=True):
        for text, row in zip(texts, rows, strict=True):
            assert corpus.sizes[row].sum() == len(text.encode())
            assert corpus.tokenizer.decode(row[1:-1]) == text
    ends = sum((row == corpus.tokenizer.eos_token_id).sum() for row in corpus.train)
    assert ends == len(corpus.train)


def test_witten_bell_by_hand():
    """0 1 2 and 0 1 3 are known, 0 1 2 is asked for: every probability written out."""
    train = [np.array([0, 1, 2]), np.array([0, 1, 3])]
    log_p = ngrams.frequencies(train, 4)
    p = np.exp(log_p)
    assert p == pytest.approx(np.array([1, 3, 2, 2]) / 8)
    first = (2 + 1 * p[1]) / (2 + 1)
    second = (1 + 2 * p[2]) / (2 + 2)
    found = ngrams.smoothed(train, [np.array([0, 1, 2])], log_p, 1)
    assert found["bigram, Witten-Bell"] == pytest.approx(-math.log2(first) - math.log2(second))
    third = ((2 + 1 * first) / 3, (1 + 2 * second) / 4)
    assert found["trigram, Witten-Bell"] == pytest.approx(-sum(map(math.log2, third)))


# ------------------------------------------------------------------------------------------------------------------- run
def test_a_run_logs_what_a_pretraining_run_is_judged_by(folder: Path, tmp_path: Path):
    """Terms apart, tokens per second, log Z; texts to read; an export that transformers alone loads and generates with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = trainworthy("run", "llm/pretrain", "--data.path", folder, *SMALL, "--train.epochs", "1", "--gates.no-enabled",
                       "--run.no-tensorboard", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    made = run_folder(tmp_path)
    row = read(made / "step_metrics.jsonl")[-1]
    assert {"step/ce", "step/z", "step/lm/tokens_per_sec", "step/lm/rms_log_z"} <= row.keys()
    summary = read(made / "summary.json")
    assert {"bits_per_byte", "perplexity", "log_z"} <= summary["metrics"].keys()
    assert {"unigram", "bigram, Witten-Bell", "trigram, Witten-Bell", "xz"} <= summary["baselines"].keys()
    assert not [t for t in ("Sampled texts", "Perplexity by position") if t not in (made / "report.html").read_text()]
    model = AutoModelForCausalLM.from_pretrained(made / "export")
    tokenizer = AutoTokenizer.from_pretrained(made / "export")
    ids = torch.tensor([[tokenizer.bos_token_id]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert out.shape[1] > 1
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_queries_and_keys_are_normalised_where_that_is_asked_for(folder: Path):
    stage = staged(settings(folder, qk_norm=True))
    assert {n.split(".")[-2] for n, _ in stage.model.named_parameters() if "q_norm" in n or "k_norm" in n} == {
        "q_norm",
        "k_norm",
    }
    plain = staged(settings(folder))
    assert stage.expect.initial_loss == plain.expect.initial_loss


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn"])
def test_a_longer_context_by_scaled_positions(folder: Path, rope: str):
    """Within what was learnt and beyond it: the config is the export's, the positions are other ones, and each kind acts."""
    stages = {}
    for kind in ("default", rope):
        cfg = settings(folder, rope=kind, original_context=16)
        stages[kind] = staged(cfg)
    ids = {"input_ids": torch.arange(3, 35)[None], "position_ids": torch.arange(32)[None]}
    with torch.no_grad():
        a, b = (stages[kind].model.eval()(**ids, use_cache=False).logits for kind in ("default", rope))
    assert (a - b)[:, 20:].abs().max() > 1e-4
    assert stages[rope].model.config.rope_parameters["rope_type"] == rope
    assert stages[rope].model.config.rope_parameters["factor"] == 2.0
    with pytest.raises(UserError, match="--original-context"):
        staged(settings(folder, rope=rope))


def test_the_positions_of_a_folder_s_config_are_scaled_and_exported(folder: Path, tmp_path: Path):
    from transformers import AutoConfig

    language.model(max_position_embeddings=16).config.save_pretrained(tmp_path / "short")
    with pytest.raises(UserError, match="--rope yarn"):
        staged(settings(folder, model=str(tmp_path / "short")))
    stage = staged(settings(folder, model=str(tmp_path / "short"), rope="yarn"))
    (tmp_path / "out").mkdir()
    stage.export(tmp_path / "out")
    for config in (stage.model.config, AutoConfig.from_pretrained(tmp_path / "out")):
        assert config.max_position_embeddings == 32
        assert {k: config.rope_parameters[k] for k in ("rope_type", "factor", "original_max_position_embeddings")} == {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}  # fmt: skip


def test_an_export_that_changes_the_model_in_memory_is_named(folder: Path, tmp_path: Path):
    """The likely cause was "a setting was changed on the model's config"."""
    stage = staged(settings(folder))
    assert export_to(stage, tmp_path / "plain") == ""
    export = stage.export
    stage.export = lambda folder: (stage.model.bfloat16(), export(folder))
    found = export_to(stage, tmp_path / "half")
    assert found.startswith("export() changes the model in memory"), found
    assert "from float32 to bfloat16" in found


def test_a_mean_over_rows_of_each_row_s_mean_is_named(folder: Path):
    """It was "tokens that two windows share are counted twice": such a mean does not depend on the batches."""
    cfg = settings(folder)
    cfg.train.eval_batch_size = 1
    stage = staged(cfg)
    run = core.Run(cfg, Accelerator(cpu=True), rehearsal=Rehearsal(steps=1))
    data = stage.data["val"]
    some = data.among(sorted(data.documents, key=len)[::7])
    rows = [run.measure(stage, View(some, [i])) for i in range(len(some))]
    whole = run.measure(stage, some)
    assert len(some) > 2
    assert pretrain_gates.averaged_rows(run, stage, some, whole, 1e-4) == ""
    for name in ("bits_per_byte", "perplexity"):
        mean = sum(row[name] for row in rows) / len(rows)
        found = pretrain_gates.averaged_rows(run, stage, some, {name: mean}, 1e-4)
        assert found.startswith(f"{name} is a mean over {len(some)} rows of each row's own mean"), found


def test_perplexity_by_position_adds_up_to_perplexity(folder: Path):
    """Each token in the part of the row where it stands, whatever the batches: as one by one."""
    stage = staged(settings(folder))
    data = stage.data["val"]
    figure = stage.figures(stage.model.eval(), data)["Perplexity by position"]
    nats, tokens = torch.zeros(2, 32, dtype=torch.float64)
    for window in data.windows:
        ids = torch.from_numpy(data.documents[window.document][window.start : window.end].astype(np.int64))
        with torch.no_grad():
            logits = stage.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        for place in range(window.scored - window.start, len(ids)):
            nats[place] += F.cross_entropy(logits[place - 1], ids[place]).double()
            tokens[place] += 1
    due = (nats.view(16, 2).sum(1) / tokens.view(16, 2).sum(1)).exp()
    assert torch.allclose(figure.y, due, rtol=1e-5)
    assert figure.x.tolist() == list(range(1, 33, 2))


def test_flops_of_a_token_are_six_for_each_weight_and_attention(folder: Path):
    model = staged(settings(folder)).model
    body = sum(p.numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    assert loading.flops(model, 32) == 6 * body + 12 * 2 * 32 * 32
    assert loading.utilisation(1e12, torch.device("cpu")) == {"tflops_per_sec": 1.0}


@pytest.mark.verify
def test_any_architecture_from_its_configuration(folder: Path, tmp_path: Path):
    """A GPT-2 of random weights, whose positions are learnt: documents are apart there, too."""
    from transformers import GPT2Config

    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **still).save_pretrained(tmp_path)
    done = trainworthy("check", "llm/pretrain", "--data.path", folder, *SMALL, "--model", tmp_path, "--only",
                       "initial-loss,scored,isolation,z-loss,perplexity,export", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tokenizer_is_the_same_beside_any_model(tmp_path: Path):
    """AutoTokenizer goes by the model's type: for Qwen2 it builds that model's own class, which has an unknown token."""
    from transformers import AutoTokenizer, Qwen2Config

    made = documents.trained(["def spam(eggs): return eggs"] * 3, 300)
    made.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(made)).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.get_vocab() == made.get_vocab()
    assert again("def  spam")["input_ids"] == made("def  spam")["input_ids"]


def test_logits_that_are_capped_after_the_head(folder: Path, tmp_path: Path):
    """Gemma 2: a constant that is added before the cap would change the loss. It has no attention of PyTorch's."""
    from transformers import Gemma2Config

    Gemma2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                 sliding_window=16, query_pre_attn_scalar=16, max_position_embeddings=64).save_pretrained(tmp_path)  # fmt: skip
    given = ("llm/pretrain", "--data.path", folder, *SMALL, "--model", tmp_path)
    done = trainworthy(
        "check", *given, "--attention", "eager", "--only", "scored,isolation,z-loss", cwd=tmp_path, code=0
    )
    assert "equal on eager" in done.stdout
    refused = trainworthy("check", *given, cwd=tmp_path, code=2)
    assert "needed:       --attention eager" in refused.stderr


def test_a_tokenizer_that_is_loaded(folder: Path, tmp_path: Path):
    """One token for every byte, one and the same token for pad and end: the end is asked for all the same."""
    net = language.write(tmp_path / "net")
    source = documents.Source(path=str(folder), tokenizer=str(net))
    corpus = documents.read(source)
    assert all(row[0] == 1 and row[-1] == 2 for row in corpus.train)
    assert all(len(row) == len(text.encode()) + 2 for text, row in zip(corpus.texts[0], corpus.train, strict=True))


# ------------------------------------------------------------------------------------------------------------- bad input
def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


ROWS = b"".join(json.dumps({"text": f"Document number {i} says so."}).encode() + b"\n" for i in range(60))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.txt", b"", ("cannot be learnt from", "empty")),
    ("a.txt", b"caf\xe9", ("no valid UTF-8", "byte 3")),
    ("a.txt", b"One paragraph alone.", ("too little",)),
    ("a.jsonl", b"", ("no documents",)),
    ("a.jsonl", ROWS + b'{"text": "caf\xe9"}\n' * 9, ("9 of 69", "line 61", "no valid UTF-8", "--data.max-bad")),
    ("a.jsonl", ROWS + b'{"text": "  "}\n' * 9, ("it has no token to predict", "line 61")),
    ("a.jsonl", ROWS + b"{", ("line 61", "not JSON")),
    ("a.jsonl", b'{"content": "x", "n": 3}\n', ("content (str), n (int)", "'text' (str)", "--data.column")),
    ("a.jsonl", b'{"text": 3}\n', ("text (int)",)),
    ("a.csv", b"content\nx\n", ("content", "--data.column")),
], ids=["empty", "no-utf8", "one-document", "no-rows", "rows-no-utf8", "nothing", "no-json", "column", "type", "csv"])  # fmt: skip
def test_texts_that_cannot_be_read(name: str, content: bytes, words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(UserError) as told:
        documents.load(str(written(tmp_path / name, content)), "text", 0.01)
    assert not [w for w in words if w not in str(told.value)], told.value


def test_a_few_bad_documents_are_counted_and_named(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", ROWS * 5 + b'{"text": ""}\n')
    train, val, notes = documents.load(str(path), "text", 0.01)
    assert len(train) + len(val) == 300
    assert notes == {"left out of train": "1 of 301 documents: line 301 (empty: it has no token to predict)"}


def test_validation_texts_have_a_file_of_their_own_or_a_share(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", ROWS * 2)
    own = written(
        tmp_path / "b.jsonl",
        b"".join(json.dumps({"text": f"Held out, number {i}."}).encode() + b"\n" for i in range(9)),
    )
    train, val, _ = documents.load(str(path), "text", 0.01, str(own))
    assert (len(train), val) == (120, [f"Held out, number {i}." for i in range(9)])
    train, val, _ = documents.load(str(path), "text", 0.01, "0.25")
    assert 15 < len(val) < 45
    assert len(train) + len(val) == 120
    assert not {*train} & {*val}  # equal texts are on one side
    for wrong, words in (
        ("1.5", "not a share"),
        (str(path), "names the training data"),
        ("nowhere.jsonl", "no such file"),
        (str(written(tmp_path / "c.jsonl", b"")), "no documents"),
    ):
        with pytest.raises(UserError, match=words):
            documents.load(str(path), "text", 0.01, wrong)


def test_the_command_reads_the_validation_file_that_it_is_given(tmp_path: Path, launch):
    """A copy of the training file: all of it is seen twice."""
    rows, copy = (str(written(tmp_path / name, ROWS)) for name in ("a.jsonl", "b.jsonl"))
    done = launch("data", "llm/pretrain", "--data.path", rows, "--data.val", copy, *SMALL)
    assert done.returncode == 0, done.shown
    found = json.loads((done.folder() / "data.json").read_text())
    assert found["overlap"]["exact"] == found["splits"]["val"]["samples"] > 0


@pytest.mark.parametrize(("path", "words"), [
    ("nowhere", ("no such file or folder",)), ("nowhere.jsonl", ("no such file",)), ("folder", ("no texts in it", ".py")),
])  # fmt: skip
def test_a_folder_that_is_not_there_or_has_no_texts(path: str, words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "code.py", b"pass")
    with pytest.raises(UserError) as told:
        documents.load(str(tmp_path / path), "text", 0.01)
    assert not [w for w in words if w not in str(told.value)], told.value


@pytest.mark.parametrize(("argv", "words"), [
    (("--data.path", "nowhere"), ("no such file or folder",)),
    (("--attention", "flex_attention"), ("--attention flex_attention", "no backward on this device")),
    (("--data.streaming", "--data.no-packing"), ("--data.no-packing is for texts that are read at once",)),
    pytest.param(("--data.stride", "128"), ("--data.stride", "1 to 127", "next:         --data.stride 64"), marks=pytest.mark.verify),
    pytest.param(("--model", "nowhere"), ("--model nowhere: no such folder",), marks=pytest.mark.verify),
    pytest.param(("--hidden-size", "20", "--num-attention-heads", "4"), ("--hidden-size does not fit",), marks=pytest.mark.verify),
])  # fmt: skip
def test_a_setting_that_cannot_work_ends_the_command(argv: tuple, words: tuple, folder: Path, launch):
    where = () if "--data.path" in argv else ("--data.path", str(folder))
    done = launch("check", "llm/pretrain", *where, *argv)
    assert done.returncode == 2, done.shown
    assert not [w for w in words if w not in done.stderr], done.stderr
    assert "Traceback" not in done.stderr
