# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Face recognition with an angular margin: the head computes in float32, with casts disabled."""

import torch
from apex import amp
from torch import nn
from torch.nn import functional as F

try:
    import torch_npu  # noqa: F401

    device = torch.device("npu:0")
except ImportError:
    device = torch.device("cpu")


class ArcMargin(nn.Module):
    def __init__(self, features, classes, scale=8.0, margin=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))
        self.scale, self.margin = scale, margin

    def forward(self, embedding, labels):
        with amp.disable_casts():
            cosine = F.linear(F.normalize(embedding.float()), F.normalize(self.weight.float()))
            assert cosine.dtype == torch.float32
            angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
            wanted = F.one_hot(labels, cosine.shape[1]).bool()
            return self.scale * torch.where(wanted, torch.cos(angle + self.margin), cosine)


torch.manual_seed(6)
labels = torch.arange(96) % 6
faces = (torch.randn(6, 20)[labels] + 0.3 * torch.randn(96, 20)).to(device)
labels = labels.to(device)
backbone = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.PReLU(), nn.Linear(32, 16)).to(device)
head = ArcMargin(16, 6).to(device)
optimizer = torch.optim.SGD(
    [{"params": backbone.parameters()}, {"params": head.parameters(), "weight_decay": 5e-4}], lr=0.05, momentum=0.9
)
[backbone, head], optimizer = amp.initialize([backbone, head], optimizer, opt_level="O1")
for _ in range(40):
    loss = F.cross_entropy(head(backbone(faces), labels), labels)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
