"""Train a small language model with Hugging Face's Trainer, on one process or under torchrun, rightly or not."""

import tempfile

import torch
from parts import STEP, arguments, world
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset):
    def __init__(self, samples: int, uneven: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(1, 50, (samples, 12), generator=generator)
        self.lengths = torch.randint(3, 12, (samples,), generator=generator) if uneven else torch.full((samples,), 12)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(12) < self.lengths[at]).long()
        labels = self.ids[at].masked_fill(mask == 0, -100)
        return {"input_ids": self.ids[at], "attention_mask": mask, "labels": labels}


class Changed(Trainer):
    """A Trainer whose user has written a loss."""

    bug = ""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss = loss * {"sum": len(inputs["input_ids"]), "times-world": world()}.get(self.bug, 1)
        return (loss, None) if return_outputs else loss


def main() -> None:
    a = arguments()
    bug, size = a.bug, world()
    set_seed(0)
    dropout = 0.1 if a.net == "dropout" else 0.0
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))
    if bug == "frozen":
        model.transformer.wpe.weight.requires_grad_(False)
    options = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=STEP // size // a.accumulate * (2 if bug == "batch" else 1),
        gradient_accumulation_steps=a.accumulate,
        num_train_epochs=a.epochs,
        max_grad_norm=0.0 if bug == "no-clip" else a.clip or 1.0,
        learning_rate=0.002 if bug == "scaled-rate" else 0.001,
        lr_scheduler_type="constant" if bug == "no-schedule" else "linear",
        weight_decay=0.1 if bug == "decay" else 0.0,
        bf16=bug == "autocast",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_drop_last=bug == "drop_last",
        seed=1 if bug == "seed" else 0,
        data_seed=0,
        average_tokens_across_devices=bug != "tokens-by-rank",
    )
    kind = Changed if bug in ("own-loss", "sum", "accumulation", "times-world", "tokens-by-pass") else Trainer
    trainer = kind(model, options, train_dataset=Texts(a.samples, a.net == "conv"))
    trainer.bug = bug
    if bug == "accumulation":
        trainer.model_accepts_loss_kwargs = True  # the loss is not divided, as if it already were
    trainer.train()


if __name__ == "__main__":
    main()
