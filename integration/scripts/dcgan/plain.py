import torch
from parts import blobs, make_networks
from torch import nn


def main():
    torch.manual_seed(0)
    netG, netD = make_networks()
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for i in range(30):
        real, noise = blobs(16), torch.randn(16, 16, 1, 1)
        netD.zero_grad()
        output = netD(real)
        errD_real = criterion(output, torch.ones_like(output))
        errD_real.backward()
        fake = netG(noise)
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        optimizerG.step()
        if i % 10 == 9:
            print(f"{i + 1}: Loss_D {errD:.4f}, Loss_G {errG:.4f}")


main()
