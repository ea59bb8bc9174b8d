"""Train one epoch on a folder of images, or predict, with a DataLoader and a loop as users write them:

    python folder_loop.py train <folder> <test folder> <processes> <batch size> <image size>
    python folder_loop.py predict <checkpoint> <folder> <processes> <batch size> <csv>

The program prints images per second, from making the loader to the last batch. In training the first steps don't count,
as on the other side, and it then prints the accuracy on the test folder. It uses one thread. Classes are folders.
"""

import csv
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lockstep.vision.models import SmallCNN

WARMUP = 10  # steps
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Files(Dataset):
    """Images [3, size, size], normalised, with the index of their class."""

    def __init__(self, folder: Path, size: int, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.classes = sorted({path.parent for path in self.files})
        self.size, self.mean, self.std = size, mean, std

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, size = self.files[index], (self.size, self.size)
        image = ImageOps.fit(Image.open(path).convert("RGB"), size, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std, self.classes.index(path.parent)


def train(folder: str, test: str, processes: str, batch_size: str, size: str) -> None:
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    dataset = Files(Path(folder), int(size), mean, std)
    loader = DataLoader(dataset, int(batch_size), shuffle=True, num_workers=int(processes))
    model = SmallCNN(channels=3, image_size=int(size), num_classes=len(dataset.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step, (x, y) in enumerate(loader):
        if step == WARMUP:
            began = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    print((len(dataset) - WARMUP * int(batch_size)) / (time.perf_counter() - began))
    model.eval()
    with torch.inference_mode():
        right = [model(x).argmax(1) == y for x, y in DataLoader(Files(Path(test), int(size), mean, std), 256)]
    print(float(torch.cat(right).float().mean()))


def predict(checkpoint: str, folder: str, processes: str, batch_size: str, table: str) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    spec = saved["lockstep"]["spec"]
    model = SmallCNN(**saved["hyper_parameters"])
    model.load_state_dict(saved["state_dict"])
    model.eval()
    mean, std = (torch.tensor(spec[name])[:, None, None] for name in ("mean", "std"))
    began = time.perf_counter()
    dataset = Files(Path(folder), spec["image_size"], mean, std)
    with torch.inference_mode():
        loader = DataLoader(dataset, int(batch_size), num_workers=int(processes))
        rows = torch.cat([model(x).softmax(1) for x, _ in loader]).tolist()
    print(len(dataset) / (time.perf_counter() - began))
    with open(table, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["file", *spec["classes"]])
        out.writerows([path.relative_to(folder), *row] for path, row in zip(dataset.files, rows, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "predict": predict}[sys.argv[1]](*sys.argv[2:])
