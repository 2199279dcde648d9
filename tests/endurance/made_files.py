"""Makes the small files that strangers' scripts read: texts, tokens, images, rows, models."""

import gzip
import json
import struct
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

DIFFERENT = 16  # pictures
SIZES = (640, 480), (640, 427), (480, 640), (640, 427)
WORDS = "the a of in it is model reads text common words learns which word comes next"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"


def make(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Make the files of a list, as path -> {kind: what}, that are not there."""
    for name, order in files.items():
        ((kind, what),) = order.items()
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            KINDS[kind](path, what)


def prose(words: int, seed: int = 0) -> str:
    """Words at random."""
    chosen = np.random.default_rng(seed).choice(WORDS.split(), words)
    return " ".join(map(str, chosen))


def _text(path: Path, words: int) -> None:
    """Lines of twenty words."""
    parts = prose(words).split()
    lines = (" ".join(parts[i : i + 20]) for i in range(0, words, 20))
    path.write_text("\n".join(lines) + "\n")


def _tokens(path: Path, count: int) -> None:
    """Tokens of 16 bits below 50,000, as nanoGPT's files."""
    np.random.default_rng(0).integers(0, 50_000, count, dtype=np.uint16).tofile(path)


def _long_tokens(path: Path, count: int) -> None:
    """As ``_tokens``, of 32 bits each."""
    np.random.default_rng(0).integers(0, 50_000, count, dtype=np.int32).tofile(path)


def _shard(path: Path, count: int) -> None:
    """As ``_tokens`` behind a head of 1 KB, as llm.c's files; every 300th begins a document."""
    head = np.zeros(256, dtype=np.int32)
    head[:3] = 20240520, 1, count
    tokens = np.random.default_rng(0).integers(0, 50_000, count, dtype=np.uint16)
    tokens[::300] = 50256
    path.write_bytes(head.tobytes() + tokens.tobytes())


def _gzip(path: Path, count: int) -> None:
    """So many MiB of letters, compressed."""
    letters = np.random.default_rng(0).integers(32, 126, 2**20, dtype=np.uint8).tobytes()
    path.write_bytes(gzip.compress(letters, 1) * count)


def _pairs(first: Path, count: int) -> None:
    """Pictures of 960 x 640, of which this is the first, and masks of them in ``masks``."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for i in range(count):
        for name, most, shape in (("imgs/{}.jpg", 255, (3,)), ("masks/{}_mask.gif", 2, ())):
            path = first.parents[1] / name.format(i)
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = drawn.integers(0, most, (640, 960, *shape), dtype=np.uint8)
            Image.fromarray(pixels).save(path)


def _views(folder: Path, count: int) -> None:
    """Views of 800 x 800 of one thing, in Blender's form."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        frames = []
        for i in range(count):
            pixels = drawn.integers(0, 255, (800, 800, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / part / f"{i}.png")
            frames.append({"file_path": f"./{part}/{i}", "transform_matrix": np.eye(4).tolist()})
        facts = {"camera_angle_x": 0.69, "frames": frames}
        (folder / f"transforms_{part}.json").write_text(json.dumps(facts))


def _coco(folder: Path, count: int) -> None:
    """Photographs of 4:3 and 3:2, every fourth upright, with seven boxes or persons each."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    (folder / "annotations").mkdir(parents=True)
    for part in ("train2017", "val2017"):
        (folder / part).mkdir()
        pictures, boxes = [], []
        for i in range(count):
            name = f"{i:012d}.jpg"
            width, height = SIZES[i % len(SIZES)]
            pixels = drawn.integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / part / name)
            pictures.append({"id": i, "file_name": name, "height": height, "width": width})
            for j in range(7):
                outline = [20, 15, 120 + j, 15, 120 + j, 95 + j, 20, 95 + j]
                box = {"bbox": [20, 15, 100 + j, 80 + j], "area": 8000, "iscrowd": 0}
                at = {"id": 10 * i + j + 1, "image_id": i, "category_id": j + 1}
                boxes.append({**at, **box, "segmentation": [outline]})
        kinds = [{"id": k, "name": str(k)} for k in range(1, 91)]
        facts = {"images": pictures, "annotations": boxes, "categories": kinds}
        (folder / f"annotations/instances_{part}.json").write_text(json.dumps(facts))
        points = {"category_id": 1, "keypoints": [30, 25, 2] * 17, "num_keypoints": 17}
        facts |= {"annotations": [box | points for box in boxes], "categories": kinds[:1]}
        (folder / f"annotations/person_keypoints_{part}.json").write_text(json.dumps(facts))


def _images(folder: Path, count: int) -> None:
    """Pictures of 320 x 256 in two classes, sixteen of them under many names."""
    from PIL import Image

    drawn = np.random.default_rng(0)
    for i in range(count):
        path = folder / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i >= DIFFERENT:
            path.hardlink_to(folder / f"class{i % 2}" / f"{i % DIFFERENT}.jpg")
        else:
            pixels = drawn.integers(0, 255, (256, 320, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)


def _digits(folder: Path, count: int) -> None:
    """MNIST's four files."""
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    for part in ("train", "t10k"):
        for name, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = struct.pack(f">{1 + len(shape)}i", 2048 + len(shape), *shape)
            body = drawn.integers(0, 10, shape, dtype=np.uint8).tobytes()
            (folder / f"{part}-{name}-ubyte").write_bytes(head + body)


def _rows(path: Path, what: dict[str, Any]) -> None:
    """A JSON row, so often; ``{text}`` in it stands for words."""
    row = json.dumps({name: value for name, value in what.items() if name != "count"})
    lines = (row.replace("{text}", prose(300, i)) for i in range(what["count"]))
    path.write_text("\n".join(lines) + "\n")


def _hours(path: Path, count: int) -> None:
    """Seven measured values an hour, the last one named OT, as a CSV."""
    import pandas as pd

    values = np.random.default_rng(0).normal(size=(count, 7))
    table = pd.DataFrame(values, columns=[*"ABCDEF", "OT"])
    table.insert(0, "date", pd.date_range("2016-07-01", periods=count, freq="h"))
    table.to_csv(path, index=False)


def _table(path: Path, what: dict[str, int]) -> None:
    """A CSV of ``count`` rows, each column with so many Chinese characters."""
    import pandas as pd

    drawn = np.random.default_rng(0)
    rows, columns = what["count"], {name: n for name, n in what.items() if name != "count"}
    texts = {
        name: ["".join(drawn.choice(list("一是在不了有和人这中"), n)) for _ in range(rows)]
        for name, n in columns.items()
    }
    pd.DataFrame(texts).to_csv(path, index=False)


def _weights(path: Path, name: str) -> None:
    """Weights of a network of torchvision as they are drawn, where its weights would be kept."""
    import torch
    from torchvision import models

    torch.save(models.get_model(name).state_dict(), path)


def _cifar(path: Path, count: int) -> None:
    """Pictures and classes of CIFAR-10 as tensors."""
    import torch

    pictures = torch.randint(0, 255, (count, 32, 32, 3), dtype=torch.uint8)
    classes = [str(i) for i in range(10)]
    facts = {"images": pictures, "labels": torch.randint(0, 10, (count,)), "classes": classes}
    torch.save(facts, path)


def _content(path: Path, text: Any) -> None:
    """That text; a mapping as JSON or YAML, by the file's name."""
    if not isinstance(text, str):
        text = json.dumps(text) if path.suffix == ".json" else yaml.safe_dump(text)
    path.write_text(text)


def _tokenizer(folder: Path, size: int) -> None:
    """A tokenizer of ``size`` tokens, few of which are in use, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>", "<pad>", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet
    )
    made.train_from_iterator([prose(2000)], trainer)
    made.post_processor = processors.ByteLevel()
    facts = json.loads(made.to_str())
    known = facts["model"]["vocab"]
    known |= {f"<unused {n}>": n for n in range(len(known), size)}
    made = Tokenizer.from_str(json.dumps(facts))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **names)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def _model(folder: Path, what: dict[str, Any]) -> None:
    """A model of transformers or diffusers by its class and configuration.

    Its weights are random in bf16; ``hollow``: a file without them, that takes no room on a disk.
    """
    import torch

    torch.set_default_dtype(torch.bfloat16)
    name, facts = what["class"], what["config"]
    try:
        with torch.device("meta" if what.get("hollow") else "cpu"):
            if what.get("from") == "diffusers":
                import diffusers

                model = getattr(diffusers, name)(**facts)
            else:
                import transformers

                made = getattr(transformers, name)
                model = made(made.config_class(**facts))
    finally:
        torch.set_default_dtype(torch.float32)
    if what.get("hollow"):
        _hollow(folder, model)
    else:
        model.save_pretrained(folder)
    if what.get("tokenizer"):
        _tokenizer(folder, what["tokenizer"])


def _hollow(folder: Path, model: Any) -> None:
    """A model's configuration, and a safetensors file of bf16 zeros that were not written."""
    folder.mkdir(parents=True, exist_ok=True)
    of_diffusers = not hasattr(model, "config_class") or hasattr(model, "save_config")
    if not of_diffusers:
        model.config.architectures = [type(model).__name__]
    (model.save_config if of_diffusers else model.config.save_pretrained)(folder)
    named, at = dict[str, Any](), 0
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        end = at + 2 * tensor.numel()
        named[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [at, end]}
        at = end
    head = json.dumps({"__metadata__": {"format": "pt"}, **named}).encode()
    head += b" " * (-len(head) % 8)
    path = "diffusion_pytorch_model.safetensors" if of_diffusers else "model.safetensors"
    with (folder / path).open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + at)


def _ranks(path: Path, count: int) -> None:
    """So many tokens and their ranks, as tiktoken's files: bytes, then such as do not occur."""
    words = [bytes([n]) for n in range(256)] + [f"\u00e4{n}".encode() for n in range(count - 256)]
    lines = (f"{b64encode(word).decode()} {n}" for n, word in enumerate(words))
    path.write_text("\n".join(lines) + "\n")


def _array(path: Path, count: int) -> None:
    """As ``_tokens``, in NumPy's format."""
    np.save(path, np.random.default_rng(0).integers(0, 50_000, count, dtype=np.uint16))


KINDS: dict[str, Callable[[Path, Any], None]] = {
    "text": _text,
    "tokens": _tokens,
    "long_tokens": _long_tokens,
    "table": _table,
    "weights": _weights,
    "cifar": _cifar,
    "array": _array,
    "ranks": _ranks,
    "shard": _shard,
    "gzip": _gzip,
    "pairs": _pairs,
    "views": _views,
    "coco": _coco,
    "images": _images,
    "digits": _digits,
    "rows": _rows,
    "hours": _hours,
    "content": _content,
    "tokenizer": _tokenizer,
    "model": _model,
}
