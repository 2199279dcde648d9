"""Makes the small files that strangers' scripts read: texts, tokens, images, rows, models."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

DIFFERENT = 16  # pictures
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


def _content(path: Path, text: Any) -> None:
    """That text; a mapping as JSON or YAML, by the file's name."""
    if not isinstance(text, str):
        text = json.dumps(text) if path.suffix == ".json" else yaml.safe_dump(text)
    path.write_text(text)


def _tokenizer(folder: Path, size: int) -> None:
    """A tokenizer that knows few words, with a chat template."""
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
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **names)
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)


def _model(folder: Path, what: dict[str, Any]) -> None:
    """A model of transformers or diffusers with random weights, by its class and configuration."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    name, facts = what["class"], what["config"]
    try:
        if what.get("from") == "diffusers":
            import diffusers

            getattr(diffusers, name)(**facts).save_pretrained(folder)
        else:
            import transformers

            model = getattr(transformers, name)
            model(model.config_class(**facts)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(torch.float32)
    if what.get("tokenizer"):
        _tokenizer(folder, what["tokenizer"])


KINDS: dict[str, Callable[[Path, Any], None]] = {
    "text": _text,
    "tokens": _tokens,
    "images": _images,
    "digits": _digits,
    "rows": _rows,
    "content": _content,
    "tokenizer": _tokenizer,
    "model": _model,
}
