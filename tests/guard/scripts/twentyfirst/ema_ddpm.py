"""Denoising diffusion of digits in the form of denoising-diffusion-pytorch: a GaussianDiffusion module, EMA, a Trainer over an endless loader."""

import argparse
import copy
import math
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


def exists(x):
    return x is not None


def default(val, d):
    return val if exists(val) else d


def cycle(dl):
    while True:
        yield from dl


def normalize_to_neg_one_to_one(img):
    return img * 2 - 1


def unnormalize_to_zero_to_one(t):
    return (t + 1) * 0.5


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_model_average(self, ma_model, current_model):
        for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
            old_weight, up_weight = ma_params.data, current_params.data
            ma_params.data = self.update_average(old_weight, up_weight)

    def update_average(self, old, new):
        return old * self.beta + (1 - self.beta) * new


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half_dim = self.dim // 2
        emb = math.log(10000) / (half_dim - 1)
        emb = torch.exp(torch.arange(half_dim, device=x.device) * -emb)
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_emb_dim, groups=8):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_emb_dim, dim_out))
        self.block1 = nn.Sequential(nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out), nn.SiLU())
        self.block2 = nn.Sequential(nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out), nn.SiLU())
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        h = self.block1(x)
        h = h + self.mlp(time_emb)[:, :, None, None]
        h = self.block2(h)
        return h + self.res_conv(x)


class Unet(nn.Module):
    def __init__(self, dim=32, channels=1):
        super().__init__()
        time_dim = dim * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(channels, dim, 3, padding=1)
        self.down1 = ResnetBlock(dim, dim, time_dim)
        self.downsample = nn.Conv2d(dim, dim * 2, 4, 2, 1)
        self.mid1 = ResnetBlock(dim * 2, dim * 2, time_dim)
        self.mid2 = ResnetBlock(dim * 2, dim * 2, time_dim)
        self.upsample = nn.ConvTranspose2d(dim * 2, dim, 4, 2, 1)
        self.up1 = ResnetBlock(dim * 2, dim, time_dim)
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        t = self.time_mlp(time)
        x = self.down1(self.init_conv(x), t)
        skip = x
        x = self.mid2(self.mid1(self.downsample(x), t), t)
        x = torch.cat((self.upsample(x), skip), dim=1)
        return self.final_conv(self.up1(x, t))


def extract(a, t, x_shape):
    b, *_ = t.shape
    out = a.gather(-1, t)
    return out.reshape(b, *((1,) * (len(x_shape) - 1)))


def linear_beta_schedule(timesteps):
    scale = 1000 / timesteps
    return torch.linspace(scale * 0.0001, scale * 0.02, timesteps, dtype=torch.float64)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, *, image_size, channels=1, timesteps=100, objective="pred_noise"):
        super().__init__()
        self.model, self.image_size, self.channels, self.objective = model, image_size, channels, objective
        betas = linear_beta_schedule(timesteps)
        alphas = 1.0 - betas
        alphas_cumprod = torch.cumprod(alphas, dim=0)
        alphas_cumprod_prev = F.pad(alphas_cumprod[:-1], (1, 0), value=1.0)
        self.num_timesteps = timesteps

        def register_buffer(name, val):
            self.register_buffer(name, val.to(torch.float32))

        register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod))
        register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod))
        register_buffer("sqrt_recip_alphas_cumprod", torch.sqrt(1.0 / alphas_cumprod))
        register_buffer("sqrt_recipm1_alphas_cumprod", torch.sqrt(1.0 / alphas_cumprod - 1))
        # calculations for posterior q(x_{t-1} | x_t, x_0)
        posterior_variance = betas * (1.0 - alphas_cumprod_prev) / (1.0 - alphas_cumprod)
        register_buffer("posterior_log_variance_clipped", torch.log(posterior_variance.clamp(min=1e-20)))
        register_buffer("posterior_mean_coef1", betas * torch.sqrt(alphas_cumprod_prev) / (1.0 - alphas_cumprod))
        register_buffer(
            "posterior_mean_coef2", (1.0 - alphas_cumprod_prev) * torch.sqrt(alphas) / (1.0 - alphas_cumprod)
        )

    def predict_start_from_noise(self, x_t, t, noise):
        return (
            extract(self.sqrt_recip_alphas_cumprod, t, x_t.shape) * x_t
            - extract(self.sqrt_recipm1_alphas_cumprod, t, x_t.shape) * noise
        )

    def q_posterior(self, x_start, x_t, t):
        posterior_mean = (
            extract(self.posterior_mean_coef1, t, x_t.shape) * x_start
            + extract(self.posterior_mean_coef2, t, x_t.shape) * x_t
        )
        return posterior_mean, extract(self.posterior_log_variance_clipped, t, x_t.shape)

    @torch.no_grad()
    def p_sample(self, x, t: int):
        batched_times = torch.full((x.shape[0],), t, device=x.device, dtype=torch.long)
        model_output = self.model(x, batched_times)
        if self.objective == "pred_noise":
            x_start = self.predict_start_from_noise(x, batched_times, model_output)
        else:
            x_start = model_output
        x_start = x_start.clamp(-1.0, 1.0)
        model_mean, model_log_variance = self.q_posterior(x_start, x, batched_times)
        noise = torch.randn_like(x) if t > 0 else 0.0  # no noise if t == 0
        return model_mean + (0.5 * model_log_variance).exp() * noise

    @torch.no_grad()
    def sample(self, batch_size=16):
        img = torch.randn(batch_size, self.channels, self.image_size, self.image_size)
        for t in reversed(range(self.num_timesteps)):
            img = self.p_sample(img, t)
        return unnormalize_to_zero_to_one(img)

    def q_sample(self, x_start, t, noise=None):
        noise = default(noise, torch.randn_like(x_start))
        return (
            extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def p_losses(self, x_start, t, noise=None):
        noise = default(noise, torch.randn_like(x_start))
        x = self.q_sample(x_start=x_start, t=t, noise=noise)
        model_out = self.model(x, t)
        target = noise if self.objective == "pred_noise" else x_start
        return F.mse_loss(model_out, target)

    def forward(self, img, *args, **kwargs):
        b = img.shape[0]
        t = torch.randint(0, self.num_timesteps, (b,), device=img.device).long()
        img = normalize_to_neg_one_to_one(img)
        return self.p_losses(img, t, *args, **kwargs)


class Digits(Dataset):
    def __init__(self):
        self.images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


class Trainer:
    def __init__(
        self,
        diffusion_model,
        dataset,
        *,
        batch_size,
        lr,
        num_steps,
        gradient_accumulate_every,
        ema_decay,
        results_folder,
    ):
        self.model = diffusion_model
        self.ema = EMA(ema_decay)
        self.ema_model = copy.deepcopy(self.model)
        self.update_ema_every, self.step_start_ema, self.save_every = 1, 50, 400
        self.batch_size, self.num_steps, self.gradient_accumulate_every = (
            batch_size,
            num_steps,
            gradient_accumulate_every,
        )
        self.dl = cycle(DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True))
        self.opt = optim.Adam(diffusion_model.parameters(), lr=lr, betas=(0.9, 0.99))
        self.step, self.results_folder = 0, results_folder
        os.makedirs(results_folder, exist_ok=True)
        self.reset_parameters()

    def reset_parameters(self):
        self.ema_model.load_state_dict(self.model.state_dict())

    def step_ema(self):
        if self.step < self.step_start_ema:
            self.reset_parameters()
            return
        self.ema.update_model_average(self.ema_model, self.model)

    def save(self, milestone):
        data = {"step": self.step, "model": self.model.state_dict(), "ema": self.ema_model.state_dict()}
        torch.save(data, os.path.join(self.results_folder, f"model-{milestone}.pt"))

    def train(self):
        with tqdm(initial=self.step, total=self.num_steps, mininterval=5, disable=None) as pbar:
            while self.step < self.num_steps:
                total_loss = 0.0
                for _ in range(self.gradient_accumulate_every):
                    data = next(self.dl)
                    loss = self.model(data)
                    loss = loss / self.gradient_accumulate_every
                    total_loss += loss.item()
                    loss.backward()
                pbar.set_description(f"loss: {total_loss:.4f}")
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad()
                if self.step % self.update_ema_every == 0:
                    self.step_ema()
                self.step += 1
                if self.step % self.save_every == 0:
                    self.save(self.step // self.save_every)
                pbar.update(1)


def frechet_distance(a, b):
    """Between the Gaussians of two sets of pictures in the space of a classifier's class scores."""
    digits = load_digits()
    judge = LogisticRegression(max_iter=300).fit(digits.data / 16, digits.target)
    fa, fb = (torch.tensor(judge.decision_function(x.flatten(1).numpy())) for x in (a, b))
    ca, cb = torch.cov(fa.T), torch.cov(fb.T)
    root = torch.linalg.eigvals(ca @ cb).sqrt().real.sum()
    return ((fa.mean(0) - fb.mean(0)).square().sum() + ca.trace() + cb.trace() - 2 * root).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-num-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--gradient-accumulate-every", type=int, default=2)
    parser.add_argument("--train-lr", type=float, default=1e-3)
    parser.add_argument("--ema-decay", type=float, default=0.98)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dataset = Digits()
    diffusion = GaussianDiffusion(Unet(dim=32), image_size=8, timesteps=100)
    trainer = Trainer(
        diffusion,
        dataset,
        batch_size=args.batch_size,
        lr=args.train_lr,
        num_steps=args.train_num_steps,
        gradient_accumulate_every=args.gradient_accumulate_every,
        ema_decay=args.ema_decay,
        results_folder="results",
    )
    trainer.train()
    samples = trainer.ema_model.sample(batch_size=300)
    print(
        f"mean {samples.mean():.3f} (data {dataset.images.mean():.3f}) std {samples.std():.3f} (data {dataset.images.std():.3f})"
    )
    print(f"FINAL frechet={frechet_distance(samples, dataset.images):.2f}")


if __name__ == "__main__":
    main()
