"""What the plan's simulation counts: operations that write into a tensor, and generations."""

import torch
from torch import nn
from trainworthy.core.session.simulation import simulated


def test_what_is_written_into_a_real_tensor_is_counted_once():
    """As chunked losses do: a product of fake weights into a part of a real buffer."""
    with simulated() as memory:
        weight = nn.Linear(64, 32, bias=False).weight
        buffer = torch.empty(8, 1000)
        before = memory.restart()
        with torch.no_grad():
            torch.mm(torch.ones(8, 64), weight.t(), out=buffer[:, :32])
            buffer[:, :32].add_(weight[:1, :32].sum())
        assert memory.live == before
        assert memory.peak < before + 4 * buffer.numel()


def test_a_generation_has_its_longest_length():
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with simulated():
        net = LlamaForCausalLM(LlamaConfig(vocab_size=11, pad_token_id=0, eos_token_id=1, **size)).eval()
        ids = torch.tensor([[0, 2, 3], [4, 5, 6]])
        said = net.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert said.shape == (2, 43)
        short = net.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        assert short.shape == (2, 5)
