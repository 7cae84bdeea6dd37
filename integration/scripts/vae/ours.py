import torch
from parts import VAE, loss_function, test_set, train_set
from torch.utils.data import DataLoader

from sbp_launch import parallelize


def loss(model, batch):
    data, noise = batch
    recon, mu, logvar = model(data, noise)
    return loss_function(recon, data, mu, logvar)


def main():
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    example = (train_set[:64], torch.zeros(64, 5))
    with parallelize(model, loss, example, optimizer) as step:
        for epoch in range(1, 4):
            train_loss = 0.0
            for data in train_loader:
                noise = torch.randn(len(data), 5)
                train_loss += step((data, noise)) / len(train_loader)
            model.eval()
            with torch.no_grad():
                noise = torch.randn(len(test_set), 5)
                test_loss = step.evaluate((test_set, noise))
                sample = model.decode(torch.randn(2, 5)).mean()
            model.train()
            if step.world.rank == 0:
                print(f"epoch {epoch}: loss {train_loss:.3f}, test {test_loss:.3f}")
        if step.world.rank == 0:
            print(f"a sample: {sample:.4f}")


main()
