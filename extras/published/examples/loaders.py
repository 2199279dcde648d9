"""Loaders of images as their authors train with them, for ``itercast input``: need torchvision.

Each function returns a DataLoader with the crops, colours, workers and batch of a source, whose
transforms are in its own repository. No data set is read: two photographs of scikit-learn stand
for ImageNet's, resized and coded to the bytes of a mean one of its.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from random import random
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, ImageFilter, ImageOps
from torch.utils.data import DataLoader, Dataset

MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE, NBYTES = (500, 375), 110_000  # ImageNet's training images: 138 GB of 1,281,167
SMALL, SMALL_NBYTES = (256, 192), 24_000  # a web data set stored at 256 pixels
PHOTOS = 1024  # of an epoch


@cache
def _folder() -> TemporaryDirectory[str]:
    """A folder that goes with this process."""
    return TemporaryDirectory()


@cache
def photo_files(size: tuple[int, int], nbytes: int) -> tuple[Path, ...]:
    """JPEGs of this size, coded to ``nbytes`` bytes on average."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo).resize(size) for photo in load_sample_images().images]
    qualities = range(70, 100)
    coded = {q: [_jpeg(photo, q) for photo in photos] for q in qualities}
    best = min(qualities, key=lambda q: abs(sum(map(len, coded[q])) - nbytes * len(photos)))
    files = tuple(Path(_folder().name) / f"{nbytes}-{n}.jpg" for n in range(len(photos)))
    for file, content in zip(files, coded[best], strict=True):
        file.write_bytes(content)
    return files


def _jpeg(photo: Image.Image, quality: int) -> bytes:
    out = BytesIO()
    photo.save(out, "JPEG", quality=quality)
    return out.getvalue()


class Photos(Dataset[Any]):
    """The same few photographs over and over, opened, decoded and transformed each time."""

    def __init__(
        self, transform: Callable[[Any], Any], size: tuple[int, int] = SIZE, nbytes: int = NBYTES
    ) -> None:
        self.files, self.transform = photo_files(size, nbytes), transform

    def __len__(self) -> int:
        return PHOTOS

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with Image.open(self.files[index % len(self.files)]) as photo:
            return self.transform(photo.convert("RGB")), index


class Several:
    """Each of several transforms of one photograph."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms

    def __call__(self, photo: Any) -> list[Any]:
        return [transform(photo) for transform in self.transforms]


class Sometimes:
    """A change of a photograph, made with a probability."""

    def __init__(self, change: Callable[[Any], Any], p: float) -> None:
        self.change, self.p = change, p

    def __call__(self, photo: Any) -> Any:
        return self.change(photo) if random() < self.p else photo


def blurred(photo: Any) -> Any:
    """A photograph behind a Gaussian blur of 0.1 to 2 pixels."""
    return photo.filter(ImageFilter.GaussianBlur(0.1 + 1.9 * random()))


def _to_tensor() -> list[Any]:
    from torchvision import transforms as T

    return [T.ToTensor(), T.Normalize(MEAN, DEVIATION)]


def _view(size: int, scale: tuple[float, float], *changes: Any, bicubic: bool = True) -> Any:
    """A random crop, flipped half the time, changed, as a tensor."""
    from torchvision import transforms as T

    way = T.InterpolationMode.BICUBIC if bicubic else T.InterpolationMode.BILINEAR
    crop = T.RandomResizedCrop(size, scale=scale, interpolation=way)
    return T.Compose([crop, T.RandomHorizontalFlip(), *changes, *_to_tensor()])


def _colours(*strengths: float) -> list[Any]:
    """Colours jittered four times of five, grey once of five."""
    from torchvision import transforms as T

    return [T.RandomApply([T.ColorJitter(*strengths)], 0.8), T.RandomGrayscale(0.2)]


def barlow_twins() -> DataLoader[Any]:
    """https://github.com/facebookresearch/barlowtwins at 8e8d284, main.py: 8 workers of a GPU."""
    colours, whole = _colours(0.4, 0.4, 0.2, 0.1), (0.08, 1.0)
    first = _view(224, whole, *colours, Sometimes(blurred, 1.0))
    solarized = Sometimes(ImageOps.solarize, 0.2)
    second = _view(224, whole, *colours, Sometimes(blurred, 0.1), solarized)
    return DataLoader(Photos(Several(first, second)), batch_size=16, num_workers=8)


def swav() -> DataLoader[Any]:
    """https://github.com/facebookresearch/swav at 06b1b7c: 10 workers of a GPU, eight crops."""
    changes = [*_colours(0.8, 0.8, 0.8, 0.2), Sometimes(blurred, 0.5)]
    large = _view(224, (0.14, 1.0), *changes, bicubic=False)
    small = _view(96, (0.05, 0.14), *changes, bicubic=False)
    views = Several(*[large] * 2, *[small] * 6)
    return DataLoader(Photos(views), batch_size=16, num_workers=10)


def mae() -> DataLoader[Any]:
    """https://github.com/facebookresearch/mae at efb2a80, main_pretrain.py: 10 workers of a GPU."""
    return DataLoader(Photos(_view(224, (0.2, 1.0))), batch_size=64, num_workers=10)


def deit_3() -> DataLoader[Any]:
    """https://github.com/facebookresearch/deit at 4bd679b, augment.py with --src: 10 workers."""
    from torchvision import transforms as T

    crop = [T.Resize(224, interpolation=T.InterpolationMode.BICUBIC)]
    crop += [T.RandomCrop(224, padding=4, padding_mode="reflect"), T.RandomHorizontalFlip()]
    one = T.RandomChoice([T.Grayscale(3), Sometimes(ImageOps.solarize, 1.0), blurred])
    changes = [one, T.ColorJitter(0.3, 0.3, 0.3)]
    transform = T.Compose([*crop, *changes, *_to_tensor()])
    return DataLoader(Photos(transform), batch_size=64, num_workers=10)


def open_clip() -> DataLoader[Any]:
    """https://github.com/mlfoundations/open_clip at 89fb801, README.md: 8 workers; no captions."""
    from torchvision import transforms as T

    way = T.InterpolationMode.BICUBIC
    crop = T.RandomResizedCrop(224, scale=(0.9, 1.0), interpolation=way)
    data = Photos(T.Compose([crop, *_to_tensor()]), SMALL, SMALL_NBYTES)
    return DataLoader(data, batch_size=64, num_workers=8)
