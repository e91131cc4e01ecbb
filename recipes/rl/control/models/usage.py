"""The Python code of an export's card that plays an episode with it: torch and gymnasium alone."""

from typing import Any

PLAY = """import json

import gymnasium
import torch

export = "export"  # the run's folder export/, wherever it is now
config = json.load(open(f"{{export}}/config.json"))
policy = torch.export.load(f"{{export}}/model.pt2").module()
env = gymnasium.make(config["env"])
observation, _ = env.reset(seed=0)
total, over = 0.0, False
while not over:
    row = torch.as_tensor(observation, dtype=torch.float32).reshape(1, -1)
    with torch.no_grad():
        output = policy(row){first}[0]
    {action}
    observation, reward, terminated, truncated, _ = env.step(action)
    total, over = total + float(reward), terminated or truncated
print(f"return {{total:g}}")"""
DISCRETE = """action = int(output.argmax()) + config["first_action"]"""
CONTINUOUS = """low, high = torch.tensor(config["low"]), torch.tensor(config["high"])
    action = (low + (1 + output[: len(low)].clamp(-1, 1)) / 2 * (high - low)).reshape(env.action_space.shape).numpy()"""


def card(env: str, *, discrete: bool, stack: int, memory: int = 0, several: bool = False) -> dict[str, Any]:
    """Return the header of the export's model card (`core.Stage.model_card`). `several`: the program returns a tuple, the actions first.
    There is no code for stacked observations and recurrent policies: `config.json` says what such a program reads."""
    about = {"pipeline_tag": "reinforcement-learning", "data": env}
    if stack > 1 or memory:
        return about
    return about | {"usage": PLAY.format(first="[0]" * several, action=DISCRETE if discrete else CONTINUOUS)}
