import torch
import torch.nn.functional as F
from parts import GCN, graph

from sbp_launch import parallelize


def loss_function(model, batch):
    features, adj, labels, train = batch
    output = model(features, adj)
    right = (output.argmax(1) == labels).float()
    targets = labels.masked_fill(~train, -100)
    return F.nll_loss(output, targets), {"right": right}


def main():
    features, adj, labels, train = graph(64)
    test = ~train
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    batch = (features, adj, labels, train)
    with parallelize(model, loss_function, batch, optimizer) as step:
        for epoch in range(1, 31):
            loss = step(batch)
            if epoch % 10 == 0:
                right = step.evaluate(batch).metrics["right"][test].mean()
                if step.world.rank == 0:
                    print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.3f}")


main()
