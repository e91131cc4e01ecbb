"""The page of architectures, and what mixtures of experts need."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.llm.models import loading
from trainworthy.recipes.shared import language_models

from bench import architectures
from tests.helpers import language, tiny_language_models
from tests.helpers.commands import assert_refused


def test_the_page_is_what_the_command_writes():
    assert architectures.PAGE.read_text() == architectures.page(json.loads(architectures.KEPT.read_text()))


@pytest.mark.parametrize("name", ["Qwen3 MoE", "DeepSeek-V3", "gpt-oss"])
def test_the_file_of_a_mixture_of_experts_is_read_by_the_names_of_its_parameters(name, tmp_path: Path):
    """The file has an entry for each expert, the model one parameter for all of them (gpt-oss: the file as well)."""
    model = loading.load(str(architectures.written(name, tmp_path)), torch.float32)
    found = loading.from_file(model, str(tmp_path))
    own = dict(model.named_parameters())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[n], p) for n, p in own.items())


def test_the_loss_of_a_mixture_of_experts_does_not_depend_on_the_cut(tmp_path: Path, launch):
    """TRL adds the router's auxiliary loss by default, a mean over a micro-batch; its fused head cannot compute it on scored rows."""
    net = architectures.written("Qwen3 MoE", tmp_path / "net")
    settings = architectures.ON_TEXT["llm/sft"]
    done = launch(
        "check",
        "llm/sft",
        "--model",
        str(net),
        *architectures.WEIGHTS,
        *settings,
        "--only",
        "schema,init,dependency,objective",
    )
    assert done.returncode == 0, done.shown
    assert [v["verdict"] for v in done.verdicts()] == ["pass"] * 4


@pytest.mark.verify
def test_answers_of_any_length_are_generated_whole(tmp_path: Path, launch):
    """A tokenizer of bytes needs more than the few tokens that a function name has in most vocabularies."""
    net = architectures.written("Llama", tmp_path / "net")
    settings = architectures.ON_TEXT["llm/sft"]
    done = launch("check", "llm/sft", "--model", str(net), *architectures.WEIGHTS, *settings, "--only", "overfit")
    assert done.returncode == 0, done.shown
    assert "cut by" not in done.stdout


def saved(config: t.PretrainedConfig, folder: Path) -> Path:
    """A folder of the hub with random weights."""
    torch.manual_seed(0)
    t.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    language.tokenizer().save_pretrained(folder)
    return folder


def mamba() -> t.MambaConfig:
    return t.MambaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=8, time_step_rank=4, eos_token_id=2
    )


def test_a_model_without_attention_is_read(tmp_path: Path):
    """It has no limit of positions, no heads, and no position ids that could separate packed texts."""
    model = loading.load(str(saved(mamba(), tmp_path)), torch.float32)
    assert language_models.context(model.config) == math.inf
    assert language_models.context(t.GPT2Config(n_positions=640)) == 640, "by its own name"
    assert loading.flops(model, 640) == loading.flops(model, 64), "no attention"
    assert "MambaForCausalLM takes no position ids" in loading.without_positions(model)
    assert not loading.without_positions(language.model())


@pytest.mark.parametrize(
    ("kind", "words"), [("mamba", "MambaForCausalLM takes no position ids"), ("opt", "OPTForCausalLM mixes texts")]
)
def test_packed_texts_of_a_model_that_mixes_them_are_stopped_with_the_cause(
    kind: str, words: str, tmp_path: Path, launch
):
    net = tiny_language_models.write(kind, tmp_path / "net")
    done = launch("check", "llm/pretrain", "--model", str(net), "--attention", "eager", "--only", "isolation")
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"likely causes {words}" in done.stdout
    assert "--data.no-packing gives each a row of its own" in done.stdout
    more = ("--data.no-packing", "--only", "scored,isolation,perplexity")
    done = launch("check", "llm/pretrain", "--model", str(net), "--attention", "eager", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 3 gates passed, 1 skipped" in done.stdout


def test_a_kind_without_a_head_for_rewards_is_refused(tmp_path: Path, launch):
    net = saved(
        t.GraniteConfig(vocab_size=300, tie_word_embeddings=False, max_position_embeddings=512, **language.SIZES),
        tmp_path / "net",
    )
    done = launch("check", "llm/reward", "--model", str(net), "--data.max-length", "512", "--data.held-out", "16")
    assert_refused(done, "no sequence classifier of this kind", "granite", "llm/dpo")


def test_dropout_that_a_block_keeps_as_a_number_is_off_where_forwards_are_compared(tmp_path: Path):
    """OPT drops by functions, whose probability is no module's."""
    config = t.OPTConfig(vocab_size=300, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
                         dropout=0.5, attention_dropout=0.5, layerdrop=0.5)  # fmt: skip
    model = loading.load(str(saved(config, tmp_path)), torch.float32, dropout=False).train()
    ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_what_an_architecture_never_trains_stays_frozen(tmp_path: Path, launch):
    """Loading makes the bias of ERNIE's router trainable: no gradient reaches it."""
    config = t.Ernie4_5_MoeConfig(vocab_size=300, moe_num_experts=4, moe_k=2, moe_intermediate_size=48, tie_word_embeddings=False,
                                  pad_token_id=2, eos_token_id=2, bos_token_id=1, **language.SIZES)  # fmt: skip
    net = saved(config, tmp_path / "net")
    model = loading.load(str(net), torch.float32)
    assert model.fixed
    assert all(n.endswith("e_score_correction_bias") for n in model.fixed)
    assert not any(model.get_parameter(n).requires_grad for n in model.fixed)
    settings = architectures.ON_TEXT["llm/sft"]
    done = launch("check", "llm/sft", "--model", str(net), *architectures.WEIGHTS, *settings, "--only", "wiring")
    assert done.returncode == 0, done.stdout + done.stderr


def mixtral() -> t.MixtralConfig:
    return t.MixtralConfig(
        vocab_size=300, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False, **language.SIZES
    )


def pythia() -> t.GPTNeoXConfig:
    sizes = {k: v for k, v in language.SIZES.items() if k != "num_key_value_heads"}
    return t.GPTNeoXConfig(
        vocab_size=300, max_position_embeddings=640, tie_word_embeddings=False, eos_token_id=2, **sizes
    )


@pytest.mark.parametrize("config", [mixtral, pythia])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_file_with_other_names_is_read(config, lora_rank: int, tmp_path: Path):
    """Mixtral's file says block_sparse_moe.experts.0.w1, Pythia's embed_out. A tensor that it lacks is not made up."""
    net = saved(config(), tmp_path)
    model = loading.adapted(loading.load(str(net), torch.float32), loading.LoRA(lora_rank=lora_rank))
    own = {n: p for n, p in model.named_parameters() if "lora_" not in n}
    found = loading.from_file(model, str(net))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[n], p) for n, p in own.items())
    file = net / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(k for k in tensors if k.endswith(("layernorm.weight",)))]
    save_file(tensors, file, metadata={"format": "pt"})
    assert len(loading.from_file(model, str(net))) == len(own) - 1


@pytest.mark.parametrize("config", [mixtral, pythia])
def test_such_a_model_passes_init(config, tmp_path: Path, launch):
    settings = architectures.ON_TEXT["llm/sft"]
    net = saved(config(), tmp_path / "net")
    done = launch("check", "llm/sft", "--model", str(net), *architectures.WEIGHTS, *settings, "--only", "init")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", tiny_language_models.KINDS)
def test_every_kind_is_read_as_its_file_says(kind: str, tmp_path: Path):
    """The weights are the file's, nothing is drawn in training, padding on the right changes nothing, and a reward head starts at zero or is
    refused."""
    net = str(tiny_language_models.write(kind, tmp_path))
    model = loading.load(net, torch.float32, dropout=False).train()
    own, found = dict(model.named_parameters()), loading.from_file(model, net)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[n], p) for n, p in own.items())
    assert language_models.context(model.config) in (640, math.inf)
    assert loading.flops(model, 64) > 6 * model.get_output_embeddings().weight.numel()
    ids = torch.arange(40).view(2, 20) + 3
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        alone = model(input_ids=ids[:1, :12], attention_mask=mask[:1, :12], use_cache=False).logits
        if kind != "phimoe":  # its router draws experts in training
            assert torch.equal(logits, model(input_ids=ids, attention_mask=mask, use_cache=False).logits)
            assert (logits[0, :12] - alone[0]).abs().max() < 1e-4 * alone.abs().max()
    if type(model.config) in t.AutoModelForSequenceClassification._model_mapping:
        assert loading.scorer(net, torch.float32)(input_ids=ids, attention_mask=mask).logits.tolist() == [[0.0], [0.0]]
    else:
        with pytest.raises(UserError, match="no sequence classifier of this kind"):
            loading.scorer(net, torch.float32)
