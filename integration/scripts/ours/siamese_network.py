"""Two images, one network: whether they show the same, as PyTorch's example `siamese_network`."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from sbp_launch import parallelize

torch.manual_seed(1)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Linear(2 * 8 * 9, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
        self.conv.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.conv(x)
        return output.view(output.size(0), -1)

    def forward(self, input1, input2):
        both = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return torch.sigmoid(self.fc(both))


class Pairs(Dataset):
    """Pairs of noisy strokes; the target is 1 where both are of one kind."""

    def __init__(self, size, seed):
        random = torch.Generator().manual_seed(seed)
        kinds = torch.randint(3, (2, size), generator=random)
        self.images = 0.3 * torch.randn(2, size, 1, 14, 14, generator=random)
        for kind in range(3):
            self.images[..., 4 * kind + 2, :][kinds == kind] += 1.0
        self.targets = (kinds[0] == kinds[1]).float()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[0, index], self.images[1, index], self.targets[index]


train_loader = DataLoader(Pairs(128, 2), batch_size=16, shuffle=True)
test_loader = DataLoader(Pairs(64, 3), batch_size=32)
model = SiameseNetwork()
criterion = nn.BCELoss()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)


def loss_of(model, batch):
    images_1, images_2, targets = batch
    outputs = model(images_1, images_2).squeeze()
    correct = (torch.where(outputs > 0.5, 1, 0) == targets).sum()
    return criterion(outputs, targets), {"correct": correct}


example = [torch.zeros(16, 1, 14, 14), torch.zeros(16, 1, 14, 14), torch.zeros(16)]
step = parallelize(
    model, loss_of, example, optimizer, mesh=2, planner="manual/data_parallel"
).start()
for epoch in range(1, 4):
    for batch in train_loader:
        loss = step(batch)
    print(f"epoch {epoch}: loss {loss:.4f}")
    test_loss, correct = 0, 0
    for batch in test_loader:
        found = step.evaluate(batch)
        test_loss += float(found)
        correct += int(found.metrics["correct"])
    size, test_loss = len(test_loader.dataset), test_loss / len(test_loader)
    print(f"test: loss {test_loss:.4f}, correct {correct}/{size}")
    scheduler.step()
