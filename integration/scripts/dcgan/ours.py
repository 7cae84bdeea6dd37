import torch
from parts import blobs, make_networks
from torch import nn

from sbp_launch import parallelize


def loss_d(model, batch):
    real, noise = batch
    criterion = nn.BCELoss()
    output = model["D"](real)
    errD_real = criterion(output, torch.ones_like(output))
    output = model["D"](model["G"](noise).detach())
    errD_fake = criterion(output, torch.zeros_like(output))
    return errD_real + errD_fake


def loss_g(model, batch):
    output = model["D"](model["G"](batch))
    return nn.BCELoss()(output, torch.ones_like(output))


def main():
    torch.manual_seed(0)
    netG, netD = make_networks()
    model = nn.ModuleDict({"G": netG, "D": netD})
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    noise = torch.zeros(16, 16, 1, 1)
    step_d = parallelize(model, loss_d, (torch.zeros(16, 1, 16, 16), noise), optimizerD)
    step_g = step_d.add_step(loss_g, noise, optimizerG)
    with step_d:
        for i in range(30):
            real, noise = blobs(16), torch.randn(16, 16, 1, 1)
            errD = step_d((real, noise))
            errG = step_g(noise)
            if i % 10 == 9 and step_d.world.rank == 0:
                print(f"{i + 1}: Loss_D {errD:.4f}, Loss_G {errG:.4f}")


main()
