"""Train with Lightning, on one process or under torchrun, rightly or with a mistake."""

from typing import Any

import lightning.pytorch as pl
import torch
from parts import NETS, STEP, arguments, data, rank, world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Module(pl.LightningModule):
    def __init__(self, a) -> None:
        super().__init__()
        self.net, self.a = NETS[a.net](), a
        if a.bug == "frozen":
            self.net[0].bias.requires_grad_(False)
        if a.bug == "head":
            nn.init.normal_(self.net[-1].weight)

    def training_step(self, batch, index):
        x, y = batch
        bug = self.a.bug
        if bug == "eval" and self.global_step >= 2:
            self.net.eval()
        loss = nn.functional.cross_entropy(self.net(x), y, reduction="sum" if bug == "sum" else "mean")
        self.log("loss", loss)
        factor = {"accumulation": self.a.accumulate, "twice": 1 / self.a.accumulate, "times-world": world()}
        return loss * factor.get(bug, 1)

    def validation_step(self, batch, index):
        self.log("val", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_start(self) -> None:
        if self.a.bug == "noise-by-rank":
            torch.manual_seed(100 + rank())

    def on_after_backward(self) -> None:
        if self.a.bug == "clip-passes":
            nn.utils.clip_grad_norm_(self.parameters(), self.a.clip)

    def on_train_batch_end(self, *_) -> None:
        if self.a.bug == "schedule-per-micro-batch":
            self.lr_schedulers().step()  # type: ignore[union-attr]

    def configure_optimizers(self):
        bug = self.a.bug
        decay = [{"params": [p for p in self.parameters() if p.dim() > 1 or bug == "decay"], "weight_decay": 0.01}]
        decay += [{"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}] * (bug != "decay")
        optimizer = torch.optim.SGD(decay, lr=0.05 * (world() if bug == "scaled-rate" else 1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n if self.a.schedule else 1.0)
        interval = "epoch" if bug == "schedule-per-micro-batch" else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


class KeepsOrder(DistributedSampler):
    def set_epoch(self, epoch: int) -> None:
        pass


def main() -> None:
    a = arguments()
    size, bug = world(), a.bug
    pl.seed_everything(1 if bug == "seed" else 0, verbose=False)
    module = Module(a)
    kind = KeepsOrder if bug == "set_epoch" else DistributedSampler
    replicas = 1 if bug == "same-samples" else size
    kwargs = {"drop_last": bug == "drop_last"}
    sampler: Any = kind(TensorDataset(*data(a.samples)), replicas, rank() if replicas > 1 else 0, **kwargs)
    micro = STEP // size // a.accumulate
    loader = DataLoader(sampler.dataset, micro, sampler=sampler, drop_last=bug == "drop_last")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        accumulate_grad_batches=a.accumulate,
        precision="bf16-mixed" if bug == "autocast" else "32-true",
        gradient_clip_val=a.clip if a.clip and bug not in ("no-clip", "clip-passes") else None,
        max_epochs=a.epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, DataLoader(sampler.dataset, 8))


if __name__ == "__main__":
    main()
