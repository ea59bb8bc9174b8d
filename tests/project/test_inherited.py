"""The template's own nets and data sets, tested by the classes that users inherit."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from small_data import write_images, write_mnist

from lockstep.testing import DataTests, ModuleTests

DATA = ("data=synthetic", "data.samples=100", "data.num_classes=3")

# --- nets -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
class TestMnistCNN(ModuleTests):
    overrides = ["model=mnist_cnn", "model.dropout=0.3", *DATA, "data.image_size=12"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestSmallCNN(ModuleTests):
    overrides = ["model=small_cnn", "model.dropout=0.3", "model.class_weights=balanced", *DATA, "data.image_size=12"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestFastCNN(ModuleTests):
    overrides = ["model=fast_cnn", "model.width=[4,4,8,8]", *DATA, "data.image_size=20"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestResNet9(ModuleTests):
    overrides = ["model=resnet9", "model.width=[4,4,8,8]", *DATA, "data.image_size=12", "data.mix=mixup"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestResNet18(ModuleTests):
    overrides = ["model=resnet18", *DATA, "data.image_size=12"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestSmallResNet18(ModuleTests):
    overrides = ["model=small_resnet18", "model.norm=group", *DATA, "data.image_size=9", "model.label_smoothing=0.1"]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
class TestTorchvision(ModuleTests):
    overrides = [
        "model=torchvision",
        "model.arch=mobilenet_v3_small",
        *DATA,
        "data.image_size=33",
        "model.freeze=[net.features.0.*]",
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
class TestTimm(ModuleTests):
    overrides = ["model=timm", "model.arch=test_efficientnet", *DATA, "data.image_size=33"]


# --- data sets --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("processes")
class TestDigits(DataTests):
    overrides = ["data=digits", "data/transforms=trivial_augment", "data.sampling=balanced"]


@pytest.mark.usefixtures("processes")
class TestSynthetic(DataTests):
    overrides = [*DATA, "data/transforms=rand_augment"]


class InFolder(DataTests):
    """Data sets whose files are written first."""

    options: tuple[str, ...] = ()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def files(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Write the files, and name their folder."""
        folder = tmp_path_factory.mktemp(cls.__name__)
        cls.write(folder)
        cls.overrides = [f"data_dir={folder}", *(option.replace("<folder>", str(folder)) for option in cls.options)]

    @classmethod
    def write(cls, folder: Path) -> None:
        """Write the files."""
        write_images(folder)


@pytest.mark.usefixtures("processes")
class TestImageFolder(InFolder):
    options = ("data=image_folder", "data/transforms=random_resized_crop")


@pytest.mark.usefixtures("processes")
class TestImageList(InFolder):
    options = ("data=image_list", "data.csv=<folder>/list.csv", "data.sampling=balanced")

    @classmethod
    def write(cls, folder: Path) -> None:
        """Write images in folders and a list of them."""
        write_images(folder, each=20)
        paths = sorted(folder.glob("*/*/*.png"))
        rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in paths]
        (folder / "list.csv").write_text("\n".join(["path,label", *rows]))


@pytest.mark.usefixtures("processes")
class TestMnist(InFolder):
    options = ("data=mnist",)

    @classmethod
    def write(cls, folder: Path) -> None:
        """Write a small set in MNIST's files."""
        write_mnist(folder)
