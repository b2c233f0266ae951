"""A graph network: one graph, all nodes at once, and a loss over the few nodes whose class is known.

A step sees the whole graph, so a sample is a set of labelled nodes and the graph belongs to the model. Each replica
takes its share of the labelled nodes; how many a share has weighs it, so the gradient is that of all of them.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import phalanx

digits = load_digits(n_class=4)
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
near = torch.cdist(x, x).topk(8, largest=False).indices  # edges to the nearest images
adjacency = torch.zeros(len(x), len(x)).scatter_(1, near, 1.0)
adjacency = ((adjacency + adjacency.T) > 0).float()
degrees = adjacency.sum(1).rsqrt()
known = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", degrees[:, None] * adjacency * degrees)
        self.register_buffer("nodes", x)
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, chosen):
        hidden = F.dropout(F.relu(self.edges @ self.first(self.nodes)), 0.5, self.training)
        return (self.edges @ self.second(hidden))[chosen]


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


train, test = known[:40], known[40:]
recipe = phalanx.Recipe(Gcn, (train, y[train]), F.cross_entropy, replicas=4, batch_size=40, epochs=60, lr=1e-2)
result = recipe.train(workers=2, evaluation=phalanx.Evaluation(accuracy, (test, y[test]), every_epochs=20))
print(f"accuracy {result.metric_history[-1].value:.3f} from {len(train)} labels, digest {result.digest[:12]}")
assert result.digest == recipe.train(workers=1).digest
