"""Train on images of growing resolution: sparse exchanges first, dense ones later.

torchrun --standalone --nproc-per-node 2 examples/growing_images.py IMAGES
sparcel lab run --nodes 2 --ranks-per-node 4 -- python examples/growing_images.py IMAGES

In the lab all nodes have this machine's disk, and so one cache; elsewhere each has its own.
IMAGES is a folder, or the http:// address of one on a server. In it, the folders train and test
hold JPEG files CLASS/NAME.jpg of 32 x 32 pixels, and a file files.txt that lists them, one a line.
"""

import argparse
import io
import os
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, pad, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sparcel
from sparcel.data import Cached, PartSampler
from sparcel.optim import LARS


class Images(Dataset):
    """Files of a folder or of a server, as bytes, with the number of their class."""

    def __init__(self, place):
        self.place, self.connection, self.process = place, None, None
        self.names = self.read("files.txt").decode().split()
        self.classes = sorted({name.split("/")[0] for name in self.names})

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return self.read(name), self.classes.index(name.split("/")[0])

    def __getstate__(self):
        return {**vars(self), "connection": None}

    def read(self, name):
        url = urlsplit(self.place)
        if url.scheme != "http":
            return Path(self.place, name).read_bytes()
        if self.connection is None or self.process != os.getpid():  # each process has its own
            self.connection, self.process = HTTPConnection(url.netloc), os.getpid()
        self.connection.request("GET", f"{url.path}/{quote(name)}")
        response = self.connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise OSError(f"{self.place}/{name}: {response.status} {response.reason}")
        return content


def decoded(sample):
    """Return an image as a tensor of numbers around 0, and its class."""
    content, label = sample
    pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1) / 64 - 2, label


def augmented(sample):
    """Return an image mirrored by chance, and moved by up to an eighth of its size."""
    image, label = sample
    height, width = image.shape[1:]
    top, left, mirror = torch.rand(3).tolist()
    wider = pad(image, (width // 8, width // 8, height // 8, height // 8))
    top, left = int(top * (height // 4 + 1)), int(left * (width // 4 + 1))
    image = wider[:, top : top + height, left : left + width]
    return (image.flip(2) if mirror < 0.5 else image), label


class Residual(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Sequential(
            nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(inside, outside, 1, bias=False)
        )

    def forward(self, x):
        return relu(self.body(x) + self.short(x))


def network(classes, width=16):
    """Return a residual network for images of any size; 1.2 million parameters."""
    start = (nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    blocks = [Residual(width << level, width << level + 1) for level in range(4)]
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width << 4, classes)
    return nn.Sequential(*start, *blocks, *end).to(memory_format=torch.channels_last)


def resized(images, resolution):
    """Return a batch of images at a resolution, as the network's convolutions like it."""
    if images.shape[-1] != resolution:
        images = interpolate(images, resolution, mode="bilinear", antialias=True)
    return images.contiguous(memory_format=torch.channels_last)


def loader_of(data, batch_size, sampler):
    """Return batches that four processes prepare while the network computes."""
    return DataLoader(
        data,
        batch_size,
        sampler=sampler,
        num_workers=4,
        drop_last=True,
        persistent_workers=True,
    )


@torch.no_grad()
def accuracy(model, images, labels, resolution):
    """Return the share of the images of all ranks that the model classifies correctly."""
    for buffer in model.buffers():
        if buffer.is_floating_point():  # each rank's batch norms have seen images of their own
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    model.eval()
    right = model(resized(images, resolution)).argmax(1) == labels
    model.train()
    counts = torch.tensor([right.sum(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def schedule_of(lr, batch):
    """Return the 28 epochs of CommLib, section 5.6, at an eighth of its resolutions."""
    sparse = sparcel.scheme("hitopk", density=0.01, selector="mstopk")
    return sparcel.Schedule(
        sparcel.Phase(3, sparse, lr=(0, lr), resolution=12, batch_size=batch),
        sparcel.Phase(10, sparse, lr=(lr, 0.6 * lr), resolution=12, batch_size=batch),
        sparcel.Phase(11, "torus2d", lr=(0.6 * lr, 0.16 * lr), resolution=16, batch_size=batch),
        sparcel.Phase(3, "torus2d", lr=(0.16 * lr, 0.04 * lr), resolution=28, batch_size=batch),
        sparcel.Phase(1, "torus2d", lr=(0.02 * lr, 0), resolution=32, batch_size=batch // 2),
        length=28,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("images", help="a folder, or http://HOST:PORT/FOLDER")
    parser.add_argument("--cache", default="cache", help="a folder of the node's own disk")
    parser.add_argument("--batch", type=int, default=64, help="images of a step on one rank")
    parser.add_argument("--lr", type=float, default=5.0, help="the highest learning rate")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    train, test = (Images(f"{arguments.images}/{split}") for split in ("train", "test"))
    data = Cached(
        train,
        arguments.cache,
        memory="1 GiB",
        decode=decoded,
        transform=augmented,
        group=dist.group.WORLD,
    )
    sampler = PartSampler(data, exchange_every=4)
    shown = [decoded(test[index]) for index in range(rank, len(test), ranks)]
    images, labels = torch.stack([image for image, _ in shown]), torch.tensor([y for _, y in shown])

    torch.manual_seed(0)
    network_of_all = network(len(train.classes))
    torch.manual_seed(rank)  # from here on, each rank draws by itself
    model = DistributedDataParallel(network_of_all, broadcast_buffers=False)
    optimizer = LARS(model.parameters(), arguments.lr, weight_decay=1e-4, parallel=True)
    schedule = schedule_of(arguments.lr, arguments.batch)
    handle = sparcel.attach(model, schedule.at(0).scheme, optimizer=optimizer)
    loader = None
    for epoch in range(schedule.length):
        phase = schedule.at(epoch)
        if loader is None or loader.batch_size != phase.batch_size:
            loader = loader_of(data, phase.batch_size, sampler)
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            schedule.apply(epoch + step / len(loader), handle, optimizer)
            optimizer.zero_grad()
            loss = cross_entropy(model(resized(inputs, phase.resolution)), targets)
            loss.backward()
            optimizer.step()
        right = accuracy(network_of_all, images, labels, phase.resolution)
        if rank == 0:
            print(f"epoch {epoch}, {phase.resolution} px: accuracy {right:.1%}", flush=True)
    if rank == 0:
        print(f"{data.stats()}\n{handle}")
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
