"""Bugs of vision-language models, planted in a fork of vlm/instruct; the words were fixed before the gates were run."""

from tests.helpers.plant import Plant

VLM = "vlm/instruct"
STAGES = "STAGES = [align, instruct, unfreeze]\n"
ALIGN_RATES = '{"projector": cfg.optim.lr}, start'
INSTRUCT_RATES = 'rates = {"projector": cfg.optim.lr, "language": cfg.language_lr}\n'
LOADED = "model.load_state_dict(previous.model.state_dict())\n"
LOSS = 'return {"answer": rows.nll(model(batch), batch["labels"])}\n'
ENCODER = "encoder, words = vision.load(cfg.encoder, cfg.encoder_layer), language.load(cfg.language, cfg)\n"
FEATURES = "features = self.projector(self.encoder(images))"
EXPORTED = "        net = copy.deepcopy(model).eval().cpu()\n"
FORWARD = "return rows.answer(self.language, self.embedded(batch), batch)\n"
SOURCE = "    return Questions(source,"
FIRST, SECOND = ("--stage", "align"), ("--stage", "instruct")
THIRD = ("--stage", "unfreeze", "--unfreeze.epochs", "0.1")


def after(stage: str, body: str) -> str:
    """STAGES where one stage is changed by `body` once it is made."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    both = STAGES.replace(stage, "changed")
    head = f"def changed(cfg: Config, run: core.Run, previous=None) -> core.Stage:\n    stage = {stage}(cfg, run, previous)\n"
    return f'{head}{lines}    return stage\n\n\nchanged.__name__ = "{stage}"\n{both}'


PLANTS = [
    Plant("vlm-features-viewed", "token-per-feature", "X4", FEATURES,
          "features = self.encoder(images)\n        features = self.projector(features.mT.reshape(features.shape))",
          ("changes", "embeddings", "permute"), recipe=VLM, argv=FIRST, harm="each place mixes channels of many"),
    Plant("vlm-01-places-scored", "answers", "X4", LOSS,
          'labels = batch["ids"].clamp_min(0).masked_fill(batch["segment"] < 0, rows.IGNORE)\n'
          '        return {"answer": rows.nll(model(batch), labels)}\n',
          ("image positions", "only the padding masked"), recipe=VLM, argv=FIRST, source="Transformers-Tutorials#511",
          harm="most of the loss is one trivial token"),
    Plant("vlm-02-frozen-under-no-grad", "wiring", "C3", STAGES, after("align", """
stage.model.encoder.requires_grad_(True)
stage.optimizers["main"].add_param_group({"name": "encoder", "params": [*stage.model.encoder.parameters()]})
stage.model.encoder.forward = torch.no_grad()(stage.model.encoder.forward)"""[1:]),
          ("never got a gradient", "no_grad"), recipe=VLM, argv=FIRST, source="BAAI-DCAI/Bunny#130",
          harm="the encoder is unfrozen on paper alone"),
    Plant("vlm-03-one-table-trains", "towers", "X1", STAGES, after("align", """
stage.model.encoder.stem.bias.requires_grad_(True)
stage.optimizers["main"].add_param_group({"name": "stem", "params": [stage.model.encoder.stem.bias]})"""[1:]),
          ("encoder trains 16 of", "list of names"), recipe=VLM, argv=FIRST, source="hiyouga/LlamaFactory PR#10139",
          harm="what was trained on far more pictures drifts"),
    Plant("language-hot-in-stage-one", "towers", "X1", ALIGN_RATES,
          '{"projector": cfg.optim.lr, "language": cfg.language_lr}, start',
          ("language trains", "should be frozen"), recipe=VLM, argv=FIRST,
          harm="gradients through a random projector spoil the language model"),
    Plant("encoder-in-train-mode", "towers", "X1", "        run.update(stage, step.batches)\n",
          "        stage.model.train()\n        run.update(stage, step.batches)\n",
          ("encoder", "eval mode"), recipe=VLM, argv=FIRST, harm="dropout and statistics of the encoder move"),
    Plant("vlm-04-projector-frozen-with-the-tower", "towers", "X1", INSTRUCT_RATES,
          'rates = {"language": cfg.language_lr}\n', ("projector should learn", "parent"), recipe=VLM, argv=SECOND,
          source="hiyouga/LlamaFactory#6754", harm="the projector stays what stage one left"),
    Plant("vlm-05-places-cut-with-their-features", "image-tokens", "X4", STAGES, after("align", """
for data in stage.data.values():
    whole = data.collate
    data.collate = lambda samples, whole=whole: {
        k: v[:, 8:] if k in ("ids", "labels", "segment", "position") else v for k, v in whole(samples).items()}
stage.model.projector.register_forward_hook(lambda module, args, features: features[:, 7:])"""[1:]),
          ("without 9 image positions", "features with them"), recipe=VLM, argv=FIRST, source="huggingface/trl#5285",
          harm="what stood in the places that are gone is never seen"),
    Plant("answers-cut", "image-tokens", "X4", STAGES, after("align", """
for data in stage.data.values():
    whole = data.collate
    data.collate = lambda samples, whole=whole: {
        k: v[:, :30] if k in ("ids", "labels", "segment", "position") else v for k, v in whole(samples).items()}"""[1:]),
          ("unanswered", "cut"), recipe=VLM, argv=FIRST, harm="a question whose answer is gone costs nothing: its loss is 0"),
    Plant("vlm-06-neighbours-seen", "dependency", "C2", FEATURES,
          FEATURES + "\n        features = features - features.mean(0)", ("batch", "statistics over the batch axis"),
          recipe=VLM, argv=FIRST, harm="an answer depends on the pictures beside its own"),
    Plant("vlm-07-projector-not-loaded", "init", "C14", LOADED,
          'model.load_state_dict({f"module.{k}": v for k, v in previous.model.state_dict().items()}, strict=False)\n',
          ("differ", "projector."), recipe=VLM, argv=SECOND, source="haotian-liu/LLaVA#808",
          harm="stage two begins with a random projector and a language model that learns"),
    Plant("projector-made-anew", "aligned", "X2", INSTRUCT_RATES, INSTRUCT_RATES
          + "    model.projector.layers.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)\n",
          ("before the first step", "loaded"), recipe=VLM, argv=SECOND, harm="stage one was for nothing"),
    Plant("random-encoder", "init", "C14", ENCODER, ENCODER
          + "    encoder.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Conv2d) else None)\n",
          ("differ", "encoder."), recipe=VLM, argv=FIRST, harm="accuracy 28% in an earlier experiment: the blind number"),
    Plant("one-rate-for-all", "rates", "X3", INSTRUCT_RATES,
          'rates = {"projector": cfg.optim.lr, "language": cfg.optim.lr}\n', ("one rate", "language"), recipe=VLM, argv=SECOND,
          harm="the rate of a new projector tears at a trained language model"),
    Plant("language-model-hot", "rates", "X3", INSTRUCT_RATES,
          'rates = {"projector": cfg.optim.lr, "language": 100 * cfg.language_lr}\n', ("moves the language",), recipe=VLM,
          argv=SECOND, harm="what the language model knew is gone after a few steps"),
    Plant("unbalanced-questions", "language-prior", "X5", SOURCE,
          '    ask = source.questions\n    usual = ("one", "no", "red")\n'
          "    source.questions = lambda i: [a for a in ask(i) if a.answer in usual] or ask(i)[:1]\n"
          + SOURCE, ("most common answer", "balanced"), recipe=VLM, argv=FIRST,
          harm="a high score that needs no picture"),
    Plant("one-picture-for-all", "pairs", "X5", FEATURES,
          'features = self.projector(self.encoder(torch.full_like(images, 0.3)))',
          ("picture does not reach",), recipe=VLM, argv=SECOND, harm="answers from the language prior"),
    Plant("answers-seen-ahead", "generation", "C12", FORWARD,
          "rows.seen = lambda segment, dtype: torch.zeros(len(segment), 1, *[segment.shape[1]] * 2, dtype=dtype)\n        "
          + FORWARD,
          ("are right when generated", "not causal"), recipe=VLM, argv=SECOND,
          harm="right answers are copied from the row; asked alone, it says something else"),
    Plant("encoder-hot-in-stage-three", "rates", "X3", '{"encoder": cfg.optim.lr,', '{"encoder": 1e3 * cfg.optim.lr,',
          ("moves the encoder",), recipe=VLM, argv=THIRD, harm="what the encoder learnt from far more pictures is gone"),
    Plant("pictures-normalised-around-the-export", "exported", "C18 X1", FEATURES,
          "images = (images - 0.45) / 0.27\n        " + FEATURES, ("own code changes pictures before them", "vision.pt2"),
          recipe=VLM, argv=SECOND, harm="who loads the export shows it pictures of another range"),
    Plant("older-projector-exported", "exported", "C18 X1", EXPORTED,
          EXPORTED + '        net.load_state_dict({k: v for k, v in start.items() if k.startswith("projector.")}, strict=False)\n',
          ("another encoder or projector", "earlier stage"), recipe=VLM, argv=SECOND, source="haotian-liu/LLaVA#474",
          harm="language model and projector of different stages"),
]  # fmt: skip
RELATIVES = [
    "vlm-01-places-scored", "vlm-features-viewed", "vlm-05-places-cut-with-their-features",
    "vlm-03-one-table-trains",
    "vlm-02-frozen-under-no-grad", "encoder-in-train-mode", "answers-cut", "vlm-04-projector-frozen-with-the-tower",
    "vlm-07-projector-not-loaded", "projector-made-anew", "language-model-hot", "one-picture-for-all", "one-rate-for-all",
    "vlm-06-neighbours-seen", "random-encoder", "language-hot-in-stage-one", "unbalanced-questions", "answers-seen-ahead",
    "encoder-hot-in-stage-three", "pictures-normalised-around-the-export", "older-projector-exported",
]  # fmt: skip
