"""A data module with the interface of lightning-hydra-template's `MNISTDataModule`: torchvision's MNIST, its training
and test images in one pool that is split at random, and a batch size for each device."""

import torch
from lightning import LightningDataModule
from torch.utils.data import ConcatDataset, DataLoader, random_split
from torchvision.datasets import MNIST
from torchvision.transforms import transforms


class MNISTDataModule(LightningDataModule):
    def __init__(
        self,
        data_dir="data/",
        train_val_test_split=(55_000, 5_000, 10_000),
        batch_size=64,
        num_workers=0,
        pin_memory=False,
    ):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.transforms = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
        self.data_train = self.data_val = self.data_test = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self):
        return 10

    def prepare_data(self):
        for train in (True, False):
            MNIST(self.hparams.data_dir, train=train, download=True)

    def setup(self, stage=None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size:
                raise RuntimeError("the batch size is not divisible by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            parts = [MNIST(self.hparams.data_dir, train=train, transform=self.transforms) for train in (True, False)]
            self.data_train, self.data_val, self.data_test = random_split(
                ConcatDataset(parts), self.hparams.train_val_test_split, torch.Generator().manual_seed(42)
            )

    def loader(self, dataset, shuffle):
        return DataLoader(
            dataset,
            batch_size=self.batch_size_per_device,
            num_workers=self.hparams.num_workers,
            pin_memory=self.hparams.pin_memory,
            shuffle=shuffle,
        )

    def train_dataloader(self):
        return self.loader(self.data_train, True)

    def val_dataloader(self):
        return self.loader(self.data_val, False)

    def test_dataloader(self):
        return self.loader(self.data_test, False)

    def teardown(self, stage=None):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass
