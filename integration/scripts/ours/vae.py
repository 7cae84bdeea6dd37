"""A variational autoencoder, as PyTorch's example `vae`; the loop draws the noise."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

from sbp_launch import parallelize

torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc21 = nn.Linear(32, 4)
        self.fc22 = nn.Linear(32, 4)
        self.fc3 = nn.Linear(4, 32)
        self.fc4 = nn.Linear(32, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, noise):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(mu + noise * torch.exp(0.5 * logvar)), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def bars(size):
    """Return images of one bright row and one bright column."""
    rows, columns = torch.randint(8, (2, size))
    return torch.maximum(F.one_hot(rows, 8)[:, :, None], F.one_hot(columns, 8)[:, None]).float()


train_loader = DataLoader(bars(256), batch_size=32, shuffle=True)
test_loader = DataLoader(bars(64), batch_size=32)
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-2)


def loss_of(model, batch):
    data, noise = batch
    recon_batch, mu, logvar = model(data, noise)
    return loss_function(recon_batch, data, mu, logvar)


example = train_loader.dataset[:32], torch.zeros(32, 4)
step = parallelize(model, loss_of, example, optimizer, mesh=2, planner="manual/zero").start()


def train(epoch):
    train_loss = 0
    for data in train_loader:
        train_loss += float(step((data, torch.randn(len(data), 4))))
    print(f"Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test():
    test_loss = 0
    for data in test_loader:
        test_loss += float(step.evaluate((data, torch.randn(len(data), 4))))
    print(f"Test set loss: {test_loss / len(test_loader.dataset):.4f}")


for epoch in range(1, 4):
    train(epoch)
    test()
    with torch.no_grad():
        sample = model.decode(torch.randn(16, 4))
    print(f"mean of samples: {sample.mean().item():.4f}")
