"""resume= goes on with the data set that a run was trained on, wherever it lies."""

import shutil
from pathlib import Path

from conftest import Program, checkpoint_of, summary_of
from small_data import write_images

RUN = ("max_epochs=1", "batch_size=8", "threads=1", "logger=none", "callbacks.dashboard=null")


def test_another_data_set_is_refused_and_a_moved_one_is_not(run_train: Program, tmp_path: Path) -> None:
    folder, images = tmp_path / "run", write_images(tmp_path / "photos", each=12)
    run_train("data=image_folder", "data.image_size=12", f"data_dir={images}", *RUN, f"hydra.run.dir={folder}")
    before = (folder / ".hydra" / "overrides.yaml").read_bytes(), checkpoint_of(folder)["global_step"]

    def refused(*overrides: str) -> str:
        run = run_train(f"resume={folder}", "max_epochs=2", *overrides, ok=False)
        assert (run.returncode, run.stderr.count("\n")) == (2, 1), run
        assert ((folder / ".hydra" / "overrides.yaml").read_bytes(), checkpoint_of(folder)["global_step"]) == before
        assert "; init_from= begins a new run" in run.stderr
        return run.stderr

    assert "data=synthetic, but " in refused("data=synthetic", "data.num_classes=2", "data.channels=3")
    assert "data.split_seed=3, but " in refused("data.split_seed=3")
    shutil.copy(images / "train" / "cat" / "0.png", images / "train" / "cat" / "more.png")
    shutil.copy(images / "train" / "dog" / "0.png", images / "train" / "dog" / "more.png")
    assert "counts its steps in 22 training samples, and there are 23" in refused()
    for name in ("cat", "dog"):
        (images / "train" / name / "more.png").unlink()
    moved = images.rename(tmp_path / "elsewhere")
    run = run_train(f"resume={folder}", "max_epochs=2", f"data_dir={moved}", "data.augment.crop=1", "data.mix=mixup")
    assert "content of the data set has changed" not in run.stderr
    assert (summary_of(folder)["steps"], summary_of(folder)["samples_seen"]) == (6, 44)
