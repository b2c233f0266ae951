"""Models as people train them, written out so that nothing has to be downloaded: the sizes of the price table.

BERT (hidden 64, 2 layers, up to 32 tokens, padded), a minGPT that learns to add two numbers (gpt-nano and gpt-mini), an
LSTM language model (2 x 64 over 20 tokens), a VAE (784-400-20), resnet18 and mobilenet_v3_small on 3 x 32 x 32 with the
stems of ImageNet, a ViT of depth 4 on 32 x 32 with patches of 8, and the two convolutions of PyTorch's MNIST example.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F


class Bert(nn.Module):
    """An encoder with post-norm layers and a classifier over the first token; token 0 is padding."""

    def __init__(self, vocabulary=1000, tokens=32, width=64, layers=2, heads=2, classes=2):
        super().__init__()
        self.word = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position, self.kind = nn.Embedding(tokens, width), nn.Embedding(2, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        h = self.drop(self.norm(self.word(x) + self.position(places) + self.kind(torch.zeros_like(x))))
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=x == 0)
        return self.classifier(self.drop(torch.tanh(self.pooler(h[:, 0]))))


class Vit(nn.Module):
    """Patches of 8 x 8, width 192, 3 heads, pre-norm layers."""

    def __init__(self, size=32, patch=8, width=192, depth=4, heads=3, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        layer = partial(
            nn.TransformerEncoderLayer, width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(len(x), -1, -1), h], 1) + self.position
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h[:, 0]))


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside a short cut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(h)) + self.short(x), inplace=True)


def resnet18(classes=10):
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for i, o, s in widths for block in (Residual(i, o, s), Residual(o, o, 1))]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes),
    )  # fmt: skip


class Excite(nn.Module):
    """Squeeze and excite: channels are scaled by what the picture holds of all of them."""

    def __init__(self, width):
        super().__init__()
        inner = max(8, (width // 4 + 4) // 8 * 8)
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow pointwise ones."""

    def __init__(self, inputs, kernel, wide, outputs, excite, activation, stride):
        super().__init__()
        layers = [] if wide == inputs else [*_normed(inputs, wide, 1, 1, 1), activation(inplace=True)]
        layers += [*_normed(wide, wide, kernel, stride, wide), activation(inplace=True)]
        layers += [Excite(wide)] if excite else []
        self.layers = nn.Sequential(*layers, *_normed(wide, outputs, 1, 1, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        h = self.layers(x)
        return x + h if self.adds else h


def _normed(inputs, outputs, kernel, stride, groups):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01)


def mobilenet_v3_small(classes=10):
    re, hs = nn.ReLU, nn.Hardswish
    rows = [
        (16, 3, 16, 16, True, re, 2), (16, 3, 72, 24, False, re, 2), (24, 3, 88, 24, False, re, 1),
        (24, 5, 96, 40, True, hs, 2), (40, 5, 240, 40, True, hs, 1), (40, 5, 240, 40, True, hs, 1),
        (40, 5, 120, 48, True, hs, 1), (48, 5, 144, 48, True, hs, 1), (48, 5, 288, 96, True, hs, 2),
        (96, 5, 576, 96, True, hs, 1), (96, 5, 576, 96, True, hs, 1),
    ]  # fmt: skip
    return nn.Sequential(
        *_normed(3, 16, 3, 2, 1), hs(inplace=True), *(Inverted(*row) for row in rows), *_normed(96, 576, 1, 1, 1),
        hs(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(576, 1024), hs(inplace=True),
        nn.Dropout(0.2), nn.Linear(1024, classes),
    )  # fmt: skip


def mnist_conv():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1),
    )  # fmt: skip


class Vae(nn.Module):
    """784-400-20-400-784."""

    def __init__(self):
        super().__init__()
        self.fc1, self.mean, self.log = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mean, log = self.mean(h), self.log(h)
        z = mean + torch.randn_like(log) * torch.exp(0.5 * log)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, log


def vae_loss(output, x):
    made, mean, log = output
    kl = -0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())
    return (F.binary_cross_entropy(made, x, reduction="sum") + kl) / len(x)


class Lstm(nn.Module):
    """A word language model of two layers."""

    def __init__(self, vocabulary=1000, width=64):
        super().__init__()
        self.word, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.2)
        self.lstm, self.head = nn.LSTM(width, width, 2, dropout=0.2, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.drop(self.lstm(self.drop(self.word(x)))[0])).flatten(0, 1)


class Attending(nn.Module):
    """A pre-norm block of minGPT, attention written out."""

    def __init__(self, width, heads, tokens):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mask", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, h):
        b, t, d = h.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in self.qkv(self.norm1(h)).split(d, 2)
        )
        scores = (q @ k.transpose(-2, -1)) / (d // self.heads) ** 0.5
        weights = F.softmax(scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), -1)
        h = h + self.drop(self.project((self.drop(weights) @ v).transpose(1, 2).reshape(b, t, d)))
        return h + self.drop(self.mlp(self.norm2(h)))


class MinGpt(nn.Module):
    """Digits 0 to 9; two numbers of two digits and their sum, read backwards: 6 tokens go in."""

    def __init__(self, layers=3, heads=3, width=48, tokens=6):
        super().__init__()
        self.token, self.position = nn.Embedding(10, width), nn.Embedding(tokens, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Attending(width, heads, tokens) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10, bias=False)

    def forward(self, x):
        h = self.drop(self.token(x) + self.position(torch.arange(x.shape[1])))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)


def pictures(count, random, shape=(3, 32, 32)):
    return torch.randn(count, *shape, generator=random), torch.randint(10, (count,), generator=random)


def sentences(count, random):
    """Of 8 to 32 tokens, the rest padding; two classes."""
    x = torch.randint(1, 1000, (count, 32), generator=random)
    ends = torch.randint(8, 33, (count, 1), generator=random)
    return x * (torch.arange(32) < ends), torch.randint(2, (count,), generator=random)


def texts(count, random, vocabulary=1000, tokens=20):
    x = torch.randint(vocabulary, (count, tokens + 1), generator=random)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def sums(count, random):
    a, b = torch.randint(100, (2, count), generator=random)
    c = a + b
    digits = [a // 10, a % 10, b // 10, b % 10, c % 10, c // 10 % 10, c // 100]
    x = torch.stack(digits, 1)
    y = x[:, 1:].clone()
    y[:, :3] = -1
    return x[:, :-1].contiguous(), y


def brightness(count, random):
    x = torch.rand(count, 784, generator=random)
    return x, x.clone()


def sums_loss(output, target):
    return F.cross_entropy(output, target.flatten(), ignore_index=-1)


def token_loss(output, target):
    return F.cross_entropy(output, target.flatten())


REAL = {  # name: model, data, loss, batch size, steps, autocast
    "BERT": (Bert, sentences, F.cross_entropy, 32, 40, None),
    "resnet18": (resnet18, pictures, F.cross_entropy, 32, 20, None),
    "mobilenet, bf16": (mobilenet_v3_small, pictures, F.cross_entropy, 32, 20, "bfloat16"),
    "ViT": (Vit, pictures, F.cross_entropy, 16, 30, None),
    "MNIST conv": (mnist_conv, partial(pictures, shape=(1, 28, 28)), F.nll_loss, 64, 20, None),
    "VAE": (Vae, brightness, vae_loss, 128, 80, None),
    "LSTM": (Lstm, texts, token_loss, 20, 50, None),
    "minGPT": (MinGpt, sums, sums_loss, 64, 80, None),
    "minGPT mini": (partial(MinGpt, 6, 6, 192), sums, sums_loss, 64, 40, None),
}
