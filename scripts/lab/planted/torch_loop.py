"""Train in plain torch, on one process or under torchrun, rightly or with a mistake."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from parts import NETS, STEP, arguments, data, rank, world
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Sign(torch.optim.SGD):
    """Takes steps of one length, as Lion without momentum: a factor of the gradient does not change them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] / 10)


def main() -> None:
    a = arguments()
    bug, size = a.bug, world()
    if size > 1 and bug != "no-group":
        distributed.init_process_group("gloo")
    torch.manual_seed({"seed": 1, "seed-by-rank": rank(), "unseeded": time.time_ns()}.get(bug, 0))
    net = NETS[a.net]()
    if bug == "head":
        nn.init.normal_(net[-1].weight)
    if bug == "noise-by-rank":
        torch.manual_seed(100 + rank())
    if bug == "frozen":
        net[0].bias.requires_grad_(False)
    manual = bug in ("world", "clip-ranks", "manual", "not-averaged", "seed-by-rank", "no-group")
    model = net
    if size > 1 and not manual:
        model = DistributedDataParallel(net, broadcast_buffers=bug != "buffers")
    replicas = 1 if bug == "same-samples" else size
    sampler: Any = DistributedSampler(
        TensorDataset(*data(a.samples)), replicas, rank() if replicas > 1 else 0, drop_last=bug == "drop_last"
    )
    micro = STEP // size // a.accumulate
    loader = DataLoader(sampler.dataset, micro, sampler=sampler, drop_last=bug == "drop_last")
    decay = [{"params": [p for p in net.parameters() if p.dim() > 1 or bug == "decay"], "weight_decay": 0.01}]
    decay += [{"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}] * (bug != "decay")
    rate = 0.05 * (size if bug == "scaled-rate" else 1)
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "sign": Sign}[a.optimizer](decay, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n) if a.schedule else None
    reduction = "sum" if bug == "sum" else "mean"
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    for epoch in range(a.epochs):
        if bug != "set_epoch":
            sampler.set_epoch(epoch + (bug == "late-noise"))
        for at, (x, y) in enumerate(loader):
            last = (at + 1) % a.accumulate == 0 or at + 1 == len(loader)
            window = a.accumulate
            if bug != "window" and at >= len(loader) // a.accumulate * a.accumulate:
                window = len(loader) % a.accumulate  # the last one may be shorter
            cast = torch.autocast("cpu", torch.bfloat16) if bug == "autocast" else nullcontext()
            with cast, nullcontext() if last or manual or size == 1 else model.no_sync():
                inputs = {"labels": y, "x": x} if a.net == "labelled" else {}
                outputs = model(**inputs) if inputs else model(torch.cat([2 * x, 2 * x], 1) if bug == "wide" else x)
                loss = criterion(outputs, y)
                if bug not in ("alike", "window") and window > 1:  # the last micro-batch of an epoch may be smaller
                    left = min(STEP, a.samples - at // a.accumulate * STEP)
                    loss = loss * len(x) * size * window / left
                loss = loss * {"accumulation": 1, "twice": 1 / window**2}.get(bug, 1 / window)
                (loss * size if bug == "times-world" else loss).backward()
            if bug == "clip-passes" and a.clip:
                nn.utils.clip_grad_norm_(net.parameters(), a.clip)
            if bug == "schedule-per-micro-batch" and schedule:
                schedule.step()
            if not last:
                continue
            if bug == "clip-ranks":
                nn.utils.clip_grad_norm_(net.parameters(), a.clip)
            if manual and size > 1 and bug not in ("not-averaged", "no-group"):
                for p in net.parameters():
                    distributed.all_reduce(p.grad)
                    p.grad /= 1 if bug == "world" else size
            if a.clip and bug not in ("clip-ranks", "clip-passes", "no-clip"):
                nn.utils.clip_grad_norm_(net.parameters(), a.clip)
            if a.normalize:
                length = sum(float(p.grad.square().sum()) for p in net.parameters()) ** 0.5
                for p in net.parameters():
                    p.grad.div_(length)
            optimizer.step()
            optimizer.zero_grad()
            if bug == "late-noise" and at == 1:  # as from another process that writes these weights
                noise = torch.Generator().manual_seed(time.time_ns())
                net.load_state_dict({k: v + torch.randn(v.shape, generator=noise) for k, v in net.state_dict().items()})
            if schedule and bug != "schedule-per-micro-batch":
                for _ in range(size if bug == "schedule-per-process" else 1):
                    schedule.step()
            if bug == "eval" and epoch == 0 and at == 1:
                net.eval()


if __name__ == "__main__":
    main()
