import torch
import torch.nn.functional as F
from parts import GCN, graph


def main():
    features, adj, labels, train = graph(64)
    test = ~train
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    for epoch in range(1, 31):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss = F.nll_loss(output[train], labels[train])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            model.eval()
            with torch.no_grad():
                right = (model(features, adj).argmax(1) == labels)[test].float().mean()
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.3f}")


main()
