import torch
import torch.nn.functional as F
from parts import ALPHAS, STEPS, Denoiser, circle, sample
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sbp_launch import parallelize


def loss_of(model, batch):
    noisy, t, noise = batch
    return F.mse_loss(model(noisy, t), noise)


def main():
    torch.manual_seed(0)
    model = Denoiser()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    example = (torch.zeros(64, 2), torch.zeros(64, dtype=torch.long), torch.zeros(64, 2))
    with parallelize(model, loss_of, example, optimizer, planner="manual/data_parallel") as step:
        for iteration in range(1, 151):
            clean, noise = circle(64), torch.randn(64, 2)
            t = torch.randint(STEPS, (64,))
            alpha = ALPHAS[t, None]
            noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
            loss = step((noisy, t, noise))
            ema.update_parameters(model)
            if iteration % 50 == 0:
                with torch.no_grad():
                    radius = sample(ema, 64).norm(dim=1).mean()
                if step.world.rank == 0:
                    print(f"{iteration}: loss {loss:.4f}, radius of samples {radius:.3f}")


main()
