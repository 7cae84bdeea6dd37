"""Sub-pixel convolutions that make images larger, as PyTorch's example `super_resolution`."""

from math import log10

import torch
from torch import nn
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

from sbp_launch import parallelize

torch.manual_seed(123)
upscale_factor = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, upscale_factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight)

    def forward(self, x):
        x = self.relu(self.conv2(self.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


def make_set(size):
    """Return images of waves, small and large."""
    places = torch.linspace(0, 6, 16)
    phases = 6 * torch.rand(size, 2, 1)
    rows, columns = (torch.sin(places + phases)).unbind(1)
    large = (rows[:, None, :, None] * columns[:, None, None, :] + 1) / 2
    return TensorDataset(nn.functional.avg_pool2d(large, upscale_factor), large)


train_set, test_set = make_set(64), make_set(16)
training_data_loader = DataLoader(train_set, batch_size=8, shuffle=True)
testing_data_loader = DataLoader(test_set, batch_size=8)
model = Net()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model, batch):
    return criterion(model(batch[0]), batch[1])


step = parallelize(model, loss_of, train_set[:8], optimizer, mesh=2, planner="manual/zero")


def train(epoch):
    epoch_loss = 0
    for batch in training_data_loader:
        epoch_loss += float(step(batch))
    print(f"epoch {epoch}: loss {epoch_loss / len(training_data_loader):.4f}")


def test():
    avg_psnr = 0
    for batch in testing_data_loader:
        mse = step.evaluate(batch)
        avg_psnr += 10 * log10(1 / float(mse))
    print(f"PSNR {avg_psnr / len(testing_data_loader):.4f} dB")


with step:
    for epoch in range(1, 4):
        train(epoch)
        test()
torch.save(model.state_dict(), "super_resolution.pt")
