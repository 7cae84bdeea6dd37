"""Two networks that play against each other, as PyTorch's example `dcgan`."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

torch.manual_seed(999)
nz = 8


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.1)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
netD = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
    nn.Flatten(0),
)
netG.apply(weights_init)
netD.apply(weights_init)


def blobs(size):
    """Return images with a bright blob at a random place."""
    place = 2 + 4 * torch.rand(2, size, 1)
    row, column = torch.exp(-((torch.arange(8) - place) ** 2) / 4)
    return 2 * row[:, None, :, None] * column[:, None, None, :] - 1


dataloader = DataLoader(blobs(128), batch_size=16, shuffle=True)
criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
for epoch in range(2):
    for i, real in enumerate(dataloader):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(len(real)))
        errD_real.backward()
        noise = torch.randn(len(real), nz, 1, 1)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real)))
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(len(real)))
        errG.backward()
        optimizerG.step()
        if i % 4 == 0:
            print(f"[{epoch}][{i}/{len(dataloader)}] Loss_D: {errD:.4f} Loss_G: {errG:.4f}")
