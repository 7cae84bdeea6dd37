"""Two images, one network: whether they show the same, as PyTorch's example `siamese_network`."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

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
for epoch in range(1, 4):
    model.train()
    for images_1, images_2, targets in train_loader:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for images_1, images_2, targets in test_loader:
            outputs = model(images_1, images_2).squeeze()
            test_loss += criterion(outputs, targets).item()
            correct += (torch.where(outputs > 0.5, 1, 0) == targets).sum().item()
    size, test_loss = len(test_loader.dataset), test_loss / len(test_loader)
    print(f"test: loss {test_loss:.4f}, correct {correct}/{size}")
    scheduler.step()
