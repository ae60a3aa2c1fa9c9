"""Measure and draw how the sum of a model's gradients fills in: SparCML's Figure 1, on digits.

    python examples/fill_in.py docs/figures/fill_in.svg

Needs the extras ``plots`` and ``linear`` (for scikit-learn's digits). Takes under a minute.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sparcel.analysis import fill_in, gradients_of, plot_fill_in

RANKS, BATCH, EPOCHS = 64, 16, 5
DENSITIES = [0.1, 0.05, 0.01, 0.002]


def network() -> nn.Module:
    """A small convolutional network, with batch norm as in ResNets."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def batches(inputs: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Split a new permutation of the samples into batches of one size."""
    order = torch.randperm(len(inputs)).split(size)
    return [(inputs[batch], targets[batch]) for batch in order if len(batch) == size]


def main(path: str) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    targets = torch.tensor(digits.target)
    model, loss = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for x, y in batches(inputs, targets, size=64):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    measured = fill_in(
        gradients_of(model, loss, batches(inputs, targets, BATCH)[:RANKS]), DENSITIES
    )
    print("| each rank sends | selector | 2 ranks | 8 ranks | 64 ranks | by chance | dense from |")
    print("|---|---|---|---|---|---|---|")
    for (density, name), growth in measured.items():
        shares = [growth.density[ranks - 1] for ranks in (2, 8, 64)]
        cells = [f"{100 * share:.1f} %" for share in (*shares, growth.uniform_density[-1])]
        dense_from = growth.dense_from()
        cells.append("never" if dense_from is None else f"{dense_from} ranks")
        print(f"| {100 * density:g} % | {name} | {' | '.join(cells)} |")
    plot_fill_in(measured, path, title=f"CNN on digits, epoch {EPOCHS}, batch {BATCH} a rank")


if __name__ == "__main__":
    main(sys.argv[1])
