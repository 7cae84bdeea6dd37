import torch
from parts import VAE, loss_function, test_set, train_set
from torch.utils.data import DataLoader


def main():
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    for epoch in range(1, 4):
        model.train()
        train_loss = 0.0
        for data in train_loader:
            noise = torch.randn(len(data), 5)
            optimizer.zero_grad()
            recon, mu, logvar = model(data, noise)
            loss = loss_function(recon, data, mu, logvar)
            loss.backward()
            train_loss += loss.item() / len(train_loader)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            noise = torch.randn(len(test_set), 5)
            recon, mu, logvar = model(test_set, noise)
            test_loss = loss_function(recon, test_set, mu, logvar)
            sample = model.decode(torch.randn(2, 5)).mean()
        print(f"epoch {epoch}: loss {train_loss:.3f}, test {test_loss:.3f}")
    print(f"a sample: {sample:.4f}")


main()
