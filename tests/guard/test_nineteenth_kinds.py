"""Kinds of mistakes that the nineteenth set showed: edges of batched graphs, returns in the wrong order, factors that are rates, masks of torch's
own attention, gradients that end."""

import pytest
import torch
from trainworthy.guard.checks import names
from trainworthy.guard.measures.data.graphs import Graphs
from trainworthy.guard.measures.models.attention_masks import Masks
from trainworthy.guard.measures.models.missing_gradients import swept, without
from trainworthy.guard.measures.rates import falls_to
from trainworthy.guard.measures.records import Group

from tests.conftest import patched
from tests.guard import nineteenth_set, nineteenth_set_heldout
from tests.guard.guarding import assert_named
from tests.helpers.patches import patched as script_of

DRAW = torch.Generator().manual_seed(0)


def batch(offset):
    """Eight rings of 5 to 12 nodes; `offset`: what is added to the node numbers of a graph, from the nodes before it and its number."""
    nodes, edges, owner, before = [], [], [], 0
    for k in range(8):
        n = int(torch.randint(5, 13, (1,), generator=DRAW))
        ring = torch.arange(n)
        edges.append(torch.stack([ring, ring.roll(-1)]) + offset(before, k))
        nodes.append(torch.rand(n, 3, generator=DRAW))
        owner.append(torch.full((n,), k))
        before += n
    return torch.cat(nodes), torch.cat(edges, 1), torch.cat(owner)


@pytest.mark.parametrize(("offset", "cause"), [
    (lambda before, k: before, ""), (lambda before, k: 0, "adds no offset"), (lambda before, k: 5 * k, "wrong offset"),
])  # fmt: skip
def test_edges_of_a_batch_of_graphs_belong_to_their_nodes(offset, cause):
    one = Graphs()
    for _ in range(6):
        one.call(batch(offset), {})
    found = one.fault()
    assert (found is not None) == bool(cause)
    assert found is None or cause in found[1]


def test_edges_that_join_graphs_on_purpose_and_other_pairs_of_rows_are_left_out():
    one = Graphs()
    for _ in range(6):
        x, edges, owner = batch(lambda before, k: before)
        one.call((x, torch.stack([edges[0], (edges[1] + 20) % len(x)]), owner), {})  # every edge leads to another graph
        one.call((x, torch.randint(0, 9, (2, 7)), torch.zeros(len(x), dtype=torch.int64)), {})  # one graph
        one.call((torch.randint(0, 9, (2, 7)), torch.arange(2)), {})  # two rows of tokens
    assert one.fault() is None


LOOP = """
def learn(model, optimizer, rewards, masks, log_probs, value, gamma, env, dist):
    action = dist.sample()
    env.step(action.numpy())
    log_probs.append(dist.log_prob(action))
    returns, R = [], value
    for t in reversed(range(len(rewards))):
        R = rewards[t] + gamma * R * masks[t]
        returns.insert(0, R)
    loss = -(torch.stack(log_probs) * torch.stack(returns)).mean()
    loss.backward()
    optimizer.step()


learn(*[None] * 9)
"""
INSERT, LOOPED = "returns.insert(0, R)", "reversed(range(len(rewards)))"
ORDERS = {
    "healthy": ([], ""),
    "from the first step": ([(LOOPED, "range(len(rewards))")], "from the last step to the first"),
    "never turned": ([(INSERT, "returns.append(R)")], "return of another one"),
    "turned afterwards": ([(INSERT, "returns.append(R)"), ("    loss = -", "    returns.reverse()\n    loss = -")], ""),
    "turned by a slice": ([(INSERT, "returns.append(R)"), ("torch.stack(returns)", "torch.stack(returns[::-1])")], ""),
    "all lists back to front": ([(INSERT, "returns.append(R)\n        order.append(t)")], ""),
    "a running sum of the past": ([(LOOPED, "range(len(rewards))"), (INSERT, "returns.append(R)")], ""),
    "another draw": ([("dist.log_prob(action)", "dist.log_prob(dist.sample())")], "dist.log_prob(action) is meant"),
    "an entropy by draws": ([("env.step(action.numpy())", "print(action)"), ("dist.log_prob(action)", "dist.log_prob(dist.sample())")], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_names_reads_the_order_of_returns(name, tmp_path):
    changes, cause = ORDERS[name]
    (tmp_path / "train.py").write_text(patched(LOOP, *changes))
    found = names.check(tmp_path / "train.py")
    assert found["ok"] is not bool(cause), found
    assert cause in (found.get("cause") or "")


HEADS = """
def train(model, criterion, optimizer, loader):
    for x, targets in loader:
        optimizer.zero_grad()
        loss = 0
        for k, logits in enumerate(model(x)):
            loss = loss + criterion(logits, targets[:, k])
        loss.backward()
        optimizer.step()


train(None, None, None, None)
"""
SUM = "loss = loss + criterion(logits, targets[:, k])"
SUMS = {
    "healthy": (SUM, False),
    "added in place": ("loss += criterion(logits, targets[:, k])", False),
    "replaced": ("loss = criterion(logits, targets[:, k])", True),
    "a refinement": ("x = model(x)\n            loss = criterion(x, targets[:, k])", False),
    "one of them": ("if k == 2:\n                loss = criterion(logits, targets[:, k])", False),
    "each by itself": ("loss = criterion(logits, targets[:, k])\n            loss.backward(retain_graph=True)", False),
}


@pytest.mark.parametrize("name", SUMS)
def test_names_reads_a_loss_that_is_replaced_in_a_loop(name, tmp_path):
    line, wrong = SUMS[name]
    (tmp_path / "train.py").write_text(patched(HEADS, (SUM, line)))
    found = names.check(tmp_path / "train.py")
    assert found["ok"] is not wrong, found
    assert ("`loss += ...` is meant" in (found.get("cause") or "")) == wrong


def test_a_factor_that_is_a_rate_after_the_warm_up():
    def factors(after, warm_up=20, hold=0):
        return [
            (k + 1) / warm_up if k < warm_up else 1.0 if k < warm_up + hold else after(k - warm_up) for k in range(200)
        ]

    assert falls_to(factors(lambda k: 3e-3 * (1 - k / 180)), 3e-3) == 20
    assert not falls_to(factors(lambda k: 1 - k / 180), 3e-3)
    assert not falls_to(factors(lambda k: 0.1, hold=30), 0.1)  # decay by tenths
    assert not falls_to([0.1 ** (k // 30) for k in range(200)], 0.1)
    assert not falls_to([1.0] * 200, 0.1)


@pytest.mark.parametrize("turned", [False, True])
def test_masks_of_torchs_attention(turned):
    one = Masks()
    for _ in range(4):
        ids = torch.randint(1, 100, (8, 12), generator=DRAW)
        ids[:4, 7:] = 0
        hidden = (ids == 0) != turned
        one.keys(hidden, (ids,), keeps=False)
        one.keys(torch.zeros(8, 12).masked_fill(hidden, float("-inf")), (ids, None), keeps=False)
        one.keys(~hidden[:, None, None], ((), {"src": ids}), keeps=True)
        one.keys(torch.ones(12, 12).tril().bool(), (ids,), keeps=True)
        one.keys(hidden[:, :9], (ids,), keeps=False)  # of other places
    assert (one.fault() is not None) == turned


PLANTED = {p.id: p for half in (nineteenth_set, nineteenth_set_heldout) for p in half.BUGS}
CASES = {
    "molecules_mpnn--no-offset": ("samples", "adds no offset"),
    "molecules_mpnn--offset-of-edges": ("samples", "wrong offset"),
    "digits_trainer--factor-is-rate": ("schedule", "where a factor of the base rate is meant"),
    "photo_deblur--relu-at-the-end": ("gradients", "dead activations"),
}


@pytest.mark.verify
@pytest.mark.parametrize("id", CASES)
def test_guard_names_the_cause(id, tmp_path):
    assert_named(script_of(PLANTED[id]), tmp_path, *CASES[id])


@pytest.mark.parametrize(("steps", "empty", "reached", "cause"), [
    (40, 40, 10, "zero_grad() is called between"), (40, 40, 0, "another model"), (40, 30, 0, "zero_grad() is called between"),
])  # fmt: skip
def test_steps_without_a_gradient_have_two_causes(steps, empty, reached, cause):
    group = Group(lambda: None, set(), set())
    group.steps, group.empty, group.reached = steps, empty, reached
    assert cause in without(group, flat=False)
    assert swept(group) == (reached > 0)
