"""Shapes of public trainers that were stopped, or not rehearsed, although they are healthy."""

from tests.guard.guarding import guard

TRANSLATE = """
import torch
from torch import nn
torch.manual_seed(0)
a = torch.rand(96, 3, 16, 16) * 2 - 1
train, val = (torch.utils.data.TensorDataset(x, -x) for x in (a[:80], a[80:]))
generator = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(16, 3, 3, padding=1), nn.Tanh())

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(6, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 3, padding=1))
    def forward(self, made, given):
        return self.net(torch.cat([made, given], 1))

critic = Critic()
g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
d = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
mse, l1 = nn.MSELoss(), nn.L1Loss()
loader, shown = torch.utils.data.DataLoader(train, 4, shuffle=True), torch.utils.data.DataLoader(val, 8)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        made = generator(x)
        score = critic(made, x)
        g.zero_grad()
        (mse(score, torch.ones_like(score)) + 100 * l1(made, y)).backward()
        g.step()
        real, fake = critic(y, x), critic(made.detach(), x)
        d.zero_grad()
        (0.5 * (mse(real, torch.ones_like(real)) + mse(fake, torch.zeros_like(fake)))).backward()
        d.step()
        if i % 10 == 0:
            x, y = next(iter(shown))
            torch.save(generator(x), "pictures.pt")
"""


def test_dropout_is_the_noise_of_a_conditional_generator(tmp_path):
    """pix2pix samples its pictures with dropout. Another model's dropout is alive by mistake."""
    found, printed, _ = guard(TRANSLATE, tmp_path, interventions=False)
    assert not [v for v in found.values() if v.blocks], printed
    alone = TRANSLATE.replace("mse(score, torch.ones_like(score)) + ", "").replace("score = critic(made, x)", "")
    found, _, _ = guard(alone, tmp_path / "alone", interventions=False)
    assert "dropout is alive" in found["modes"].measured, found["modes"]
