"""Train with accelerate, on one process or under torchrun, rightly or with a mistake."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from parts import NETS, STEP, arguments, data, world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    a = arguments()
    bug, size = a.bug, world()
    config = DataLoaderConfiguration(split_batches=bug != "batch-per-process")
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=a.accumulate,
        dataloader_config=config,
        step_scheduler_with_optimizer=bug != "schedule-always",
        mixed_precision="bf16" if bug == "autocast" else "no",
    )
    torch.manual_seed(0)
    net = NETS[a.net]()
    if bug == "frozen":
        net[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1 if bug == "decay" else 0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n if a.schedule else 1.0)
    micro = STEP // a.accumulate
    loader = DataLoader(
        TensorDataset(*data(a.samples)), micro, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    criterion = nn.CrossEntropyLoss(reduction="sum" if bug == "sum" else "mean")
    for _ in range(a.epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = criterion(net(x), y)
                if bug == "twice":
                    loss = loss / a.accumulate
                accelerator.backward(loss * (size if bug == "times-world" else 1))
                if bug == "clip-passes":
                    nn.utils.clip_grad_norm_(net.parameters(), a.clip)
                elif a.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), a.clip)
                optimizer.step()
                if bug != "no-schedule":
                    schedule.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
