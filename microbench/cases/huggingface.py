"""A case from a Hugging Face configuration file: random weights, offline, no code of the folder."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbench.cases.evalcase import EvalCase

# What a configuration file must not decide: which code runs, what is stored, what is returned.
DROPPED = ("auto_map", "dtype", "torch_dtype", "quantization_config", "_name_or_path", "use_cache")
PER_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForNextSentencePrediction")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """A configuration file as read; ``build`` needs transformers, the rest does not."""

    path: Path
    values: dict[str, Any]
    architecture: str
    digest: str

    @property
    def name(self) -> str:
        """The file's name, or its folder's where it is called config.json."""
        return self.path.parent.resolve().name if self.path.stem == "config" else self.path.stem


def read_config(path: Path) -> HfConfig:
    """The configuration at ``path``; ValueError in one line for anything else."""
    path = path / "config.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
        values = json.loads(data)
    except (OSError, ValueError) as exc:
        raise ValueError(f"hf-config {str(path)!r}: not a readable JSON file ({exc})") from exc
    names = values.get("architectures") if isinstance(values, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"hf-config {str(path)!r}: no class name in 'architectures'")
    kept = {k: v for k, v in values.items() if k not in DROPPED}
    digest = hashlib.sha256(data).hexdigest()
    return HfConfig(path=path, values=kept, architecture=names[0], digest=digest)


def hf_case(path: Path, *, mode: str, loss: str, attn: str) -> EvalCase:
    """The case of ``architectures[0]``; its batch and seq are the caller's to choose.

    Batches are full: no padding, no attention mask, no key-value cache. Images have the
    configuration's size and ignore ``seq``; a decoder beside an encoder gets ``seq`` tokens too.
    The loss is the model's own: labels are the inputs, or one class per sample.
    """
    read = read_config(path)
    labels = mode == "train" and loss == "default"
    return EvalCase(
        name=read.name,
        build=lambda: build(read, attn),
        inputs=lambda batch, seq: make_inputs(
            _model_class(read), _config(read), batch, seq, labels
        ),
        loss=own_loss,
        batch=0,
        measured=False,
        digest=read.digest,
    )


def own_loss(output: Any, given: dict[str, Any]) -> Any:
    """The loss that a transformers model returns beside its logits."""
    found = getattr(output, "loss", None)
    if found is None:
        raise ValueError("the model has no loss of its own: --loss none starts from its output")
    return found


def _model_class(read: HfConfig) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers  # lazy: an optional extra
    except ModuleNotFoundError as exc:
        raise ValueError("hf-config needs transformers: pip install 'itercast[hf]'") from exc
    transformers.logging.set_verbosity_error()
    found = getattr(transformers, read.architecture, None)
    if getattr(found, "config_class", None) is None or not hasattr(found, "forward"):
        known = f"transformers {transformers.__version__}"
        raise ValueError(f"hf-config {str(read.path)!r}: {known} has no model {read.architecture}")
    return found


def _config(read: HfConfig) -> Any:
    kind = _model_class(read).config_class
    try:
        return kind.from_dict(dict(read.values))
    except Exception as exc:  # transformers checks values in many ways
        first = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise ValueError(f"hf-config {str(read.path)!r}: {first}") from exc


def build(read: HfConfig, attn: str) -> Any:
    """The model with random weights in torch's default dtype.

    ``attn`` sdpa falls back to eager, with a warning, where transformers has no other form.
    """
    kind, config = _model_class(read), _config(read)
    config.use_cache = False
    if attn == "sdpa" and not getattr(kind, "_supports_sdpa", False):
        log.warning("%s has no sdpa attention in transformers: captured eager", read.architecture)
        attn = "eager"
    config._attn_implementation = attn
    return _built(kind, config)


def _built(kind: Any, config: Any) -> Any:
    """The model; one that reads numbers off tensors while it is made, on no device, then faked."""
    import torch  # lazy: names need no torch
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.utils._python_dispatch import _disable_current_modes

    from microbench.capture_fake import without_data  # lazy, as torch

    try:
        return kind(config)
    except DataDependentOutputException:
        with _disable_current_modes(), torch.device("meta"):
            model = kind(config)
        return without_data(model)


def make_inputs(model: Any, config: Any, batch: int, seq: int, labels: bool) -> dict[str, Any]:
    """Random tokens or pictures as the forward of a transformers model (or class) names them.

    With ``labels`` also what its own loss needs: the inputs, or class 0 for every sample.
    """
    import torch  # lazy: names need no torch

    name, kind = model.main_input_name, _class_name(model)
    accepted = inspect.signature(model.forward).parameters
    makers: dict[str, Callable[[], Any]] = {
        "input_ids": lambda: _tokens(config, kind, batch, seq),
        "pixel_values": lambda: _pictures(config, batch),
    }
    if name not in makers:
        raise ValueError(f"{kind} takes {name!r}; supported: {sorted(makers)}")
    given = {name: makers[name]()}
    per_sample = kind.endswith(PER_SAMPLE)
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _tokens(config, kind, batch, seq)
    if not labels:
        return given
    classes = torch.zeros(batch, dtype=torch.int64)
    if "start_positions" in accepted:
        return {**given, "start_positions": classes, "end_positions": classes}
    if "labels" in accepted:
        given["labels"] = classes if per_sample else given[name]
    if "next_sentence_label" in accepted:
        given["next_sentence_label"] = classes
    return given


def _class_name(model: Any) -> str:
    return str((model if isinstance(model, type) else type(model)).__name__)


def _tokens(config: Any, kind: str, batch: int, seq: int) -> Any:
    import torch  # lazy, as above

    if seq < 1:
        raise ValueError(f"{kind} reads tokens: a sequence length is required")
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit and seq > limit and not getattr(text, "rope_parameters", None):
        raise ValueError(f"seq {seq}: this {kind} has {limit} positions")
    return torch.randint(0, text.vocab_size, (batch, seq))


def _pictures(config: Any, batch: int) -> Any:
    import torch  # lazy, as above

    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.randn(batch, getattr(vision, "num_channels", 3), height, width)
