"""A made-up graph of three communities, and a graph convolutional network."""

import torch
import torch.nn.functional as F
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        nn.init.xavier_normal_(self.kernel)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, adj):
        return adj @ (x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(16, 16), GraphConv(16, 3)

    def forward(self, x, adj):
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adj)), adj), dim=1)


def graph(nodes):
    torch.manual_seed(0)
    labels = torch.randint(3, (nodes,))
    near = torch.where(labels[:, None] == labels, 0.2, 0.02)
    adj = (torch.rand(nodes, nodes) < near).float()
    adj = ((adj + adj.T) > 0).float() + torch.eye(nodes)
    scale = adj.sum(1).rsqrt()
    features = F.one_hot(labels, 16).float() + torch.randn(nodes, 16)
    train = torch.arange(nodes) < nodes // 4
    return features, scale[:, None] * adj * scale, labels, train
