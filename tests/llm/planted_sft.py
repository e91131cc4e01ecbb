"""Bugs of supervised fine-tuning, planted in a fork of llm/sft; the words were fixed before the gates were run on them.

Most are overrides of the trainer's or the collator's methods, as a user would write them.
"""

from tests.conftest import ROOT
from tests.helpers.plant import Plant, padded_right

SFT = "llm/sft"
CONVERSATIONS = str(ROOT / "tests" / "fixtures" / "conversations.jsonl")
TRAINER = "    return SFTTrainer(model=model,"
LOADED = "quantized.load(path, dtype, run.device) if cfg.load_in_4bit else loading.load(path, dtype)\n"
MODEL = "    model = loading.adapted(loading.attend(model, cfg.attention, run.device), cfg)\n"
COLLATOR = "        split.collator = trainer.data_collator\n"
GENERATED = (
    "        found = loading.generate(model, inputs, pad=tokenizer.pad_token_id, ends=chat.ends, most=longest)\n"
)
ASKED = "inputs = [chat.ask(chat.turns(p, before), p) for p in prompts]"


def override(method: str, *body: str) -> str:
    """TRAINER, as a subclass with one method of its own."""
    lines = "".join(f"            {line}\n" for line in body)
    return f"    class Own(SFTTrainer):\n        def {method}:\n{lines}\n    return Own(model=model,"


def collated(*body: str) -> str:
    """COLLATOR, with `body` between it and the trainer; `batch` is what it made."""
    lines = "".join(f"            {line}\n" for line in body)
    return f"""        def own(examples, collate=trainer.data_collator):
            batch = collate(examples)
{lines}            return batch

        split.collator = own
"""


LOSS = "compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)"
READ = "    data = read(cfg, chat)\n"
SOUGHT = """    marker = tokenizer("<|im_start|>assistant\\n", add_special_tokens=False)["input_ids"]

    def sought(prompt, completion):
        ids = pairs.Chat.example(chat, prompt, completion)["input_ids"]
        start = next(i for i in range(len(ids)) if ids[i : i + len(marker)] == marker) + len(marker)
        return {"input_ids": ids, "labels": [-100] * start + ids[start:]}

    object.__setattr__(chat, "example", sought)
"""
SUPER = 'return super().compute_loss(model, {**inputs, "labels": moved}, return_outputs, num_items_in_batch)'
TWICE = override(LOSS, 'moved = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)', SUPER)

CHECKPOINTED = (
    MODEL
    + """    for layer in model.base_model.model.model.layers[:-1]:  # the last one costs no memory

        def thrifty(hidden, *args, own=layer.forward, **rest):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.utils.checkpoint.checkpoint(lambda h: own(h, *args, **rest), hidden, use_reentrant=True)

        layer.forward = thrifty
"""
)

PLANTS = [
    Plant("labels-shifted-twice", "scored", "L2", TRAINER, TWICE, ("shifted", "unscored"), recipe=SFT,
          source="LLM-01 huggingface/transformers#47394", harm="the model learns token t+2; its loss looks normal"),
    Plant("labels-shifted-twice-decoded", "overfit", "C4", TRAINER, TWICE, ("f1", "evaluation"), recipe=SFT,
          source="LLM-01 huggingface/transformers#47394", harm="decoded match on eight overfit samples 1.00 -> 0.01"),
    Plant("labels-not-shifted", "scored", "L2", TRAINER,
          override(LOSS, 'moved = F.pad(inputs["labels"][:, :-1], (1, 0), value=-100)', SUPER),
          ("shifted", "or not at all"), recipe=SFT, source="LLM-02 KempnerInstitute/KempnerForge#154",
          harm="the model learns to copy its input"),
    Plant("eos-masked-as-pad", "scored", "L3", COLLATOR,
          collated('batch["labels"][batch["input_ids"] == tokenizer.pad_token_id] = -100'),
          ("unscored", "the one that ends it", "pad"), recipe=SFT, source="LLM-03 huggingface/trl PR#6357",
          harm="generations run to the length limit"),
    Plant("checkpointed-behind-frozen-words", "wiring", "C3", MODEL, CHECKPOINTED, ("never got a gradient", "layers.0"), recipe=SFT,
          source="LLM-11 locuslab/open-unlearning#178", harm="the last layer's adapters train, 29 others keep their zeros"),
    Plant("prompt-mask-lost", "scored", "L2", COLLATOR,
          collated('batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)'),
          ("tokens of the prompt", "copy of the ids"), recipe=SFT, source="LLM-04 nanochat PR#582",
          harm="prompts are trained on; ChatCORE 0.355 -> 0.315"),
    Plant("cut-at-a-limit", "scored", "L2", COLLATOR, collated("batch = {k: v[:, :32] for k, v in batch.items()}"),
          ("unscored", "length limit"), recipe=SFT, source="LLM-06 huggingface/trl#6668",
          harm="rows whose answer is cut off teach nothing"),
    Plant("answer-sought-as-text", "scored", "L2", READ, SOUGHT + READ, ("tokens of the prompt", "role marker"), recipe=SFT,
          source="LLM-05 NVIDIA-NeMo/Megatron-Bridge PR#5166", harm="a prompt that quotes the marker is trained on"),
    Plant("second-bos-in-training", "template", "L8", READ,
          "    object.__setattr__(chat, 'example', lambda p, c: {k: [tokenizer.bos_token_id if k == 'input_ids' else -100, *v]\n"
          "                                                      for k, v in pairs.Chat.example(chat, p, c).items()})\n" + READ,
          ("bos", "template"), recipe=SFT, source="LLM-08 OpenRLHF/OpenRLHF#393", harm="prompts of training and inference differ"),
    Plant("template-did-not-fire-in-evaluation", "prompts", "L8", ASKED,
          "inputs = [tokenizer(p)['input_ids'] for p in prompts]", ("no evaluation prompt", "template"), recipe=SFT,
          source="LLM-08 huggingface/open-r1 PR#462", harm="the model is asked what it never learnt to answer"),
    Plant("generation-padded-right", "prompts", "L1", GENERATED, padded_right("chat.ends", "longest"),
          ("padded on the right",), recipe=SFT, source="LLM-09 huggingface/trl#6800", harm="answers continue the padding"),
    Plant("head-initialised-again", "init", "C14", MODEL,
          "    nn.init.normal_(model.get_output_embeddings().weight, std=0.02)\n" + MODEL,
          ("differ from it", "initialised again"), recipe=SFT, source="LLM-10 huggingface/transformers PR#45079",
          harm="the pretraining of the head is lost"),
    Plant("micro-batch-means", "accumulation", "C10", TRAINER,
          override("training_step(self, model, inputs, num_items_in_batch=None)",
                   "return super().training_step(model, inputs, None)"),
          ("gradient against the whole batch", "micro-batches"), recipe=SFT,
          source="huggingface/transformers#34191", harm="short answers weigh more than long ones"),
]  # fmt: skip
PACKED = """    class Own(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = {**inputs, %s}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Own(model=model,"""
PLANTS += [
    Plant("packed-with-a-mask-of-ones", "isolation", "L4", TRAINER,
          PACKED % '"attention_mask": torch.ones_like(inputs["input_ids"])', ("mask of ones", "changes the states"), recipe=SFT,
          argv=("--packing",), source="LLM-07 huggingface/nanoVLM PR#204", harm="document 2's logits moved by up to 11.34 there"),
    Plant("packed-with-one-count-of-positions", "isolation", "L4", TRAINER,
          PACKED % '"position_ids": torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)[None]',
          ("do not restart", "changes the states"), recipe=SFT, argv=("--packing",), source="LLM-07 huggingface/trl#3910",
          harm="samples attend to each other"),
    Plant("earlier-answers-unscored", "scored", "L2", READ,
          "    answered, chat = chat.answered, pairs.chat(tokenizer, cfg.data)\n"
          "    object.__setattr__(chat, 'example', lambda p, c: {'input_ids': (a := chat.ask(chat.turns(p), p)) + chat.answer(c),\n"
          "                                                      'labels': [-100] * len(a) + chat.answer(c)})\n" + READ,
          ("unscored",), recipe=SFT, argv=("--data.path", CONVERSATIONS), source="huggingface/trl assistant_only_loss",
          harm="only the last answer of a conversation is learnt"),
]  # fmt: skip
FOUR = ("--load-in-4bit",)
WHOLE = "            whole = loading.merged(path, folder, base=base)\n"
PLANTS += [
    Plant("qlora-base-in-full-precision", "four-bit", "C14", LOADED, "loading.load(path, dtype)\n",
          ("0% of the weights are in four bits", "quantization_config"), recipe=SFT, argv=FOUR,
          source="LLM-17 unslothai/unsloth#5344", harm="four times the memory that was planned with"),
    Plant("qlora-some-layers-in-full-precision", "four-bit", "C14", MODEL,
          "    for block, own in zip(model.model.layers, loading.load(path, dtype).model.layers, strict=True):\n"
          "        block.mlp.up_proj = own.mlp.up_proj\n" + MODEL,
          ("of the weights are in four bits", "experts"), recipe=SFT, argv=FOUR,
          source="LLM-17 bitsandbytes-foundation/bitsandbytes#1849", harm="most of a mixture of experts stays in 16 bits"),
    Plant("qlora-scales-of-another-load", "four-bit", "C14", MODEL,
          "    for layer in quantized.packed(model).values():\n        layer.weight.quant_state.offset.zero_()\n" + MODEL,
          ("scales are off", "scales that were not loaded"), recipe=SFT, argv=FOUR,
          source="LLM-18 bitsandbytes-foundation/bitsandbytes#1946", harm="adapters learn to repair weights that nobody else has"),
    Plant("qlora-weights-of-another-layer", "four-bit", "C14", MODEL,
          "    first, second = (block.self_attn.q_proj for block in model.model.layers[:2])\n"
          "    first.weight, second.weight = second.weight, first.weight\n" + MODEL,
          ("q_proj", "weights of another model or layer"), recipe=SFT, argv=FOUR, source="C14", harm="as above"),
    Plant("qlora-scales-move", "wiring", "C3", TRAINER,
          override("training_step(self, model, inputs, num_items_in_batch=None)",
                   "next(iter(quantized.packed(model).values())).weight.quant_state.absmax[:1].add_(1)",
                   "return super().training_step(model, inputs, num_items_in_batch)"),
          ("frozen tensors moved", "absmax"), recipe=SFT, argv=FOUR, source="LLM-18", harm="no checkpoint holds them"),
    Plant("qlora-adapters-in-bf16", "accumulation", "C10", "        p.data = p.data.float()  #", "        pass  #",
          ("gradient against the whole batch",), recipe=SFT, argv=FOUR, source="GEN-11 huggingface/trl PR#1644",
          harm="gradients and updates of the adapters are rounded to eight bits"),
    Plant("qlora-merged-into-the-file", "merged", "L5", WHOLE, WHOLE.replace("base=base", "base=None"),
          ("weights of its file",), recipe=SFT, argv=(*FOUR, "--merge-adapters"), source="LLM-19 huggingface/peft#2105",
          harm="the export is a model that was never trained"),
    Plant("qlora-merged-and-packed-again", "merged", "L5", WHOLE,
          "            from peft import PeftModel\n\n"
          "            packed = quantized.load(path, torch.float32, run.device)\n"
          "            packed = PeftModel.from_pretrained(packed, folder).merge_and_unload()\n"
          "            whole = packed.dequantize()\n",
          ("packed into four bits again",), recipe=SFT, argv=(*FOUR, "--merge-adapters"), source="LLM-19 huggingface/peft#2321",
          harm="what the adapters changed is rounded away"),
    Plant("sft-served-without-its-system", "exported", "L5",
          "formats.system(cfg.data.system, cfg.data.path, pairs.SYSTEM))\n\n\ndef exports",
          '"")\n\n\ndef exports', ("asks the export in another way than training",), recipe=SFT, source="common (default system message at serving)",
          harm="the model in use reads other prompts than the model in training"),
    Plant("lora-merged-twice", "merged", "L5", WHOLE,
          "            base = loading.merged(path, folder)\n" + WHOLE,
          ("merged twice",), recipe=SFT, argv=("--merge-adapters",), source="L5", harm="the export answers too surely, or breaks"),
]  # fmt: skip
RELATIVES = [p.id for p in PLANTS if p.id != "eos-masked-as-pad"]  # each builds a language model several times
