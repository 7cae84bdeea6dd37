import torch
import torch.nn.functional as F
from parts import ALPHAS, STEPS, Denoiser, circle, sample
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main():
    torch.manual_seed(0)
    model = Denoiser()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for iteration in range(1, 151):
        clean, noise = circle(64), torch.randn(64, 2)
        t = torch.randint(STEPS, (64,))
        alpha = ALPHAS[t, None]
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if iteration % 50 == 0:
            with torch.no_grad():
                radius = sample(ema, 64).norm(dim=1).mean()
            print(f"{iteration}: loss {loss:.4f}, radius of samples {radius:.3f}")


main()
