"""Tensors that the module's state_dict leaves out: a run continues with those that have changed."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from trainer.small import Net, loader, saved_steps, trainer

import lockstep
from lockstep.checkpoint import io as checkpoint_io
from lockstep.checkpoint.left_out import LeftOut
from lockstep.errors import UserError


class Centre(Net):
    """Has a buffer that no checkpoint of Lightning has, and one that never changes."""

    centre: Tensor
    persistent = False
    changes_in = "training_step"

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("centre", torch.zeros(8), persistent=self.persistent)

    def change(self, hook: str, by: Tensor) -> None:
        if hook == self.changes_in:
            self.centre = self.centre.lerp(by, 0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.change("training_step", x.mean(0))
        return super().training_step((x - self.centre + self.table.sum(), y), batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.change("on_train_batch_end", torch.full((8,), 1.0 + self.trainer.global_step))

    def on_train_epoch_end(self) -> None:
        self.change("on_train_epoch_end", torch.ones(8))


class InAHook(Centre):
    changes_in = "on_train_batch_end"


class AtEpochs(Centre):
    changes_in = "on_train_epoch_end"


class Hidden(Centre):
    """No counter of versions sees this change."""

    changes_in = "nowhere"

    def on_train_batch_end(self, *args: Any) -> None:
        self.centre.data.add_(0.125)


class Later(Centre):
    """Registers the buffer in its first step."""

    changes_in = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        del self.centre

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "centre"):
            self.register_buffer("centre", torch.zeros(8), persistent=False)
        self.centre.mul_(0.5).add_(batch[0].mean(0))
        return Net.training_step(self, batch, batch_idx)


class Removes(Centre):
    """Removes a teacher from what is saved, which keeps files small."""

    changes_in = "nowhere"

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_state_dict_post_hook(self.remove)
        self.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())

    @staticmethod
    def remove(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in [name for name in state if name.startswith((f"{prefix}teacher", f"{prefix}frozen"))]:
            del state[name]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.frozen(self.teacher(batch[0])), batch[1]), batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.teacher.parameters():
            parameter.data.mul_(0.875)


class Other(Centre):
    """Makes another table each time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(3, generator=torch.Generator().manual_seed(Other.number))
        Other.number += 1

    number = 0


class Alone(Net):
    """Removes a trained weight from what is saved."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.weight"]


def test_a_tensor_in_the_place_of_one_that_is_gone_has_changed() -> None:
    """Python may give it the `id` of that one."""
    module = Centre()
    left_out = LeftOut(module, module.state_dict(), None)
    for _ in range(3):
        assert not left_out.state(module, module.state_dict())["changed"]
    first = id(module.centre)
    module.centre = torch.ones(8)
    others = [torch.full((8,), 2.0) for _ in range(1000)]
    module.centre = next((each for each in others if id(each) == first), others[0])
    assert left_out.state(module, module.state_dict())["changed"].keys() == {"centre"}


def run(folder: Path, kind: type[pl.LightningModule], ckpt: Path | None = None, **options: Any) -> str:
    pl.seed_everything(0, verbose=False)
    module = kind()
    made = trainer(folder, **{"exact": True, "pieces": 2, "callbacks": [saved_steps(folder / "all")], **options})
    made.fit(module, loader(), ckpt_path=ckpt)
    everything = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return lockstep.weights_sha256(everything)


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("kind", [Centre, InAHook, AtEpochs, Hidden, Later, Removes])
def test_a_run_continues_with_what_its_state_leaves_out(tmp_path: Path, kind: type[pl.LightningModule]) -> None:
    whole = run(tmp_path, kind)
    for step in (1, 6, 8):
        other = tmp_path / f"from {step}"
        dp = {"strategy": "dp", "devices": 2}
        assert run(other, kind, tmp_path / "all" / f"step={step}.ckpt", **dp) == whole, step
        assert run(tmp_path / "again", kind, other / "all" / "step=9.ckpt") == whole, "continued twice"


def test_what_never_changes_is_not_saved(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    run(tmp_path, Removes, max_epochs=1)
    saved = checkpoint_io.load(tmp_path / "all" / "step=6.ckpt")["continuation"]["left_out"]
    assert sorted(saved["changed"]) == ["teacher.bias", "teacher.weight"]
    assert sorted(saved["sha256"]) == ["centre", "frozen.bias", "frozen.weight", "table"]
    run(tmp_path / "net", Net, max_epochs=1)
    assert "left_out" not in checkpoint_io.load(tmp_path / "net" / "all" / "step=6.ckpt")["continuation"]
    assert not [each for each in recwarn if "leaves out" in str(each.message)]


@pytest.mark.parametrize(("kind", "name"), [(Other, "table"), (Alone, "net.0.weight")])
def test_what_is_not_as_it_was_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[pl.LightningModule], name: str
) -> None:
    run(tmp_path, kind, max_epochs=1)
    with pytest.raises(UserError, match=f"^exact=True: the checkpoint lacks {name}, which the module's"):
        run(tmp_path / "other", kind, tmp_path / "all" / "step=3.ckpt")
    run(tmp_path / "plain", kind, tmp_path / "all" / "step=3.ckpt", exact=False)
    assert f"the checkpoint lacks {name}" in caplog.text
