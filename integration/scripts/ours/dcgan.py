"""Two networks that play against each other, as PyTorch's example `dcgan`."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

from sbp_launch import parallelize

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


def loss_d(model, batch):
    real, fake = batch["real"], model["G"](batch["noise"]).detach()
    errD_real = criterion(model["D"](real), torch.ones(len(real)))
    return errD_real + criterion(model["D"](fake), torch.zeros(len(real)))


def loss_g(model, batch):
    return criterion(model["D"](model["G"](batch["noise"])), torch.ones(len(batch["noise"])))


model = nn.ModuleDict({"G": netG, "D": netD})
example = {"real": torch.zeros(16, 1, 8, 8), "noise": torch.zeros(16, nz, 1, 1)}
step_d = parallelize(model, loss_d, example, optimizerD, mesh=2, planner="manual/data_parallel")
step_g = step_d.beside(loss_g, {"noise": example["noise"]}, optimizerG)
step_d.start()
for epoch in range(2):
    for i, real in enumerate(dataloader):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        noise = torch.randn(len(real), nz, 1, 1)
        errD = step_d({"real": real, "noise": noise})
        # (2) Update G: maximize log(D(G(z)))
        errG = step_g({"noise": noise})
        if i % 4 == 0:
            print(f"[{epoch}][{i}/{len(dataloader)}] Loss_D: {errD:.4f} Loss_G: {errG:.4f}")
