"""What one writes to predict a folder: a DataLoader over its files, a loop, a CSV file at the end.

    python predict_loop.py <checkpoint> <folder> <csv> <processes> <batch size>

Prints images a second, from making the loader to the last batch's probabilities. One thread, as the other side.
"""

import csv
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from project.models import MnistCNN


class Files(Dataset):
    def __init__(self, folder: Path, size: int, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.size, self.mean, self.std = size, mean, std

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        image, size = Image.open(self.files[index]).convert("RGB"), (self.size, self.size)
        image = ImageOps.fit(image, size, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std


def main() -> None:
    checkpoint, folder, table, processes, batch_size = sys.argv[1:]
    torch.set_num_threads(1)
    saved = torch.load(checkpoint, weights_only=True)
    spec = saved["lockstep"]["spec"]
    model = MnistCNN(**saved["hyper_parameters"])
    model.load_state_dict(saved["state_dict"])
    model.eval()
    mean, std = (torch.tensor(spec[name])[:, None, None] for name in ("mean", "std"))
    began = time.perf_counter()
    dataset = Files(Path(folder), spec["image_size"], mean, std)
    loader = DataLoader(dataset, batch_size=int(batch_size), num_workers=int(processes))
    rows = []
    with torch.inference_mode():
        for x in loader:
            rows.append(model(x).softmax(1))
    seconds = time.perf_counter() - began
    with open(table, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["file", *spec["classes"]])
        for path, row in zip(dataset.files, torch.cat(rows).tolist(), strict=True):
            out.writerow([path.relative_to(folder), *row])
    print(len(dataset) / seconds)


if __name__ == "__main__":
    main()
