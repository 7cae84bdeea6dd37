"""A diffusion model of points, whose samples are drawn by an average of its weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from sbp_launch import parallelize

torch.manual_seed(0)
STEPS = 20
betas = torch.linspace(1e-3, 0.3, STEPS)
alphas_bar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, 32)
        self.first, self.last = nn.Linear(2, 32), nn.Linear(32, 2)
        self.middle = nn.Sequential(nn.SiLU(), nn.Linear(32, 32), nn.SiLU())

    def forward(self, x, t):
        return self.last(self.middle(self.first(x) + self.time(t)))


def ring(size):
    """Return points near a circle."""
    angles = 6.2832 * torch.rand(size, 1)
    return torch.cat([angles.sin(), angles.cos()], 1) + 0.05 * torch.randn(size, 2)


def add_noise(x, t, noise):
    kept = alphas_bar[t][:, None]
    return kept.sqrt() * x + (1 - kept).sqrt() * noise


@torch.no_grad()
def sample(network, size):
    x = torch.randn(size, 2)
    for i in reversed(range(STEPS)):
        noise = network(x, torch.full((size,), i))
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * noise) / (1 - betas[i]).sqrt()
        if i:
            x = x + betas[i].sqrt() * torch.randn(size, 2)
    return x


loader = DataLoader(ring(512), batch_size=64, shuffle=True)
model = Denoiser()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def loss_of(model, batch):
    x, t, noise = batch
    return nn.functional.mse_loss(model(add_noise(x, t, noise), t), noise)


example = torch.zeros(64, 2), torch.zeros(64, dtype=torch.long), torch.zeros(64, 2)
step = parallelize(model, loss_of, example, optimizer, mesh=2, planner="manual/zero").start()
for epoch in range(4):
    for x in loader:
        t, noise = torch.randint(STEPS, (len(x),)), torch.randn(len(x), 2)
        loss = step((x, t, noise))
        ema.update_parameters(model)
    radius = sample(ema, 64).norm(dim=1).mean()
    print(f"epoch {epoch}: loss {loss:.4f}, radius of samples {radius:.4f}")
torch.save(ema.module.state_dict(), "ema.pt")
