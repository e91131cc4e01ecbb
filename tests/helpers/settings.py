"""Settings that make each recipe small, for every test that runs all of them."""

SHORT: dict[str, tuple[str, ...]] = {
    "diffusion/flow": ("--train.epochs", "0.3", "--run.save-every", "0.1", "--sampling.every", "50", "--sampling.num-inference-steps", "4"),
    "diffusion/latent": ("--autoencoder.epochs", "0.3", "--latent.epochs", "0.3", "--run.save-every", "0.1",
                         "--sampling.every", "50", "--sampling.num-inference-steps", "4"),
    "diffusion/pixel": ("--train.epochs", "0.3", "--run.save-every", "0.1", "--sampling.every", "50", "--sampling.num-inference-steps", "4"),
    "diffusion/text": ("--train.epochs", "0.3", "--run.save-every", "0.1", "--sampling.every", "50", "--sampling.num-inference-steps", "4"),
    "distill/compress": ("--data.sentences", "60", "--train.epochs", "2", "--train.eval-every", "2", "--run.save-every", "0.2"),
    "distill/logits": ("--alone.epochs", "10", "--alone.save-every", "1",
                       "--distilled.epochs", "0.5", "--distilled.save-every", "0.1"),
    "distill/whisper": ("--data.sentences", "60", "--features.epochs", "4", "--task.epochs", "3", "--run.save-every", "0.1"),
    "llm/dpo": ("--train.batch-size", "2", "--train.epochs", "0.004", "--run.save-every", "0.001", "--data.held-out", "4"),
    "llm/pretrain": ("--train.epochs", "0.03", "--run.save-every", "0.005", "--data.stride", "127"),
    "llm/reward": ("--train.batch-size", "2", "--train.epochs", "0.003", "--run.save-every", "0.0005", "--data.held-out", "4"),
    "llm/sft": ("--train.batch-size", "2", "--train.epochs", "0.004", "--run.save-every", "0.001", "--data.held-out", "4"),
    "rl/dqn": ("--train.epochs", "12", "--train.eval-every", "6", "--run.save-every", "1", "--gradient-steps", "8", "--eval-episodes", "10"),
    "rl/grpo": ("--train.batch-size", "8", "--train.epochs", "12", "--train.eval-every", "12", "--run.save-every", "1",
                "--data.held-out", "4"),
    "rl/ppo": ("--train.epochs", "12", "--train.eval-every", "6", "--run.save-every", "1"),
    "rl/rlhf": ("--pretrained", "0.05", "--train.epochs", "12", "--train.eval-every", "6", "--run.save-every", "1",
                "--rollout-batch-size", "32", "--data.held-out", "32"),
    "rl/sac": ("--train.epochs", "12", "--train.eval-every", "6", "--run.save-every", "1", "--gradient-steps", "8", "--eval-episodes", "10"),
    "vision/detect": ("--data.scenes", "160", "--train.epochs", "2", "--train.eval-every", "2", "--run.save-every", "0.3"),
    "vision/segment": ("--train.epochs", "1.2", "--train.eval-every", "1.2", "--run.save-every", "0.2"),
    "vlm/instruct": ("--align.epochs", "0.08", "--instruct.epochs", "0.08", "--unfreeze.epochs", "0.03",
                     "--run.save-every", "0.01", "--data.held-out", "20"),
}  # fmt: skip
"""Settings under which a stage of the recipe takes some ten to thirty steps, where `--train.epochs 0.5` is not that."""
