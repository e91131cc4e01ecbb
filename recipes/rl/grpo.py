"""Group relative policy optimisation (Shao 2024): train a language model on rewards that can be checked, with TRL's GRPOTrainer.

tiny  SmolLM2-135M learns to add two two-digit numbers from right-or-wrong rewards; LoRA, two CPU cores, minutes.
full  SmolLM2-360M-Instruct on `--data.path FILE` (`prompt`, `answer`); an accelerator. The same code path.

The reward function is tested before training. Groups with equal rewards give no gradient and are counted. An answer ends with its
end token, which is scored; nothing after it is. Held-out questions are answered greedily and scored by the last number, because
the training reward also rises if answers only become more certain. With `--beta`, the reference is the initial model, also with
`--init-from`; with `--target-kl`, too, the coefficient adapts. `--shuffle-rewards` is the control experiment.
"""

import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from trainworthy.core.adapters import hosted
from trainworthy.core.base.config import Optim, RunSettings, Train
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.errors import Stop
from trainworthy.core.data.loader import Stream
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import View
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.llm.models import loading, speaking
from trainworthy.recipes.rl.language import kl_control, means
from trainworthy.recipes.rl.language.data import problems
from trainworthy.recipes.rl.language.evaluation import held_out
from trainworthy.recipes.rl.language.gates import grpo as gates
from trainworthy.recipes.rl.language.gates import grpo_monitors
from trainworthy.recipes.shared import hub, language_models

from trainworthy import core


# ------------------------------------------------------------------------------------------------------------- settings
@dataclass
class Config(loading.LoRA, core.Config):
    """Settings of rl/grpo. An iteration, which counts as an epoch, is a batch of answers and the updates on it: --train.epochs
    counts iterations, --train.batch-size the answers of one."""

    data: problems.Source = field(default_factory=problems.Source)
    SEARCH_RANGES = "beta=1e-3:0.2 epsilon=0.1:0.4 temperature=0.6:1.4 num_iterations=1:4"
    model: str = "smollm2"
    """`smollm2` (135M, from a package), a folder that `from_pretrained` reads, or `owner/name` on the hub."""
    attention: loading.Attention = "auto"
    """Attention implementation; `auto` is transformers' own choice. The last two need an accelerator."""
    chat_template: str = ""
    """File with a chat template that replaces the model's own, or `trl:NAME` for one that TRL ships."""
    eos_token: str = ""
    """Token that ends an answer, if it differs from the tokenizer's eos and the template does not show it."""
    reward: str = "exact"
    """`exact` (1 for the right last number, else 0), or your own function as `file.py:function` or `module:function`. It is
    called with lists of texts as `prompts`, `completions` and `answer`, and returns a list of numbers. Several as their weighted
    sum: `exact=1,rewards.py:short=0.2`."""
    num_generations: int = 8
    """Answers per question (the group size). An answer's advantage is relative to its group."""
    num_iterations: int = 1
    """Updates on each batch of answers. With one, the ratio is 1 and clipping has no effect."""
    epsilon: float = 0.2
    """Clipping range of the probability ratio of a token."""
    beta: float = 0.0
    """KL coefficient towards the reference (per nat and token); 0: no reference, and no KL is measured."""
    target_kl: float = 0.0
    """Target KL to the reference in nats per token: `--beta` starts as given and adapts to it (Ziegler 2019). 0: it stays."""
    kl_coef_rate: float = 0.1
    """Maximum relative change of the KL coefficient per iteration, with `--target-kl`."""
    temperature: float = 1.0
    """Sampling temperature of training answers. Held-out questions are answered greedily."""
    max_new_tokens: int = 6
    """Maximum number of tokens in an answer, including the end token."""
    metric: str = "accuracy"
    """Metrics of greedy answers to held-out questions, separated by commas; the first selects the best checkpoint: accuracy,
    reward (that of `--reward`), or one of llm/sft's: exact, f1, rouge, bleu, chrf, your own `module:function`."""
    shuffle_rewards: bool = False
    """Control experiment: each answer gets another answer's reward, so no reward can teach anything. The gates refuse it."""
    stop_hacked: bool = True
    """Stop a run whose reward rises while held-out answers fall, or whose groups, lengths, entropy or KL collapse."""
    rehearsed: int = 2
    """Questions per iteration in a gate's rehearsal (for groups of four: twice as many). Equal rewards have no gradient."""
    merge_adapters: bool = False
    """Also export the full model with merged adapters."""

    def __post_init__(self):
        self.model = hub.folder(self.model)


def tiny() -> Config:
    """SmolLM2-135M on two CPU cores: 24 iterations of 4 sums, 8 answers each."""
    return Config(
        train=Train(epochs=24, batch_size=32, eval_batch_size=50, eval_every=12),
        optim=Optim(lr=5e-4, warmup=0.1, weight_decay=0.0),
        run=RunSettings(save_every=10, log_every=1),
    )


def full() -> Config:
    """GSM8K from the hub (7,473 questions, MIT), or --data.path FILE; `examples/questions.jsonl` is a small one of that kind."""
    return Config(
        data=problems.Source(path="hub:openai/gsm8k:main", columns="prompt=question", style="chat", shots=0, max_prompt=512, held_out=500),
        model="HuggingFaceTB/SmolLM2-360M-Instruct",
        lora_rank=16,
        max_new_tokens=512,
        rehearsed=16,
        train=Train(epochs=500, batch_size=256, accumulate=16, eval_batch_size=64, eval_every=50, precision="bf16"),
        optim=Optim(lr=2e-5, warmup=0.05, weight_decay=0.0),
        run=RunSettings(save_every=25),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- data
def read(cfg: Config, asker: problems.Asker, rows: tuple, context: float) -> dict[str, problems.Problems]:
    """The questions to learn from and those held out, without what is too long."""
    data = {}
    *splits, bad = rows
    for name, some in zip(("questions", "val", "test"), splits, strict=True):
        if not some and name == "test":
            continue
        kept, notes = problems.usable(some, asker, name, context=context, new=cfg.max_new_tokens)
        data[name] = problems.Problems(kept)
        data[name].notes = {f"left out of {name}": notes} if notes else {}
    data["questions"].notes |= {"rows": "; ".join(bad)} if bad else {}
    data["val"].notes |= problems.answer_notes(data["val"], asker, cfg.max_new_tokens)
    return data


# ---------------------------------------------------------------------------------------------------------------- model
def make_trainer(cfg: Config, run: core.Run, path: str, asker: problems.Asker, reward: problems.Reward):
    """TRL's trainer, as its documentation builds it: model, reward, settings; the questions come from core's stream."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    loading.score_what_counts()
    model = loading.load(path, loading.kept_in(cfg.lora_rank, run.precision), dropout=False)
    loading.attend(model, cfg.attention, run.device)
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = asker.ends  # the trainer ends answers where the model declares their end
    args = GRPOConfig(
        output_dir=tempfile.gettempdir(),  # core saves, the trainer writes nothing
        per_device_train_batch_size=cfg.train.batch_size // cfg.train.accumulate // run.world,
        gradient_accumulation_steps=cfg.train.accumulate,
        num_generations=cfg.num_generations,
        num_iterations=cfg.num_iterations,
        max_completion_length=cfg.max_new_tokens,
        temperature=cfg.temperature,
        epsilon=cfg.epsilon,
        router_aux_loss_coef=0.0,  # a mean over a micro-batch: the loss would depend on the cut
        beta=cfg.beta,
        use_bias_correction_kl=True,
        loss_type="dapo",  # a mean over all tokens of an iteration: independent of the micro-batches
        scale_rewards="group",
        bf16=False,  # core's autocast: --train.precision
        use_cpu=run.device.type == "cpu",
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
    shape = Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})
    trainer = GRPOTrainer(model=loading.adapted(model, cfg, exact=True), reward_funcs=reward, args=args, train_dataset=shape,
                          processing_class=asker.tokenizer)  # fmt: skip
    model.generation_config.eos_token_id = ends  # the export keeps the model's own end tokens
    return trainer


# ---------------------------------------------------------------------------------------------------------------- stage
def grpo(cfg: Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
    """The one stage of this recipe."""
    if cfg.train.batch_size % (cfg.num_generations * run.world) or cfg.num_generations < 2:
        raise core.UserError("answers do not come in whole groups", got=f"{cfg.train.batch_size} answers, groups of {cfg.num_generations}",
                             needed=f"--train.batch-size as a multiple of --num-generations (2 or more) x {run.world} processes")  # fmt: skip
    kl_control.checked(cfg.beta, cfg.target_kl, cfg.kl_coef_rate)
    path = loading.locate(cfg.model)
    tokenizer = loading.tokenizer(path, cfg.chat_template, cfg.eos_token) if cfg.data.style == "chat" else loading.plain(path)  # fmt: skip
    rows = problems.read(cfg.data)
    asker = problems.Asker(tokenizer, cfg.data, rows[0])

    def fail(reason: str) -> Exception:
        """In training the run stops and keeps what it saved; in a gate it is what the gate has found."""
        return ValueError(reason) if run.rehearsal else Stop(reason)

    function = problems.load(cfg.reward)
    problems.tried(problems.guarded(function, cfg.reward, core.UserError), rows[1])
    declared = problems.guarded(function, cfg.reward, fail)
    scorer = held_out.HeldOut(cfg.metric, declared, cfg.reward, asker.put)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft and TRL still use names that transformers 5.23 deprecates
        reward = problems.of_others(declared) if cfg.shuffle_rewards else declared
        trainer = hosted.built(lambda: make_trainer(cfg, run, path, asker, reward))
    trainer.optimizer = core.make_optimizer(trainer.model, cfg.optim)
    controller = kl_control.adapted(trainer, cfg) if cfg.target_kl else None
    data = read(cfg, asker, rows, language_models.context(trainer.model.config))
    seen = metrics.Seen()
    start: dict[str, Tensor] = {}  # the trained weights of --init-from, before training
    stream = Stream(len(data["questions"]), cfg.run.seed, order=data["questions"].order)

    def ask(step: int) -> list[dict]:
        """This process's questions, each repeated for every answer. They depend only on (seed, step)."""
        trainer.beta = controller.value if controller else cfg.beta  # saved, so a resume continues it
        n = cfg.train.batch_size // cfg.num_generations
        if run.rehearsal:  # a gate that only looks at rates asks for less than a group: one is enough
            whole = (run.rehearsal.batch_size or cfg.num_generations) >= cfg.num_generations
            n = min(n, max(cfg.rehearsed * max(1, 8 // cfg.num_generations) if whole else 1, run.world))
        keys = stream.keys(step * n, (step + 1) * n)[run.rank * n // run.world : (run.rank + 1) * n // run.world]
        rows = [data["questions"].get(i, None) for _, i in keys for _ in range(cfg.num_generations)]
        return [{**row, "question": row["prompt"], "prompt": asker.put(row["prompt"])} for row in rows]

    def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
        """Sum over tokens, or answers: the trainer's own is a mean over the one or the other."""
        inputs = {**batch, "num_items_in_batch": batch["completion_mask"].sum() * run.world}
        mean = hosted.loss(trainer, model, inputs, accumulate=trainer.args.steps_per_generation)
        return {"loss": means.counts(trainer.args.loss_type, batch)["loss"] * mean}

    def begin() -> None:
        """The reference is what the policy is when training begins, with `--init-from` too."""
        own = dict(trainer.model.named_parameters())
        if cfg.init_from and not run.rehearsal:
            start.update({n: p.detach().clone() for n, p in own.items() if p.requires_grad})
        for name, p in own.items():
            if ".ref." in name:
                p.data.copy_(own[name.replace(".ref.", ".default.")])
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(trainer.model.state_dict())

    def generate(model: nn.Module, prompts: list[str]) -> list[tuple[str, int, bool]]:
        """(answer, its tokens, did it end by itself?) to each prompt, greedily and padded left."""
        inputs = [asker.ids(p) for p in prompts]
        found = loading.generate(model, inputs, pad=tokenizer.pad_token_id, ends=asker.ends, most=cfg.max_new_tokens)
        return [(tokenizer.decode(ids, skip_special_tokens=True), len(ids), ended) for ids, ended in found]

    def evaluate(model: nn.Module, data: core.Data) -> dict[str, float]:
        table = [row for batch in run.batches(data) for row in scorer.rows(batch, generate(model, batch["prompt"]))]
        each = to_double(run.gather(torch.tensor(table, device=run.device, dtype=torch.float32))).unbind(1)
        return seen.means(dict(zip(scorer.columns, each, strict=True)))

    def baselines() -> dict[str, dict[str, float]]:
        found = {"the commonest answer": {"accuracy": problems.majority(data["questions"].rows, data["val"].rows)}}
        untrained = trainer.model if cfg.lora_rank else loading.load(path, torch.bfloat16).to(run.device)
        with trainer.model.disable_adapter() if cfg.lora_rank else nullcontext(), evaluating(untrained), run.autocast():
            found["untrained, the same prompts"] = evaluate(untrained, data["val"])
        if start:
            with evaluating(trainer.model), run.autocast(), loading.exchanged(trainer.model, start):
                found["where it started"] = evaluate(trainer.model, data["val"])
        return found

    def predict(model: nn.Module, batch: dict) -> list[core.Tile]:
        answers = zip(batch["prompt"], generate(model, batch["prompt"]), batch["answer"], strict=True)
        return [core.Tile(f"{asker.chat.last_text(p)} -> {text.strip()}{'' if ended else ' ...'} ({due})", score=float(problems.right(text, due)))
                for p, (text, _, ended), due in answers]  # fmt: skip

    def figures(model: nn.Module, data: core.Data) -> dict:
        some = View(data, range(min(24, len(data))))
        return {"Answers to held-out questions": [t for batch in run.batches(some) for t in predict(model, batch)]}

    def export(folder: Path) -> None:
        """The adapter (or the model) as `from_pretrained` of peft (or transformers) reads it, and the tokenizer."""
        loading.export(trainer.model, tokenizer, folder)
        if cfg.lora_rank and cfg.merge_adapters:
            loading.export(loading.merged(path, folder), tokenizer, folder / "merged")
        loading.complete_export(folder, path, ends=asker.ends, pad=tokenizer.pad_token_id, most=cfg.max_new_tokens)

    # Adapters start at zero or come from the file of --init-from. No file holds the reference's.
    new = tuple(n for n, _ in trainer.model.named_parameters() if ".ref." in n or ("lora_" in n and not cfg.init_from))
    return hosted.host(
        trainer,
        run,
        name="grpo",
        data=data,
        ask=ask,
        passes=cfg.num_iterations,
        loss=loss,
        counts=lambda batch: means.counts(trainer.args.loss_type, batch),
        frozen_modules={} if trainer.ref_model is None else {"reference": trainer.ref_model},
        shard_frozen=() if trainer.ref_model is None else ("reference",),
        on_start=begin,
        state={"controller": controller} if controller else {},
        evaluate=evaluate,
        intervals=seen.intervals,
        metric=scorer.metric(),
        expect=core.Expect(
            new_parameters=new,
            frozen=loading.frozen(trainer.model, cfg),
            loss_may_rise="the samples are the policy's own, and advantages sum to nothing",
            schedule="several updates per iteration" if cfg.num_iterations > 1 else "",
            gate_batch_size=8,
        ),
        pretrained=loading.from_file(trainer.model, path),
        gates=gates.gates(gates.Subject(cfg, asker, declared), path),
        monitors=grpo_monitors.monitors(cfg, len(data["val"])),
        baselines=baselines,
        predict=predict,
        figures=figures,
        export=export,
        model_card=loading.model_card(path, cfg.lora_rank, cfg.data.path, chat=cfg.data.style == "chat"),
    )  # fmt: skip


def speaker(cfg: Config, export: Path) -> speaking.Speaker:
    """Return the export for `trainworthy predict` and `chat`: a question is put as in the run, after its solved ones."""
    if cfg.data.style == "chat" and not cfg.data.shots:
        return speaking.chatting(cfg, export, cfg.data.system)
    asker = problems.asker_of(export, cfg.data)
    return speaking.going_on(cfg, export, lambda _, text: asker.ids(text), ends=lambda _: asker.ends)


STAGES = [grpo]


# ----------------------------------------------------------------------------------------------------------------- loop
def train(cfg: Config, run: core.Run, stage: core.Stage) -> None:
    """TRL's own loop over core's iterations; the gates rehearse this very function."""
    hosted.train(run, stage, eval_every=cfg.train.eval_every)


if __name__ == "__main__":
    core.main(__file__)
