"""Judge training scripts that others wrote with `lockstep same`, and write docs/results/same-scripts.md:

    python scripts/lab/public_scripts.py --mirrors ~/mirrors --data ~/data
    python scripts/lab/public_scripts.py --mirrors ~/mirrors --data ~/data nanoGPT imagenet

`--mirrors` has a bare clone of each repository as <owner>+<name>/repo; `--data` has MNIST/raw. scripts/lab/public/
has the list of scripts, with what replaces their data and devices. Nothing of the scripts is copied into this
repository. Words choose the scripts whose titles contain one; then the page is not written.

Exit codes: 0 each verdict is the expected one, 1 some are not.
"""

import argparse
import gzip
import os
import pickle
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from nightly import commit_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "same-scripts.md"
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
RANKS = {"$ONE": 1, "$TWO": 2}  # processes of torchrun
STEPS = 8
WORDS = [
    f"{a}{b}" for a in ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t"] for b in ["a", "e", "i", "o", "u"]
]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--mirrors", type=Path, required=True)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("words", nargs="*")
    chosen = made.parse_args()
    scripts = yaml.safe_load((Path(__file__).parent / "public" / "scripts.yaml").read_text())
    chosen_scripts = [
        each for each in scripts if not chosen.words or any(word in each["script"] for word in chosen.words)
    ]
    rows, wrong = [], 0
    for each in chosen_scripts:
        with tempfile.TemporaryDirectory(prefix="public_") as folder:
            commit = check_out(each, chosen.mirrors, Path(folder))
            place = Path(folder) / each.get("folder", ".")
            prepare(each, place, chosen.data.resolve())
            rows.append(f"{each['script']} at {commit[:12]}{'; ' + each['note'] if 'note' in each else ''}")
            for first, second, right in each["pairs"]:
                sides = [text(side, each) for side in (first, second)]
                begin = time.monotonic()
                verdict = run(sides, place, each.get("steps", STEPS))
                good = right.removeprefix("error: ") in verdict[0] if right.startswith("error") else right in verdict
                wrong += not good
                print(f"{'right' if good else 'WRONG'} {time.monotonic() - begin:.0f} s: {each['script']}", flush=True)
                print(f"    {first} | {second}: {right}", *verdict[1:], sep="\n      ", flush=True)
                rows += [f"  {'' if good else 'WRONG: '}{shown(first, each)}", f"  | {shown(second, each)}"]
                rows += [f"    {line[:112]}" for line in verdict[1:]]
    if not chosen.words:
        listed = "\n".join(["```text", *rows, "```"])
        content = PAGE.read_text()
        table = f"{BEGIN}\n\nCommit {commit_of(ROOT)}.\n\n{listed}\n\n{END}"
        PAGE.write_text(content[: content.index(BEGIN)] + table + content[content.index(END) + len(END) :])
    return int(wrong > 0)


def text(side: str, script: dict[str, Any]) -> str:
    side = side.replace("$SIDES", script.get("sides", ""))
    for word, ranks in RANKS.items():
        side = side.replace(word, f"python -m torch.distributed.run --standalone --nproc-per-node={ranks}")
    return side


def shown(side: str, script: dict[str, Any]) -> str:
    for word, ranks in RANKS.items():
        side = side.replace(word, f"torchrun x {ranks}")
    return side.replace("$SIDES", "train.py" if "train.py" in script.get("sides", "") else "main.py")


def check_out(script: dict[str, Any], mirrors: Path, folder: Path) -> str:
    """Write the files of a script into a folder. Return the commit."""
    name = script["script"].split()[0].replace("/", "+")
    git = ["git", "-C", str(mirrors / name / "repo")]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    paths = script.get("paths", [script["folder"]] if script.get("folder") else ["."])
    packed = subprocess.run([*git, "archive", commit, "--", *paths], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return commit


def prepare(script: dict[str, Any], folder: Path, data: Path) -> None:
    for name, old, new in script.get("replace", ()):
        content = (folder / name).read_text()
        if old not in content:
            raise SystemExit(f"{script['script']}: {name} has no {old}")
        (folder / name).write_text(content.replace(old, new.replace("$DATA", str(data))))
    for kind in script.get("data", "").split():
        DATA[kind](folder)
    if "before" in script:
        subprocess.run(script["before"], shell=True, cwd=folder, check=True, env=environment(), capture_output=True)


def environment() -> dict[str, str]:
    offline = {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **offline, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "MPLBACKEND": "agg"}


def run(sides: list[str], folder: Path, steps: int) -> list[str]:
    """Return the kinds of the verdict, in one line, and its lines."""
    import json

    words = [sys.executable, "-m", "lockstep", "same", *sides, "--steps", str(steps), "--timeout", "120", "--json"]
    variables = {**environment(), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        error = done.stderr.strip().splitlines()[-1:]
        return [error[0] if error else "no output", *error]
    verdict = json.loads(done.stdout)
    kinds = [each["kind"] for each in verdict["causes"]] or (["same"] if not verdict["code"] else ["no cause"])
    lines = [verdict["line"], *[f"cause: {each['text']}" for each in verdict["causes"]], *verdict["notes"]]
    return Kinds([", ".join(kinds), *lines])


class Kinds(list[str]):
    """The lines of a verdict; `in` looks at its first line, the kinds."""

    def __contains__(self, kind: object) -> bool:
        return str(kind) in self[0].split(", ")


# --- local data -------------------------------------------------------------------------------------------------------


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join("".join(draw.choices(WORDS, k=2)) for _ in range(draw.randint(4, 9))) for _ in range(count)]


def write_text(folder: Path) -> None:
    (folder / "text.txt").write_text("\n".join(sentences(2000)))


def write_words(folder: Path) -> None:
    """Write a module with a data set of words in place of one that is downloaded."""
    (folder / "words.py").write_text(
        "import torch\n"
        "class WikiText2(torch.utils.data.Dataset):\n"
        "    vocab_size = 64\n"
        "    words = torch.randint(64, (6000, 9), generator=torch.Generator().manual_seed(0))\n"
        "    def __len__(self): return len(self.words)\n"
        "    def __getitem__(self, at): return self.words[at, :8], self.words[at, 1:]\n"
    )


def write_wiki(folder: Path) -> None:
    (folder / "wiki").mkdir()
    for number, part in enumerate(("train", "valid", "test")):
        (folder / "wiki" / f"{part}.txt").write_text("\n".join(sentences(2000, number)))


def write_images(folder: Path) -> None:
    """Write 64 JPEG files in two classes, as torchvision's ImageFolder reads them."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(64):
            path = folder / "images" / part / f"class{number % 2}"
            path.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path / f"pet_{number}.jpg")
    flat = folder / "pets"
    flat.mkdir()
    for number in range(128):
        Image.fromarray(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(
            flat / f"kind{number % 3}_{number}.jpg"
        )


def write_characters(folder: Path) -> None:
    """Write what nanoGPT's preparation of characters writes: token files and the vocabulary."""
    content = "\n".join(sentences(2000))
    letters = sorted(set(content))
    path = folder / "data" / "local"
    path.mkdir(parents=True)
    tokens = np.array([letters.index(each) for each in content], dtype=np.uint16)
    tokens[:-5000].tofile(path / "train.bin")
    tokens[-5000:].tofile(path / "val.bin")
    (path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def write_tokens(folder: Path) -> None:
    """Write a token file of llm.c: a header of 256 int32, then uint16."""
    header = np.zeros(256, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, 512, 20000).astype(np.uint16)
    header[:3] = 20240520, 1, len(tokens)
    (folder / "tokens.bin").write_bytes(header.tobytes() + tokens.tobytes())


def write_bytes(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "enwik8.gz").write_bytes(gzip.compress("\n".join(sentences(20000)).encode()))


def write_bert(folder: Path) -> None:
    """Write a small BERT with random weights, its tokenizer, and pairs of sentences as CSV."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    path = folder / "bert-local"
    path.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *[f"##{each}" for each in WORDS]]
    (path / "vocab.txt").write_text("\n".join(pieces))
    BertTokenizerFast(vocab=str(path / "vocab.txt")).save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(path)
    for part in ("train", "validation"):
        first, second = sentences(320, 1), sentences(320, 2)
        rows = [f"{a},{b},{at % 2},{at}" for at, (a, b) in enumerate(zip(first, second, strict=True))]
        (folder / f"{part}.csv").write_text("\n".join(["sentence1,sentence2,label,idx", *rows]))


def write_gpt(folder: Path) -> None:
    """Write a small GPT-2 with random weights, its tokenizer, and instructions as JSON."""
    import json

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    letters = {letter: at for at, letter in enumerate(map(chr, range(32, 127)))} | {"\n": 95, "<unk>": 96, "<end>": 97}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", bos_token="<end>")
    fast.save_pretrained(folder / "gpt-local")
    torch.manual_seed(0)
    chosen = GPT2Config(
        vocab_size=98, n_positions=512, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    GPT2LMHeadModel(chosen).save_pretrained(folder / "gpt-local")
    lines = sentences(400)
    rows = [
        {"instruction": a, "input": "", "output": b[: 5 + 7 * (at % 5)]}
        for at, (a, b) in enumerate(zip(lines, lines[::-1], strict=True))
    ]
    (folder / "instructions.json").write_text(json.dumps(rows))


DATA = {
    "text": write_text,
    "words": write_words,
    "wiki": write_wiki,
    "images": write_images,
    "characters": write_characters,
    "tokens": write_tokens,
    "bytes": write_bytes,
    "bert": write_bert,
    "gpt": write_gpt,
}

if __name__ == "__main__":
    sys.exit(main())
