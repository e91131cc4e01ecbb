"""A language model as a policy: it samples tokens and returns their log-probabilities and values."""

from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.loop.optim import exact
from trainworthy.recipes.rl.control.models.nets import Running, mlp


class Writer(nn.Module):
    """A causal language model with a value head on its hidden states; one forward gives both. It also keeps the running scale of the returns,
    which only `observe` updates. Prompts (B, P) are padded on the left; answers (B, T) follow directly."""

    def __init__(self, lm: nn.Module, tokenizer: Any, temperature: float = 1.0):
        super().__init__()
        width = lm.get_input_embeddings().embedding_dim
        self.lm, self.head, self.returns = lm, mlp(width, width, 1), Running(1)
        # Values start at 0, so that the value loss does not change the language model at first
        nn.init.zeros_(self.head[-1].weight)
        self.eos, self.pad, self.temperature = tokenizer.eos_token_id, tokenizer.pad_token_id, temperature

    @property
    def body(self) -> nn.Module:
        """The transformer below the head, also inside adapters."""
        bare = self.lm.get_base_model() if hasattr(self.lm, "peft_config") else self.lm
        return bare.base_model

    @torch.no_grad()
    def write(self, input_ids: Tensor, mask: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return (tokens (B, T), whether each is part of the answer (B, T)), sampled with the random numbers `draws` (B, T) in [0, 1). An answer
        ends with the end token, which is part of it."""
        response = torch.full(draws.shape, self.pad, device=input_ids.device)
        valid = torch.zeros_like(response, dtype=torch.bool)
        going = torch.ones(len(response), dtype=torch.bool, device=response.device)
        cache, new = None, input_ids
        for t in range(draws.shape[1]):
            place = (mask.long().cumsum(1) - 1).clamp_min(0)[:, -new.shape[1] :]
            out = self.lm(input_ids=new, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True,
                          logits_to_keep=1)  # fmt: skip
            cache, chances = out.past_key_values, (exact(out.logits[:, -1]) / self.temperature).softmax(-1)
            token = (chances.cumsum(-1) <= draws[:, t, None]).sum(-1).clamp_max(chances.shape[-1] - 1)
            response[:, t], valid[:, t] = torch.where(going, token, response[:, t]), going
            going = going & (token != self.eos)
            if not going.any():
                break
            new, mask = response[:, t : t + 1], torch.cat([mask, valid[:, t : t + 1]], 1)
        return response, valid

    def forward(self, input_ids: Tensor, mask: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities (B, T, V) at each token of the answers `response` (B, T) after prompts (B, P), values (B, T) before it in units
        of the return scale). `mask` (B, P + T) is 1 where there is no padding."""
        ids, n = torch.cat([input_ids, response], 1), response.shape[1]
        place = (mask.long().cumsum(1) - 1).clamp_min(0)
        out = self.body(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False)
        states = out.last_hidden_state[:, -n - 1 : -1]  # (B, T, width): each predicts the token after it
        logits = self.lm.get_output_embeddings()(states).float() / self.temperature
        return logits.log_softmax(-1), self.head(states).squeeze(-1).float()

    def observe(self, returned: Tensor) -> None:
        """Take in what the tokens of one rollout earned (n,), over all processes."""
        self.returns.update(returned[:, None])


def own(log_p: Tensor, response: Tensor) -> Tensor:
    """Of (B, T, V) what was said (B, T)."""
    return log_p.gather(-1, response.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def scored(model: Writer, batch: dict[str, Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of each token that was said, value before it, entropy of its distribution), (B, T) each, without a graph.
    `rows` completions at a time: log-probabilities of the whole vocabulary of a rollout would be (B, T, V) at once."""
    found = []
    for start in range(0, len(batch["response"]), rows):
        some = {k: v[start : start + rows] for k, v in batch.items()}
        log_p, value = model(**some)
        found.append((own(log_p, some["response"]), value, -(log_p.exp() * log_p).sum(-1)))
    log_prob, values, entropy = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_prob, values, entropy


def texts(tokenizer: Any, response: Tensor, valid: Tensor) -> list[str]:
    """What was said, without what pads and what ends it."""
    rows = [row[keep].tolist() for row, keep in zip(response, valid, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def shape(response: Tensor, valid: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, share of them that are distinct, does it end by itself?) of each completion, (B,) all."""
    tokens = valid.sum(1)
    kinds = [len({*row[keep].tolist()}) for row, keep in zip(response, valid, strict=True)]
    return tokens, torch.tensor(kinds, device=response.device) / tokens, ((response == end) & valid).any(1)
