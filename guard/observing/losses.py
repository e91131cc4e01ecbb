"""Records calls of loss functions, differences and likelihoods. A part of `observer.Observer`."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from trainworthy.guard.hooks.addresses import address_of, home_of
from trainworthy.guard.hooks.functions import COMPARED
from trainworthy.guard.hooks.trees import tensors
from trainworthy.guard.measures.losses.float_targets import BINARY, SEARCHED, same
from trainworthy.guard.measures.losses.mixing import weigh
from trainworthy.guard.measures.losses.targets import decoder_tokens, describe, forced, of_a_layer, shifts, tokens_of
from trainworthy.guard.measures.models.attention_masks import Masks
from trainworthy.guard.measures.records import CLOSE, current, on_gradient, point

WRITTEN = 400  # class losses that are recorded


class Losses:
    """The events of what a loss is computed from. `Observer` holds the attributes."""

    def loss(self, name: str, input: Any, target: Any, out: Any, kwargs: dict) -> None:
        if not isinstance(input, Tensor) or not isinstance(target, Tensor):
            return
        train = torch.is_grad_enabled() and input.requires_grad
        if not train and torch.is_grad_enabled() and target.requires_grad:
            # A reversed divergence has the gradient there, too, but no logarithms
            logs = name == "kl_div" and not kwargs.get("log_target") and not bool((target >= 0).all())
            self.evidence.turned[name] += name in BINARY or logs
        rows = self.calls if train else self.eval_calls
        if train:
            self.evidence.headed(input, target)
            if name in BINARY or (name == "cross_entropy" and target.is_floating_point()):
                self.evidence.several_labels(target, name not in BINARY)
        if train and self.control is not None:
            self._fit(name, input, target, out)
        if len(rows) >= 400:
            return
        if train and len(rows) < CLOSE:
            self._place(target)
        if train and self.recent and (name == "kl_div" or (target.is_floating_point() and name == "cross_entropy")):
            batch = current(self.recent[-1], self.last_root or ())
            self.soft.note(target.exp() if kwargs.get("log_target") else target, batch)
        if train and len(self.points) < 24 and sum(p.training for p in self.passes) <= 1 and self.last_root is not None:
            self.points += point(target, (*self.last_root[1], *self.last_root[2].values()))
        self.busy = True
        try:
            with torch.no_grad():
                given = (input.detach(), target.detach(), kwargs, self.last_root, input.grad_fn)
                row = {"step": self.steps, **describe(name, *given, self.first_call)}
                rows.append(row)
                if train and len(row.get("distinct", ())) == 1:
                    row["layer"] = of_a_layer(input)
                if train and self.last_root is not None:
                    self._note(row, input, target, out)
        finally:
            self.busy = False

    def _note(self, row: dict, input: Tensor, target: Tensor, out: Any) -> None:
        """Keep what the checks of objectives and of causality need of a class loss in training."""
        given = next((x for x in self.last_root[1] if isinstance(x, Tensor)), None)
        fits = given is not None and target.dim() > 0 and len(given) == len(target)
        row["forced"] = forced(target, *self.last_root)
        if target.dim() == 1 and len(self.calls) <= CLOSE:
            self.evidence.packed.loss(target, self.last_root)
        if row.get("soft"):
            if fits:
                self.evidence.mixed(target, given)
        elif row.get("nll") is not None:
            self.evidence.similar(input)
            if fits and target.dim() == 1 and row["classes"] <= 1000:
                self.evidence.term(input, target, out, given)
            self.evidence.scored(row["nll"], target, self.steps)
            if row.get("masking"):
                self.masked = self.last_root
            row["scores"], row["since"] = address_of(input), self.since
            if self.control is not None:
                weigh(row, out)
            row["home"], row["rows"] = address_of(target), len(target) if target.dim() else 1
            row["root"] = id(self.last_root[0])
            if 1 in (row.get("shift") or ()):
                self.shifted = (*self.last_root, target.detach().flatten(), tokens_of(*self.last_root))
                self.evidence.read(tokens_of(*self.last_root), target.detach())
            elif (
                self.shifted is None
                and (ids := decoder_tokens(target.flatten(), row["ignore"], *self.last_root)) is not None
            ):
                self.shifted = (*self.last_root, target.detach().flatten(), ids)
            elif (
                self.answers is None
                and (ids := decoder_tokens(target.flatten(), row["ignore"], *self.last_root, 0)) is not None
            ):
                self.answers = (*self.last_root, ids)
            elif row.get("shift") == [0] and self.copied is None:
                self.copied = self.last_root
            elif target.dim() == 1 and len(self.calls) <= CLOSE:
                self.classified = self.last_root

    def compared(self, name: str, tensors: tuple) -> None:
        """A loss function of several tensors was called."""
        self.evidence.compared(name, tensors, any(x.requires_grad for x in tensors if isinstance(x, Tensor)))

    def attended(self, mask: Any, *, keeps: bool) -> None:
        """Torch's attention got a mask in training."""
        masks = getattr(self.evidence, "masks", None)
        if mask is not None and self.last_root is not None and torch.is_grad_enabled() and isinstance(masks, Masks):
            with contextlib.suppress(Exception):
                masks.keys(mask, self.last_root[1:], keeps=keeps)

    def log_softmax(self, out: Any) -> None:
        """Logarithms of probabilities were computed, outside of a loss function."""
        if isinstance(out, Tensor) and out.dim() in (2, 3) and out.requires_grad and self.last_root is not None:
            again, self._soft = (id(out), address_of(out)) == self._soft, (id(out), address_of(out))
            if not again:  # the function calls the method
                self._by_gradient(out, self.last_root)
                if out.dim() == 2:
                    self.evidence.softened(out, self.last_root)
                    self._written_out(out, self.last_root)

    def _by_gradient(self, logs: Tensor, root: tuple) -> None:
        """Record the targets of a cross-entropy that the script writes out (label smoothing, `gather`): the entries with the largest gradient,
        of either sign, because preferences lower the probability of some."""
        if self.shifted is not None or self.control is None or self.steps >= CLOSE:
            return

        def derived(grad: Tensor) -> None:
            each = grad.abs().flatten(0, -2)
            flat = torch.where(each.sum(1) > 0, each.argmax(1), -100)
            ids = decoder_tokens(flat, -100, *root)
            if ids is not None and self.shifted is None:
                self.shifted = (*root, flat, ids)
            elif (ids := decoder_tokens(flat, -100, *root, 0)) is not None and self.answers is None:
                self.answers = (*root, ids)
            elif (places := shifts(flat, -100, root)) is not None:
                self.written.append({"shift": places})
                if places == [0] and self.copied is None:
                    self.copied = root

        on_gradient(logs, derived)

    def _written_out(self, logs: Tensor, root: tuple) -> None:
        """Record a cross-entropy that the script writes out (label smoothing, `gather`) if its targets are class numbers of the batch."""
        if self.control is None or not self.recent or len(self.calls) >= WRITTEN:
            return
        at = self.steps

        def derived(grad: Tensor) -> None:
            if self.last_root is not root or self.steps != at or any(r["step"] == at for r in self.calls[-4:]):
                return
            wanted, batch = grad.argmin(1), tree_leaves(current(self.recent[-1], root))
            mine = [x for x in batch if isinstance(x, Tensor) and x.dtype == torch.int64 and x.shape == wanted.shape]
            target = next((x for x in mine if torch.equal(x.to(wanted), wanted)), None)
            if target is None or bool((target == target[0]).all()):
                return
            with torch.enable_grad():
                busy, self.busy = self.busy, True
                value = torch.nn.functional.nll_loss(logs, target.to(wanted))
                self.busy = busy
                self.loss("nll_loss", logs, target.to(wanted), value, {})

        on_gradient(logs, derived)

    def seeded(self, *seed: Any) -> None:
        """A seed of torch, numpy or random was set."""
        if len(self.seeds) < 1000 or seed in self.seeds:
            last, count = self.seeds.get(seed, (-1, 0))
            self.seeds[seed] = (self.backwards, count + (last != self.backwards))

    def log_prob(self, out: Any, value: Any) -> None:
        """A distribution's log-probability was taken."""
        if isinstance(out, Tensor):
            self.evidence.log_prob(out, value)

    def _fit(self, name: str, prediction: Tensor, target: Tensor, out: Any = None) -> None:
        """Record how far a loss without class numbers falls, and whether its targets are in the order of the inputs."""
        self.busy = True
        try:
            with torch.no_grad(), contextlib.suppress(Exception):
                self.pairing.loss(name, target, list(reversed(self.fits.batches)), self.steps)
            with torch.no_grad(), contextlib.suppress(Exception):  # one of the two may fail alone
                if name in (*BINARY, "ctc_loss", "difference") or name in COMPARED:
                    self.fits.note(name, prediction, target, out, self.first_call, self.steps)
        finally:
            self.busy = False

    def regressed(self, prediction: Any, target: Any, name: str = "difference") -> None:
        """A difference of a prediction and a float target was taken."""
        if isinstance(prediction, Tensor) and isinstance(target, Tensor) and torch.is_grad_enabled():
            if prediction.requires_grad != target.requires_grad:
                first, second = (prediction, target) if prediction.requires_grad else (target, prediction)
                if self.control is not None:
                    self._fit(name, first, second)
                if name != "difference":
                    self.evidence.output_ranges.note(first, second)
            self.evidence.regressed(prediction, target, self.last_root, self.inner)

    def differentiated(self, inputs: Any) -> None:
        """`torch.autograd.grad` was called for `inputs`."""
        self.input_differentiated(tensors(inputs))

    def input_differentiated(self, inputs: list[Tensor]) -> None:
        """Note a class loss that is differentiated by something with as many rows as there are targets."""
        row = self.calls[-1] if self.calls and self.groups else {}
        if not row.get("home") or row["step"] != self.steps:
            return
        owned = {id(p) for g in self.groups.values() for p in g.parameters} if inputs else set()
        if any(x.dim() > 1 and len(x) == row["rows"] and id(x) not in owned for x in inputs):
            self.evidence.input_gradient(row["nll"], row["home"], self.steps)

    def _place(self, target: Tensor) -> None:
        """Note which entry of the batch the targets of a class loss are: by its memory or, where they were copied (to a device, to
        another type), by its values."""
        home = home_of(target)
        batches = [tree_leaves(b) for b in reversed(self.recent[-1].recent if self.recent else ())]
        entries = [(i, x) for leaves in batches for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        found = next((i for i, x in entries if home_of(x) == home), None)
        if found is None and not target.is_floating_point() and target.numel() <= SEARCHED:
            alike = {i for i, x in entries if x.shape == target.shape and not x.is_floating_point() and same(x, target)}
            found = alike.pop() if len(alike) == 1 else None
        if found is not None:
            self.places[found] = self.places.get(found, 0) + 1

    def difference(self, a: Tensor, b: Tensor, out: Tensor, name: str = "a difference") -> None:
        """A difference of two shapes was taken, or such a loss: (N, 1) and (N,) become (N, N)."""
        if a.dim() in (1, 2) and b.dim() in (1, 2):
            self.evidence.outer.note(a, b, out, name)
