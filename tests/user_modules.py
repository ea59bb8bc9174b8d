"""Modules as a user writes them. Tests copy this file into a project as `mine`, and name one of them by `_target_`."""

import json
import os
import signal

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torchmetrics import MaxMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import Compose, Normalize, ToTensor

from lockstep.vision.models import SmallCNN

SIZE, CLASSES = 12, 3


class LitDigits(pl.LightningModule):
    """As in Lightning's tutorial."""

    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.extend()

    def extend(self):
        """Add what other modules have beside the network."""

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self(x), y)
        self.log("val/acc", self.accuracy)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("test/acc", self.accuracy)
        self.log("test/loss", F.cross_entropy(logits, y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class Cut(LitDigits):
    """Ends itself after six steps, by the signal that CUT names."""

    def training_step(self, batch, batch_idx):
        if os.environ.get("CUT") and self.trainer.global_step == 6:
            self.trainer.strategy.checkpoint_io.wait()  # the checkpoint of step 5 is on the disk,
            for logger in self.trainer.loggers:
                logger.save()  # and what was logged since then
            os.kill(os.getpid(), signal.Signals[os.environ["CUT"]])
        return super().training_step(batch, batch_idx)


class KilledIn(pl.Callback):
    """Kills the run, its parent included, in a hook after a number of steps, where CUT is set."""

    def __init__(self, hook, step):
        self.step = step
        setattr(self, hook, self.kill)

    def kill(self, trainer, pl_module):
        if os.environ.get("CUT") and trainer.global_step == self.step:
            os.killpg(0, signal.SIGKILL)


class Records(pl.Callback):
    """Writes a line for each piece that a rank computes: its step, device and samples."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(os.path.join(trainer.default_root_dir, f"pieces_{trainer.global_rank}.jsonl"), "a") as file:
            for each in batch.micro_batches:
                row = {"epoch": batch.epoch, "step": batch.step, "piece": each.piece, "device": each.device}
                file.write(json.dumps({**row, "ids": each.ids.tolist()}) + "\n")


# --- what is trained, and by which schedule ---------------------------------------------------------------------------


class Unfrozen(LitDigits):
    def extend(self):
        self.net[1].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[1].requires_grad_(True)


class Curriculum(Cut):
    """Each epoch begins with something else: a factor of the loss, and from the second on a frozen layer."""

    def on_train_epoch_start(self):
        self.scale = 1 + self.current_epoch
        self.net[1].requires_grad_(self.current_epoch == 0)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.scale

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LossOfSum(LitDigits):
    def training_step(self, batch, batch_idx):
        return len(batch[0]) * super().training_step(batch, batch_idx)


class Rarely(LitDigits):
    """A part of it has no gradient where a piece has one sample."""

    def extend(self):
        self.head = nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        return self.head(self.net(x)) if len(x) > 1 else self.net(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, weight_decay=0.5)


class Stopping(pl.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__("train_loss", min_delta=10.0, patience=1)


class Holds(pl.Callback):
    """Each rank writes down the bytes of the parameters and of the optimizer's state that it holds."""

    def on_train_end(self, trainer, pl_module):
        tensors = list(pl_module.parameters())
        for state in trainer.optimizers[0].state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim()]
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel() > 1)
        with open(os.path.join(trainer.default_root_dir, f"held_{trainer.global_rank}"), "w") as file:
            file.write(str(size))


# --- what a step does -------------------------------------------------------------------------------------------------


class Penalty(LitDigits):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


class HooksItsInput(nn.Module):
    def __init__(self, hook):
        super().__init__()
        self.hook = hook

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(self.hook)
        return x


class Overflows(LitDigits):
    """In its third step the first layer's gradient alone is not finite."""

    def extend(self):
        self.net.insert(2, HooksItsInput(lambda g: g * float("nan") if self.trainer.global_step == 2 else None))


class Drops(LitDigits):
    """Two parts draw random numbers."""

    def extend(self):
        self.net.insert(1, nn.Dropout(0.2))
        self.net.append(nn.Dropout(0.2))


class Disorder(LitDigits):
    def stages(self):
        return [self.net[0], self.net[1], self.net[3]]


class Mixes(LitDigits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        x, y = batch
        weight, y = torch.rand(()), F.one_hot(y, CLASSES).to(x.dtype)
        order = torch.randperm(len(x))
        return x.lerp(x[order], weight.to(x.dtype)), y.lerp(y[order], weight.to(x.dtype))


class Blinds(LitDigits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x if self.trainer.training else torch.zeros_like(x)), y


class NoisyScore(LitDigits):
    """Draws random numbers in validation, as a variational autoencoder does."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self(x + torch.randn_like(x)).argmax(1) == y).float().mean())
        self.log("val/noise", torch.randn(len(x)).mean())


class Counts(LitDigits):
    def extend(self):
        self.seen = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.seen.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self):
        counted = float(self.seen.tp + self.seen.fn)
        self.log("train/seen", counted, sync_dist=True, reduce_fx="sum")
        self.seen.reset()


class Lazy(LitDigits):
    def extend(self):
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            layers = nn.Linear(SIZE * SIZE, self.hparams.hidden), nn.ReLU(), nn.Linear(16, CLASSES)
            self.net = nn.Sequential(nn.Flatten(), *layers)


class NoTest(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE * SIZE, CLASSES)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneFails(LitDigits):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.trainer.global_step == 5:
            raise ValueError("the file that is broken")
        return super().training_step(batch, batch_idx)


class Flips(pl.Callback):
    """Flips a bit in step `step`, or from it on where it is `lasting`, of what one device computes, a `gradient`, a
    `weight` or an `activation` (of one of two under dp), or of a message that is `sent` or `got` by it."""

    def __init__(self, what, device, step, lasting=False):
        self.what, self.device, self.step, self.lasting = what, device, step, lasting

    def repeats(self, trainer):
        """Check whether the passes leave no trace: those of an audit."""
        return trainer.fit_loop.epoch_loop._results is not self.logs

    def strikes(self, trainer, what):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",")
        now, again = trainer.global_step, self.repeats(trainer)
        due = now >= self.step if self.lasting else now == self.step and not again
        return what == self.what and due and int(visible[trainer.global_rank]) == self.device

    def on_fit_start(self, trainer, pl_module):
        self.logs = trainer.fit_loop.epoch_loop._results
        plain, to_one, self.calls = torch.distributed.all_reduce, torch.distributed.P2POp, 0

        def flip_message(tensor, what):
            if tensor.dtype == torch.int64 and tensor.numel() > 1000 and self.strikes(trainer, what):
                tensor[500] ^= 1 << 30

        def all_reduce(tensor, *args, **options):
            flip_message(tensor, "sent")
            work = plain(tensor, *args, **options)
            if work is not None:
                work.wait()
            flip_message(tensor, "got")
            return work

        def message(op, tensor, peer):
            if op is torch.distributed.isend and self.lasting:
                flip_message(tensor, "sent")
            return to_one(op, tensor, peer)

        def flip_output(layer, args, output):
            trains = trainer.training and not self.repeats(trainer)
            if self.what == "activation" and trains and trainer.global_step == self.step:
                if self.calls % 2 == self.device:
                    flip(output.data)
                self.calls += 1

        torch.distributed.all_reduce, torch.distributed.P2POp = all_reduce, message
        pl_module.net[3].register_forward_hook(flip_output)
        weight = pl_module.net[1].weight
        self.node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # it accumulates the gradient
        self.node.register_hook(lambda *_: flip(weight.grad) if self.strikes(trainer, "gradient") else None)

    def on_train_batch_start(self, trainer, pl_module, *args):
        if trainer.global_step == self.step and self.strikes(trainer, "weight"):
            flip(pl_module.net[1].weight.data)


class Small(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        bits = torch.full((1 << 20,), 1 << 21, dtype=torch.int32)  # of about 3e-39
        left = (bits.view(torch.float32) * 1.5).view(torch.int32).count_nonzero()
        print(int(left), "of", len(bits), f"are left, TF32: {torch.backends.cudnn.allow_tf32}")


def flip(tensor):
    tensor.view(-1).view(torch.int64 if tensor.element_size() == 8 else torch.int32)[7] ^= 1 << 12


class Logs(LitDigits):
    """Logs in all the ways that Lightning has, without a word of ranks."""

    def validation_step(self, batch, batch_idx):
        self.scores("val", *batch)

    def test_step(self, batch, batch_idx):
        self.scores("test", *batch)
        self.seen += len(batch[0])

    def on_test_start(self):
        self.seen = 0

    def on_test_epoch_end(self):
        self.log("test/constant", 3.0)
        self.log("test/samples", float(self.seen), reduce_fx="sum", sync_dist=True)
        self.log("test/own_mean", self.seen / 10)  # which no reduction over ranks makes right

    def scores(self, stage, x, y):
        logits = self(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        right = (logits.argmax(1) == y).float()
        self.accuracy(logits, y)
        self.log(f"{stage}/acc", self.accuracy)
        self.log(f"{stage}/plain", right.mean(), prog_bar=True)
        self.log(f"{stage}/synced", right.mean(), sync_dist=True, on_step=True, on_epoch=True)
        self.log_dict({f"{stage}/loss": losses.mean(), f"{stage}/sized": losses.mean()}, batch_size=len(x))
        self.log(f"{stage}/right", right.sum(), reduce_fx="sum")
        self.log(f"{stage}/worst", losses.max(), reduce_fx="max")
        self.log(f"{stage}/best", losses.min(), reduce_fx="min")
        if (y == 0).all():  # of few batches
            self.log(f"{stage}/rare", losses.mean())


class Remembers(LitDigits):
    """Its validation draws, counts and collects, and what it trains on follows from that."""

    def extend(self):
        self.register_buffer("drawn", torch.zeros(()))
        self.best = MaxMetric()
        self.validated, self.outputs = 0, []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.drawn + self.validated / 10)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.drawn += torch.rand(())
        self.validated += 1
        self.outputs.append(float(self.drawn))
        self.best.update(1 / self.validated)

    def on_validation_epoch_end(self):
        self.log("val/best", self.best.compute())
        self.log("val/outputs", float(len(self.outputs)))


class Underscores(LitDigits):
    """Its metrics have other names than the front page's."""

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_acc": 0.5, "val_loss": 1.0})

    def training_step(self, batch, batch_idx):
        raise AssertionError("no step is made")


class Follows(Underscores):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss"}}


class Shy(LitDigits):
    """Logs its best metric in earnest only."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 1.0)
        if not self.trainer.sanity_checking:
            super().validation_step(batch, batch_idx)


# --- data modules of lightning-hydra-template's shape (a module: tests/docs/hydra_template) ---------------------------


class Drawn(Dataset):
    def __init__(self, samples: int, transform):
        self.transform = transform
        self.labels = torch.arange(samples) % CLASSES
        pixels = torch.rand(samples, SIZE, SIZE, 1, generator=torch.Generator().manual_seed(1))
        self.pixels = ((pixels + self.labels.view(-1, 1, 1, 1) / CLASSES) * 127).byte().numpy()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.pixels[index]), int(self.labels[index])


class TemplatedData(pl.LightningDataModule):
    def __init__(self, data_dir: str = "data/", splits=(90, 9, 18), batch_size: int = 64, num_workers: int = 0):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.transforms = Compose([ToTensor(), Normalize((0.3,), (0.4,))])
        self.data_train = self.data_val = self.data_test = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self):
        return CLASSES

    def prepare_data(self):
        Drawn(1, self.transforms)

    def setup(self, stage=None):
        if self.trainer is not None:
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train and not self.data_val and not self.data_test:
            torch.rand(100_000).mul(2)  # computed in parallel, before workers are forked
            parts = ConcatDataset([Drawn(90, self.transforms), Drawn(27, self.transforms)])
            self.data_train, self.data_val, self.data_test = random_split(parts, self.hparams.splits)

    def loader(self, dataset, shuffle=False):
        return DataLoader(dataset, batch_size=self.batch_size_per_device, shuffle=shuffle, num_workers=2)

    def train_dataloader(self):
        return self.loader(self.data_train, shuffle=True)

    def val_dataloader(self):
        return self.loader(self.data_val)

    def test_dataloader(self):
        return self.loader(self.data_test)


def as_dict(samples):
    x, y = default_collate(samples)
    return {"x": x, "y": y}


class DictData(TemplatedData):
    def loader(self, dataset, shuffle=False):
        return DataLoader(dataset, batch_size=8, collate_fn=as_dict)


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


class StreamData(TemplatedData):
    def loader(self, dataset, shuffle=False):
        return DataLoader(Stream(), batch_size=8)


class WeightedData(TemplatedData):
    def loader(self, dataset, shuffle=False):
        return DataLoader(dataset, batch_size=8, sampler=WeightedRandomSampler([1.0] * len(dataset), len(dataset)))


class BatchedData(TemplatedData):
    def loader(self, dataset, shuffle=False):
        return DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 8, False))


class MovedData(TemplatedData):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


# --- of the project's classifier --------------------------------------------------------------------------------------


class CustomOptimizer(SmallCNN):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Helped(CustomOptimizer):
    def configure_optimizers(self):
        return self.made()

    def made(self):
        return self.optimizer(params=self.parameters())


class OutOfMemory(SmallCNN):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            torch.empty(1 << 60, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


class Hungry(SmallCNN):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("pieces of 3 samples fit")
        return super().training_step(batch, batch_idx)


class WrongShapes(SmallCNN):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("shapes cannot be multiplied")


# --- what is refused --------------------------------------------------------------------------------------------------


class Spare(LitDigits):
    def extend(self):
        self.spare = nn.Linear(CLASSES, CLASSES)


class Past(LitDigits):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


class Views(LitDigits):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(x + 0.1), y)


class CustomData(LitDigits):
    def train_dataloader(self):
        return []


class MultiLabel(LitDigits):
    """Each class is there or not, whatever the others are."""

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).sigmoid()


class Regression(LitDigits):
    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:, 0] - 5


class Norms(LitDigits):
    """Its BatchNorm gets one value per channel of a sample."""

    def __init__(self, hidden: int = 16, lr: float = 0.1, hides: bool = False):
        super().__init__(hidden, lr)
        self.hides = hides  # forward can't be tried on images alone
        self.net.insert(2, nn.BatchNorm1d(hidden))

    def forward(self, x, again=None):
        if self.hides and again is None:
            raise TypeError("again is missing")
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0], True), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0], True).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


class Random(LitDigits):
    """Has what depends on the layout if nothing is done about it: BatchNorm, dropout, noise, AdamW."""

    def extend(self):
        self.net[2] = nn.Sequential(nn.BatchNorm1d(self.hparams.hidden), nn.ReLU(), nn.Dropout(0.3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x + 0.1 * torch.randn_like(x), y), batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.003)


class CutRandom(Random, Cut):
    pass


class WideNorms(Norms):
    """Its BatchNorm gets many values per channel of a sample."""

    def __init__(self, hidden: int = 16, lr: float = 0.1):
        super().__init__(hidden, lr)
        self.net = nn.Sequential(nn.BatchNorm2d(1), *self.net[:2], *self.net[3:])
