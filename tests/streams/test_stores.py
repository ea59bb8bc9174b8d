"""`lockstep index` and `lockstep shards`: what they write, that they go on, and what a run reads."""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import written_shards
from small_data import refusal_of
from store_servers import WebServer, client, files_in, upload
from written_shards import picture, same, write_folder, write_shards, write_tar

from lockstep_streams import remote_index, shard_cache
from lockstep_streams.programs import index, shards

pytestmark = pytest.mark.usefixtures("servers")
KEEP = ("--retry-seconds", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("images") / "folder")


opened = partial(written_shards.opened, val_fraction=0, test_fraction=0)


def contents(s3: dict[str, str], prefix: str) -> dict[str, bytes]:
    bucket = client(s3)
    listed = bucket.list_objects_v2(Bucket="images", Prefix=f"{prefix}/").get("Contents", [])
    read = (each["Key"] for each in listed)
    return {key.partition("/")[2]: bucket.get_object(Bucket="images", Key=key)["Body"].read() for key in read}


def test_a_folder_becomes_shards_that_train_as_the_folder(
    folder: Path,
    tmp_path: Path,
    s3: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also when they were copied into a bucket."""
    monkeypatch.setattr(shards, "MIB", 1 << 13)
    assert shards.main([str(folder), str(tmp_path / "made"), "--megabytes", "2"]) == 0
    made = {name: (tmp_path / "made" / name).read_bytes() for name in files_in(tmp_path / "made")}
    assert {name.partition("-")[0] for name in made} == {"train", "test"}
    assert len(made) > 3
    assert f"{len(made)} shards with 54 images in {tmp_path}/made\n" in capsys.readouterr().out
    remote = opened(upload(tmp_path / "made", s3, "made"))
    assert same(remote.train, opened(folder, "image_folder").train)
    assert not same(remote.train, opened(folder, "image_folder").test)
    (tmp_path / "made" / "train-00001.tar").write_bytes(b"half")
    shards.main([str(folder), str(tmp_path / "made"), "--megabytes", "2"])
    assert made == {name: (tmp_path / "made" / name).read_bytes() for name in files_in(tmp_path / "made")}
    assert f"{tmp_path}/made: has other shards, " in refusal_of(
        shards.main, [str(folder), str(tmp_path / "made"), "--megabytes", "64"]
    )


def test_a_list_becomes_shards_with_labels(folder: Path, tmp_path: Path) -> None:
    rows = ["path,label,split"]
    paths = sorted(path for part in ("train", "test") for path in (folder / part).rglob("*.*"))
    rows += [f"{path},{path.parent.name.upper()},{path.parent.parent.name}" for path in paths]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    shards.main([str(tmp_path / "list.csv"), str(tmp_path / "made")])
    assert files_in(tmp_path / "made") == ["test-00000.tar", "train-00000.tar"]
    made = opened(tmp_path / "made")
    assert made.spec.classes == ("CAT", "DOG", "EEL")
    assert same(made.test, opened(folder, "image_folder").test)
    (tmp_path / "list.csv").write_text("\n".join(["path,label", f"{paths[0]},a", f"{paths[1]},b", "x.webp,b"]))
    shutil.copy(paths[0], tmp_path / "x.webp")
    assert "x.webp: shards have images of the kinds jpg, jpeg, png: convert it" in refusal_of(
        shards.main, [str(tmp_path / "list.csv"), str(tmp_path / "other")]
    )


def test_a_list_of_images_in_folders_of_two_parts_becomes_shards(folder: Path, tmp_path: Path) -> None:
    """The list decides the part of an image, and not the folder in which it lies."""
    paths = sorted(path for part in ("train", "test") for path in (folder / part).rglob("*.*"))
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *(f"{path},{path.parent.name}" for path in paths)]))
    shards.main([str(tmp_path / "list.csv"), str(tmp_path / "made")])
    assert len(opened(tmp_path / "made").train) == len(paths)


def test_an_index_of_several_kinds_of_images(tmp_path: Path, s3: dict[str, str]) -> None:
    members = {}
    for number in range(8):
        form = ("png", "webp")[number % 2]
        members[f"{'ab'[number // 4]}/{number}.{form}"] = picture(number, form)
        members[f"{'ab'[number // 4]}/{number}.id"] = b"7"
    write_tar(tmp_path / "webp" / "a.tar", members)
    url = upload(tmp_path / "webp", s3, "webp")
    index.main([url, "--image", "webp,png", "--label", "null", *KEEP])
    options: dict[str, Any] = {"image": ["png", "webp"], "label": None}
    (tmp_path / "webp" / "a.tar").unlink()
    assert len(opened(url, **options).train) == 8
    assert contents(s3, "webp").keys() == {"a.tar"}


def test_webdataset_reads_the_shards(folder: Path, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="pip install -e .[dev] brings it")
    shards.main([str(folder), str(tmp_path / "made")])
    read = webdataset.WebDataset(str(tmp_path / "made" / "test-00000.tar"), shardshuffle=False)
    assert len({sample["__key__"] for sample in read}) == 12


def test_an_index_goes_on_and_serves_runs(
    folder: Path,
    tmp_path: Path,
    s3: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = write_shards(folder, tmp_path / "tar", "tar")
    url = upload(made, s3, "indexed")
    fetched: list[str] = []
    most = [2]
    original = shard_cache.ShardCache.fetch_new

    def counted(self: Any, path: str, *arguments: Any) -> Any:
        if len(fetched) == most[0]:
            raise KeyboardInterrupt
        fetched.append(path)
        return original(self, path, *arguments)

    monkeypatch.setattr(remote_index, "CONNECTIONS", 1)
    monkeypatch.setattr(shard_cache.ShardCache, "fetch_new", counted)
    shared = str(tmp_path / "shared")
    with pytest.raises(KeyboardInterrupt):
        index.main([url, "--index-dir", shared])
    most[0] = 99
    assert index.main([url, "--index-dir", shared]) == 0
    assert len(fetched) == len(set(fetched)) == 6
    assert f"6 shards with 54 images; what a run needs to know of them is in {shared}/" in capsys.readouterr().out
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other_machine"))
    assert opened(url, index_dir=shared).fingerprint == opened(made).fingerprint
    assert len(fetched) == 6
    client(s3).delete_object(Bucket="images", Key="indexed/train-00001.tar")
    assert len(opened(url, index_dir=shared).train) == 28  # the list decides, not the index
    damaged = [*Path(shared).rglob("records-*/*.json")]
    for file, content in zip(damaged, (b"", b"{}", b'{"known": 3', b"[]", b'{"known": {"path": 1}}'), strict=False):
        file.write_bytes(content)
    index.main([url, "--index-dir", shared])  # what is damaged is read again
    assert len(opened(url, index_dir=shared).train) == 28


def test_a_new_index_asks_about_each_shard(folder: Path, tmp_path: Path) -> None:
    web = WebServer(write_shards(folder, tmp_path / "tar", "tar"))
    url = f"{web.url}/{{train,test}}-{{00000..00002}}.tar"
    index.main([url, *KEEP])
    requests = web.requests["train-00000.tar"]
    assert len(opened(url).train) == 42
    assert web.requests["train-00000.tar"] == requests
    replaced = (web.folder / "train-00000.tar").read_bytes()
    (web.folder / "train-00001.tar").write_bytes(replaced)
    index.main([url, *KEEP])
    assert opened(url).train[0][0].shape == (3, 12, 12)
    assert web.requests["train-00000.tar"] == requests
    web.stop()


def test_what_the_programs_refuse(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a run indexes a folder by itself: give a URL" in refusal_of(index.main, [str(folder)])
    assert "secret" not in refusal_of(index.main, ["s3://me:secret@images/x"])
    assert "must be a folder, which the store's own" in refusal_of(shards.main, [str(folder), "s3://images/x"])
    assert "--megabytes=0: must be at least 1" in refusal_of(shards.main, [str(folder), "x", "--megabytes", "0"])
    assert sys.argv
