"""A trained model used on its own: predictions for a folder of images, and exported files."""

import csv
import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, Run, composed
from PIL import Image, ImageOps

import evaluate
from lockstep.checkpoint import io as checkpoint_io
from lockstep.commands import project_programs
from lockstep.data import Spec
from lockstep.errors import UserError
from lockstep.job import prediction
from lockstep.programs import export
from lockstep.report.prediction_table import note_on_numbers, write_predictions
from lockstep.vision.data import ImageFiles
from project.models import MnistCNN

SIZE = 12
CLASSES = ("blue ones", "red ones")
BROKEN = "deeper/cut.png"


def paint(folder: Path, count: int, seed: int) -> None:
    """Return images in which red or blue is stronger on the whole; higher than wide, so that they are cropped."""
    random = np.random.default_rng(seed)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 200, (20, 16, 3))
            pixels[..., 2 - 2 * label] += 40
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:02}.png")


@pytest.fixture(scope="module")
def trained(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run on images whose training set is gone since; the test set has got a broken file."""
    folder = tmp_path_factory.mktemp("prediction")
    paint(folder / "images" / "train", 30, seed=0)
    paint(folder / "images" / "test", 9, seed=1)
    options = (
        f"data.image_size={SIZE}",
        "data.augment=null",
        "batch_size=12",
        "max_epochs=3",
        "logger=none",
        "threads=1",
    )
    run = Program(folder / "outputs")("data=image_folder", f"data_dir={folder / 'images'}", *options)
    shutil.rmtree(folder / "images" / "train")
    (folder / "images" / "test" / "deeper").mkdir()
    whole = (folder / "images" / "test" / CLASSES[0] / "00.png").read_bytes()
    (folder / "images" / "test" / BROKEN).write_bytes(whole[: len(whole) // 2])
    return run


def images_of(run: Run) -> Path:
    return run.outputs.parent / "images" / "test"


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_hand(run: Run, files: list[str]) -> torch.Tensor:
    """Return probabilities [n, 2] in plain torch and Pillow: short side to SIZE, the middle, ImageNet's moments."""
    checkpoint = checkpoint_io.load(run.folder / "checkpoints" / "best.ckpt")
    net = MnistCNN(**checkpoint["hyper_parameters"])
    net.load_state_dict(checkpoint["state_dict"])
    actual = []
    for file in files:
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
        actual.append((decoded(images_of(run) / file) / 255 - mean) / std)
    with torch.no_grad():
        return net.eval()(torch.stack(actual)).softmax(1)


@pytest.mark.usefixtures("processes")
def test_a_folder_is_predicted_as_the_test_was(trained: Run, tmp_path: Path) -> None:
    predict = Program(tmp_path / "outputs", "src/predict.py")
    run = predict(f"checkpoint={trained.folder}", f"images={images_of(trained)}", "devices=1,3", "batch_size=5", "-m")
    one, three = (folder / "predictions.csv" for folder in run.jobs)
    rows = table(one)
    assert list(rows[0]) == ["file", "predicted", "probability", *CLASSES]
    names = [row["file"] for row in rows]
    assert names == sorted(names)
    assert len(names) == 19
    (broken,) = [row for row in rows if row["file"] == BROKEN]
    assert (broken["predicted"], broken["probability"]) == ("", "")
    shown = run.stdout.splitlines()
    first = [[row["file"], row["predicted"], row["probability"]] for row in rows[:5]]
    assert [re.split("  +", line)[:3] for line in shown[1:6]] == first, "the first rows on the console"
    assert (shown[0].split()[:3], shown[6]) == (["file", "predicted", "probability"], "...")
    assert len({line.index(row["probability"]) for line, row in zip(shown[1:6], rows, strict=False)}) == 1, "aligned"
    assert run.stderr.count(f"images that can't be decoded have empty rows: {BROKEN}") == 2  # one for each run
    rows = [row for row in rows if row["file"] != BROKEN]
    right = sum(row["file"].startswith(row["predicted"] + "/") for row in rows)
    assert right == trained.summary["metrics"]["test/correct"]
    actual = torch.tensor([[float(row[name]) for name in CLASSES] for row in rows])
    expected = by_hand(trained, [row["file"] for row in rows])
    assert (actual - expected).abs().max() < 2e-6
    assert (actual - expected.flip(1)).abs().max() > 0.1  # the control
    assert [row["predicted"] for row in rows] == [CLASSES[best] for best in expected.argmax(1).tolist()]
    assert [row["file"] for row in table(three)] == names
    others = torch.tensor([[float(row[name]) for name in CLASSES] for row in table(three) if row["file"] != BROKEN])
    assert (actual - others).abs().max() < 2e-6
    assert [json.loads((folder / "summary.json").read_text())["broken"] for folder in run.jobs] == [[BROKEN]] * 2


@pytest.mark.usefixtures("processes")
def test_files_lists_and_the_likeliest_classes(trained: Run, tmp_path: Path) -> None:
    """And what a spreadsheet would compute is text in it."""
    folder, formula = tmp_path / "more", "=1+1.png"
    shutil.copytree(images_of(trained) / CLASSES[0], folder)
    shutil.copy(folder / "00.png", tmp_path / formula)
    (tmp_path / "list.txt").write_text(f"more/01.png\n\n{formula}\n")
    (tmp_path / "list.csv").write_text("label,file\n3,more/02.png\n")
    images = f"images=[list.txt,{folder / '03.png'},list.csv,'{formula}']"
    predict = Program(tmp_path / "outputs", "src/predict.py")
    run = predict(f"checkpoint={trained.folder}", images, "top_k=2", cwd=tmp_path)
    rows = table(run.folder / "predictions.csv")
    assert list(rows[0]) == ["file", "predicted", "probability", "predicted_2", "probability_2"]
    files = ["more/01.png", f"./{formula}", str(folder / "03.png"), "more/02.png", f"./{formula}"]
    assert [row["file"] for row in rows] == files
    expected = by_hand(trained, [f"{CLASSES[0]}/{name}.png" for name in ("01", "00", "03", "02", "00")]).topk(2)
    for row, sure, likely in zip(rows, expected.values.tolist(), expected.indices.tolist(), strict=True):
        assert [row["predicted"], row["predicted_2"]] == [CLASSES[label] for label in likely]
        assert [float(row["probability"]), float(row["probability_2"])] == pytest.approx(sure, abs=2e-6)
    assert re.search(r"5 images, \d+ images/s: ", run.stderr)
    ImageFiles([str(folder), str(folder / "01.png")], SIZE, 3)  # the control
    for words, output in (
        ("list.csv", "there is no .*gone.png: paths in a list are relative to its folder"),
        ("gone.png", "no such file or folder"),
    ):
        (tmp_path / "list.csv").write_text("gone.png\n")
        with pytest.raises(UserError, match=output):
            ImageFiles([str(folder), str(tmp_path / words)], SIZE, 3)


def test_images_are_predicted_with_the_pixels_of_the_training(tmp_path: Path) -> None:
    Image.new("RGBA", (SIZE, SIZE)).save(tmp_path / "a.png")
    Image.fromarray(np.full((SIZE, SIZE), 4095, dtype=np.uint16)).save(tmp_path / "b.png")
    spec = Spec(3, SIZE, ("a", "b"))
    for background, value in (("white", 255), ([0, 0, 0], 0)):
        config: Any = SimpleNamespace(data={"background": background, "bits": 12})
        reader = {"_target_": "lockstep.vision.data.ImageFiles"}
        files = prediction.open_files(str(tmp_path), reader, config, spec)
        assert [files[index][0].unique().tolist() for index in range(2)] == [[value], [255]]


def test_names_of_classes_are_no_formulas(tmp_path: Path) -> None:
    spec = Spec(1, SIZE, ("-", "=2+5"))
    ids, rows = torch.tensor([0, -1]), torch.tensor([[0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    assert write_predictions(tmp_path / "table.csv", ["@a.png", "b.png"], spec, ids, rows) == ["b.png"]
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0] == "file,predicted,probability,'-,'=2+5"
    assert lines[1:] == ["./@a.png,'=2+5,0.750000,0.250000,0.750000", "b.png,,,,"]


def test_logits_are_called_so() -> None:
    spec, ids = Spec(1, SIZE, ("a", "b")), torch.arange(2)
    logits = torch.tensor([[0.25, 0.7], [1.0, -3.0]], dtype=torch.float64)
    assert note_on_numbers("Lit", spec, ids, logits).startswith("the numbers are the output of Lit.forward, not prob")
    assert note_on_numbers("Lit", spec, ids, logits.softmax(1)) == ""
    assert note_on_numbers("Lit", replace(spec, task="regression"), ids, logits) == ""


def test_a_module_reports_what_it_predicts(trained: Run, project: Path, tmp_path: Path) -> None:
    """Numbers that are no probabilities of the classes are written as they are."""
    task = ("data=image_folder", f"data_dir={tmp_path}", f"data.image_size={SIZE}", "data.channels=1", "model=mine")
    for part in ("train", "test"):
        paint(tmp_path / part, 6, seed=1)
    (tmp_path / "train" / "third").mkdir()
    (tmp_path / "test" / "third").mkdir()
    for part in ("train", "test"):
        shutil.copy(tmp_path / part / CLASSES[0] / "00.png", tmp_path / part / "third")
    for name, columns in (("MultiLabel", [*CLASSES, "third"]), ("Regression", ["value_0"])):
        train = Program(tmp_path / name, home=project)
        run = train(*task, f"model._target_=mine.{name}", "batch_size=4", "max_steps=2", "threads=1", "logger=none")
        words = (f"checkpoint={run.folder}", f"+model._target_=mine.{name}", f"images={tmp_path / 'test'}")
        predict = Program(tmp_path / f"{name}_told", "src/predict.py", project)
        rows = table(predict(*words).folder / "predictions.csv")
        assert list(rows[0]) == ["file", *columns]
        actual = torch.tensor([[float(row[column]) for column in columns] for row in rows])
        last = sorted((run.folder / "checkpoints").glob("*.ckpt"))[0]
        state = checkpoint_io.load(last)["state_dict"]
        files = [Image.open(tmp_path / "test" / row["file"]).convert("L") for row in rows]
        x = torch.stack([torch.from_numpy(np.array(ImageOps.fit(file, (SIZE, SIZE), 2))) for file in files])
        hidden = ((x.flatten(1) / 255 - 0.449) / 0.226) @ state["net.1.weight"].T + state["net.1.bias"]
        scores = hidden.relu() @ state["net.3.weight"].T + state["net.3.bias"]
        assert (actual - (scores.sigmoid() if name == "MultiLabel" else scores[:, :1] - 5)).abs().max() < 1e-5
    refused = predict(*words, "top_k=1", ok=False)
    assert refused.returncode == 2
    assert "top_k=1: the model's predict_step does not return class probabilities" in refused.stderr


@pytest.mark.usefixtures("processes")
def test_an_evaluation_on_other_classes_is_refused(trained: Run, tmp_path: Path) -> None:
    """Whose names differ in a capital: sorted, they would get each other's labels."""
    for part in ("train", "test"):
        paint(tmp_path / part, 1, seed=2)
        (tmp_path / part / CLASSES[1]).rename(tmp_path / part / "Red ones")
    raw = composed(f"checkpoint={trained.folder}", f"data_dir={tmp_path}", page="evaluate")
    best = trained.folder / "checkpoints" / "best.ckpt"
    with pytest.raises(UserError, match=f"only the data set has Red ones, only {best} has red ones"):
        project_programs.evaluate(evaluate.evaluate, raw, tmp_path / "run")


@pytest.mark.usefixtures("processes")
def test_an_export_would_leave_out_what_is_done_beside_forward(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: MnistCNN, batch: Any, at: int) -> Any:
        return batch if self.trainer.training is in_evaluation else (batch[0] / 2, batch[1])

    monkeypatch.setattr(MnistCNN, "on_after_batch_transfer", changed)
    in_evaluation = True
    with pytest.raises(UserError, match=r"MnistCNN: its on_after_batch_transfer changes images in evaluation"):
        export.export(composed(f"checkpoint={trained.folder}", page="export"), tmp_path)
    assert not list(tmp_path.iterdir())
    in_evaluation = False  # the control: it changes batches in training only
    export.export(composed(f"checkpoint={trained.folder}", page="export"), tmp_path)


@pytest.mark.usefixtures("processes")
def test_an_export_refuses_a_key_that_would_change_nothing(trained: Run, tmp_path: Path) -> None:
    raw = composed(f"checkpoint={trained.folder}", "+precision=bf16-mixed", page="export")
    with pytest.raises(UserError, match="precision: an export always uses precision=32-true: leave it out"):
        export.export(raw, tmp_path)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    for folder, output in (
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path, "no image in it: known are "),
    ):
        with pytest.raises(UserError, match=re.escape(f"images={folder}: {output}")):
            ImageFiles(folder, SIZE, 3)
    for name in ("a.png", "b.gif"):
        (tmp_path / name).write_bytes(b"cut")
    (tmp_path / "list.csv").write_text("label,file\ncat,a.png\ndog\n")
    with pytest.raises(UserError, match=r"images=.*list.csv: the row dog has no file$"):
        ImageFiles(tmp_path / "list.csv", SIZE, 3)
    with pytest.raises(UserError, match=r"images=.*: no image can be decoded, a.png for example"):
        ImageFiles(tmp_path, SIZE, 3)
    with pytest.raises(UserError, match="1 or 3 channels, but the model was trained on 4"):
        ImageFiles(tmp_path, SIZE, 4)


@pytest.mark.usefixtures("processes")
def test_an_exported_file_takes_raw_images_and_agrees(trained: Run, tmp_path: Path) -> None:
    export = Program(tmp_path / "outputs", "lockstep export")
    run = export(f"checkpoint={trained.folder}", "format=torch,onnx", "-m", ok=False)
    files = sorted((images_of(trained) / CLASSES[0]).iterdir())
    images = torch.stack([decoded(path) for path in files])
    expected = by_hand(trained, [f"{CLASSES[0]}/{path.name}" for path in files])
    program: Any = torch.export.load(run.jobs[0] / "model.pt2").module()
    assert (program(images) - expected).abs().max() < 1e-5
    assert (program(images[:1]) - expected[:1]).abs().max() < 1e-5
    assert "of the data set and random ones" in run.stdout or "random images, since" in run.stdout
    about = json.loads((run.jobs[0] / "model.json").read_text())
    inside = {"model.json": ""}
    torch.export.load(run.jobs[0] / "model.pt2", extra_files=inside)
    assert json.loads(inside["model.json"]).items() <= about.items()
    assert (about["classes"], about["input"]) == (list(CLASSES), ["n", 3, SIZE, SIZE])
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")):
        assert run.returncode == 0, run
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(run.jobs[1] / "model.onnx"))
        assert (session.input_names, session.output_names) == (["images"], ["output"])
        (actual,) = session.run(None, {"images": images.numpy()})
        assert np.abs(actual - expected.numpy()).max() < 1e-5
        import onnx

        texts = {each.key: each.value for each in onnx.load(run.jobs[1] / "model.onnx").metadata_props}
        assert json.loads(texts["classes"]) == list(CLASSES)
        assert (texts["task"], json.loads(texts["image_size"])) == ("classification", SIZE)
    else:
        assert run.returncode == 1
        assert "job 1 failed: format=onnx needs " in run.stderr
        assert "; format=torch does not" in run.stderr


def decoded(path: Path) -> torch.Tensor:
    image = Image.open(path).resize((SIZE, SIZE), Image.Resampling.BILINEAR, (0, 2, 16, 18))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)
