"""Loops over an environment's steps: observations that are never replaced, actions that are never read, stored observations that are one array."""

import pytest
import torch
from trainworthy.guard.checks import names
from trainworthy.guard.measures.control.same_rows import SameRows

from tests.conftest import patched

LOOP = """
def play(env, agent, memory):
    state, total, done = env.reset(), 0.0, False
    while not done:
        action = agent.act(state)
        next_state, reward, done, info = env.step(action)
        memory.append((state, action, reward, next_state, done))
        state = next_state
        total += reward
    return total


def learn(net, target_net, optimizer, memory):
    states, actions, rewards, next_states, dones = zip(*memory)
    actions = torch.tensor(actions)
    values = net(torch.stack(states)).gather(1, actions[:, None]).squeeze(1)
    with torch.no_grad():
        goal = torch.tensor(rewards) + 0.9 * target_net(torch.stack(next_states)).max(1).values
    loss = (values - goal).pow(2).mean()
    loss.backward()
    optimizer.step()


play(None, None, None)
learn(None, None, None, None)
"""
KEPT = ("        state = next_state\n", "")
STEP = "next_state, reward, done, info = env.step(action)"
GATHERED = ".gather(1, actions[:, None]).squeeze(1)"
HIGHEST = (GATHERED, ".max(1).values")
FAULTS = {"kept": [KEPT], "kept, action within": [KEPT, ("env.step(action)", "env.step(agent.act(state))")],
          "kept, with info": [KEPT, ("state, total, done = env.reset(), 0.0, False", "done = False\n    state, _ = env.reset(seed=1)")],
          "highest": [HIGHEST], "highest, by name": [HIGHEST, ("(1).values\n    with", "(dim=1)[0]\n    with")]}  # fmt: skip
MEANT = {"healthy": [], "set in place": [("        state = next_state\n", "        state[:] = next_state\n")],
         "updated": [("        state = next_state\n", "        state.update(next_state)\n")],
         "one name": [KEPT, (STEP, STEP.replace("next_state", "state")), ("reward, next_state,", "reward, state,")],
         "one step from a state": [KEPT, ("    while not done:\n", "    while not done:\n        state = env.reset()\n")],
         "every action from one state": [KEPT, ("action = agent.act(state)", "action = total")],
         "another environment": [KEPT, ("env.step(", "copy.step(")],
         "not looked at": [KEPT, (STEP, STEP.replace("next_state", "_"))],
         "highest without a gradient": [(GATHERED, ".max(1).values.detach()")],
         "of states": [(".gather(1, actions[:, None])", "")]}  # fmt: skip


def cause(folder, changes) -> str:
    script = folder / "train.py"
    script.write_text(patched(LOOP, *changes))
    return names.check(script).get("cause") or ""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path, name):
    expected = "the new observation is never made" if name.startswith("kept") else "the actions that were taken"
    assert expected in cause(tmp_path, FAULTS[name])


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_is_quiet(tmp_path, name):
    assert not cause(tmp_path, MEANT[name])


def replayed(states, next_states, targets, times=24) -> SameRows:
    found, generator = SameRows(), torch.Generator().manual_seed(0)
    for _ in range(times):
        row = torch.rand(1, 4, generator=generator).expand(32, 4)
        mixed = torch.rand(32, 4, generator=generator)
        found.root(row if states else mixed, True)
        found.root(row if next_states else mixed, False)
        found.compared(torch.zeros(32), torch.rand(32, generator=generator) if targets else torch.ones(32))
    return found


def test_one_array_in_all_places_of_a_replay_memory():
    measured, reason = replayed(True, True, True).fault()
    assert "24 training batches" in measured
    assert "keep copies" in reason


@pytest.mark.parametrize(("states", "next_states", "targets", "times"), [
    (False, False, True, 24), (True, False, True, 24), (False, True, True, 24), (True, True, False, 24), (True, True, True, 6)])  # fmt: skip
def test_other_batches_are_no_fault(states, next_states, targets, times):
    assert replayed(states, next_states, targets, times).fault() is None
