"""A graph convolutional network that labels nodes, as PyTorch's example `gcn`."""

import torch
import torch.nn.functional as F
from torch import nn

from sbp_launch import parallelize

torch.manual_seed(42)


class GraphConv(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.mm(adj_mat, torch.mm(input_tensor, self.kernel)) + self.bias


class GCN(nn.Module):
    def __init__(self, input_dim, hidden_dim, output_dim):
        super().__init__()
        self.gc1 = GraphConv(input_dim, hidden_dim)
        self.gc2 = GraphConv(hidden_dim, output_dim)

    def forward(self, input_tensor, adj_mat):
        x = F.relu(self.gc1(input_tensor, adj_mat))
        return F.log_softmax(self.gc2(x, adj_mat), dim=1)


def make_graph(nodes=60, kinds=3):
    """Return features, labels, and the normalised adjacency of a graph of three communities."""
    labels = torch.arange(nodes) % kinds
    near = torch.where(labels[:, None] == labels, 0.2, 0.02)
    edges = (torch.rand(nodes, nodes) < near).float()
    adjacency = ((edges + edges.t()) > 0).float().fill_diagonal_(1.0)
    scale = adjacency.sum(1).rsqrt()
    features = torch.randn(nodes, 12) + 0.4 * F.one_hot(labels, 12)
    return features, labels, scale[:, None] * adjacency * scale


features, labels, adj_mat = make_graph()
order = torch.randperm(len(labels))
idx_train, idx_val, idx_test = order[:30], order[30:42], order[42:]
gcn = GCN(12, 16, 3)
optimizer = torch.optim.Adam(gcn.parameters(), lr=0.05, weight_decay=5e-4)
criterion = nn.NLLLoss()


def loss_of(model, idx):
    output = model(features, adj_mat)
    accuracy = (output[idx].argmax(dim=1) == labels[idx]).float().mean()
    return criterion(output[idx], labels[idx]), {"accuracy": accuracy}


def train_iter(epoch):
    loss = step(idx_train)
    loss_val, acc_val = test(idx_val)
    print(f"epoch {epoch}: loss {loss:.4f}, val loss {loss_val:.4f}, accuracy {acc_val:.4f}")


def test(idx):
    found = step.evaluate(idx)
    return float(found), float(found.metrics["accuracy"])


step = parallelize(gcn, loss_of, idx_train, optimizer, mesh=2).start()
for epoch in range(1, 7):
    train_iter(epoch)
print("test: loss {:.4f}, accuracy {:.4f}".format(*test(idx_test)))
