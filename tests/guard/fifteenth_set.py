"""Bugs of the eighteen setups in scripts/fifteenth, for `trainworthy.check(make_script)` (2026-11-27): ids whose SHA-256 begins with an even byte.

The setups are healthy: twelve `Script`s, four `Loop`s, a Trainer of transformers and an SFTTrainer of TRL. Setups and bugs were written from
docs/own-scripts.md before their author read a gate or a check. A bug counts if the script's own final number is clearly worse, or wrong itself
where the bug is in what it measures. Measured at seed 0 only, some with fewer epochs: `python -m tests.guard.harm diabetes_quantiles ...`.
"""

from tests.helpers.patches import cases_of

case = cases_of(__file__)

BUGS = [
    case("diabetes_quantiles--relu-at-end",
         "        return self.head(self.body(x))\n",
         "        return self.head(self.body(x)).relu()\n",
         "a ReLU behind the head: standardised targets are negative for half of the patients"),
    case("diabetes_quantiles--labels-unshuffled",
         "train_set, val_set = dataset(X_train, y_train), dataset(X_val, y_val)\n",
         "train_set, val_set = dataset(X_train, y[: len(X_train)]), dataset(X_val, y_val)\n",
         "the training rows were shuffled by the split, their targets are those of the file's order"),
    case("cancer_logit--labels-of-first-rows",
         "        self.y = (data.target[rows] == 0).astype(np.float32)",
         "        self.y = (data.target[: len(rows)] == 0).astype(np.float32)",
         "the labels are those of the first rows, the measurements those of the drawn rows"),
    case("cancer_logit--zero-grad-missing",
         "        optimizer.zero_grad(set_to_none=True)\n",
         "",
         "gradients are never cleared"),
    case("pixel_rows--change-of-first",
         "return past[:, -1] + self.head",
         "return past[:, 0] + self.head",
         "the net's output is added to the first value of the window, not the last"),
    case("digits_triplet--distances-swapped",
         "F.relu(near - far + MARGIN)",
         "F.relu(far - near + MARGIN)",
         "the loss pulls other digits near"),
    case("digits_triplet--val-labels-from-start",
         "self.x, self.y = pixels[rows], labels[rows]",
         "self.x, self.y = pixels[rows], labels[: len(rows)]",
         "the labels of the validation are those of the first rows"),
    case("digits_simclr--normalised-over-batch",
         "z = F.normalize(torch.cat([a, b]), dim=1)",
         "z = F.normalize(torch.cat([a, b]), dim=0)",
         "embeddings are normalised over the batch"),
    case("tumour_cox--ascending-times",
         "torch.argsort(time, descending=True)",
         "torch.argsort(time)",
         "the risk set is who has left the study"),
    case("digits_two_tasks--weight-sign",
         "torch.exp(-model.log_var) * losses",
         "torch.exp(model.log_var) * losses",
         "the learnt weights of the losses have the wrong sign and fall to zero"),
    case("strips_ctc--labels-from-zero",
         "torch.tensor([data.target[r] + 1 for r in self.rows[i]])",
         "torch.tensor([data.target[r] for r in self.rows[i]])",
         "the digit 0 has the number of the blank"),
    case("strips_ctc--reshaped-columns",
         "h = h.permute(0, 3, 1, 2).flatten(2)",
         "h = h.reshape(len(h), h.shape[3], -1)",
         "columns are moved to the time axis by a reshape"),
    case("digit_graph--edges-reshaped",
         "edges = torch.tensor(list(zip(coo.row.tolist(), coo.col.tolist()))).T",
         "edges = torch.tensor(list(zip(coo.row.tolist(), coo.col.tolist()))).reshape(2, -1)",
         "a list of pairs is reshaped to two rows instead of transposed"),
    case("digit_graph--logits-of-first-nodes",
         "F.cross_entropy(logits[g[\"train_mask\"]], g[\"y\"][g[\"train_mask\"]])",
         "F.cross_entropy(logits[: g[\"train_mask\"].sum()], g[\"y\"][g[\"train_mask\"]])",
         "the logits of the first 200 nodes meet the labels of the labelled ones"),
    case("spell_sft--cut-off",
         "completion_only_loss=True, max_length=64",
         "completion_only_loss=True, max_length=8",
         "texts are cut after eight tokens: the ends of most answers are never trained"),
    case("spell_sft--no-space",
         "\"completion\": \" \" + \" \".join(spell(n))",
         "\"completion\": \" \".join(spell(n))",
         "without the space the first word is joined to the sign before it, an unknown token"),
]  # fmt: skip

HEALTHY: list = []
HARMLESS = {"cancer_logit--zero-grad-missing"}
HARMFUL = {c.id for c in BUGS} - HARMLESS
HONEST: dict[str, str] = {}
"""Code that is run after the script, where its own evaluation is wrong."""
