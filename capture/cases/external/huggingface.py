"""Cases from Hugging Face configuration files: random weights, offline.

No code from the configuration's folder is run. Configurations of timm models are built by timm.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.base.remarks import remark
from itercast.capture.base.slow_imports import torch
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.external.adapters import Adapters
from itercast.capture.cases.external.hf_inputs import make_inputs

COUNTS = (  # settings that are 1 or more in every model that has them
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "num_layers", "num_heads"),
)
# Settings of a configuration file that are ignored: code to run, dtypes, caches, attention.
DROPPED = (
    *("auto_map", "dtype", "torch_dtype", "quantization_config", "_name_or_path", "use_cache"),
    *("attn_implementation", "_attn_implementation"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """The content of a configuration file; reading it needs neither transformers nor timm.

    ``of_timm``: ``architecture`` names a model of timm, not a class of transformers.
    """

    path: Path
    values: dict[str, Any]
    architecture: str
    of_timm: bool
    digest: str

    @property
    def name(self) -> str:
        """The name of the file, or of its folder if the file is called config.json."""
        return self.path.parent.resolve().name if self.path.stem == "config" else self.path.stem


def read_config(path: Path) -> HfConfig:
    """Read the configuration at ``path``; ValueError in one line if there is none."""
    path = path / "config.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
        values = json.loads(data)
    except FileNotFoundError:
        raise ValueError(f"hf-config {str(path)!r}: no such file") from None
    except (OSError, ValueError) as exc:
        raise ValueError(f"hf-config {str(path)!r}: not a readable JSON file ({exc})") from exc
    values = values if isinstance(values, dict) else {}
    of_timm = "architectures" not in values and "architecture" in values
    names = [values["architecture"]] if of_timm else values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"hf-config {str(path)!r}: no class name in 'architectures'")
    return HfConfig(
        path=path,
        values=_kept(values),
        architecture=names[0],
        of_timm=of_timm,
        digest=hashlib.sha256(data).hexdigest(),
    )


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration but those that are ignored."""
    return {key: value for key, value in values.items() if key not in DROPPED}


def hf_case(path: Path, *, mode: str, loss: str, attn: str, lora: str = "") -> EvalCase:
    """The case of the class ``architectures[0]``; the caller chooses batch and seq.

    Batches are full (``hf_inputs``): no padding or key-value cache, and no attention mask but that
    of encoders with eager attention. The loss is the one that the model returns. ``lora``: the
    adapters that alone are trained, as ``Adapters`` reads them; "": none.
    """
    read, adapters = read_config(path), Adapters.parse(lora)
    if adapters and read.of_timm:
        raise ValueError(f"lora {lora} for {read.name}: adapts models of transformers only")
    if read.of_timm:
        case: EvalCase = function_of("configurations", "timm")(read.name, read.values, read.digest)
        return case
    return case_of(read, attn, labels=mode == "train" and loss == "default", adapters=adapters)


def case_of(
    read: HfConfig, attn: str, *, labels: bool = True, adapters: Adapters | None = None
) -> EvalCase:
    """The case of a configuration of transformers, as ``hf_case`` reads it from a file.

    ``labels``: inputs have those that the model's own loss needs.
    """
    return EvalCase(
        name=read.name,
        build=lambda: build(read, attn, adapters),
        inputs=lambda batch, seq: make_inputs(
            _model_class(read), _config(read), batch, seq, labels, masked=attn == "eager"
        ),
        loss=own_loss,
        batch=0,
        measured=False,
        digest=f"{read.digest} lora {adapters}" if adapters else read.digest,
    )


def own_loss(output: Any, inputs: dict[str, Any]) -> Any:
    """The loss that a transformers model returns with its logits."""
    value = getattr(output, "loss", None)
    if value is None:
        raise ValueError("the model has no loss of its own: --loss none starts from its output")
    return value


def _model_class(read: HfConfig) -> Any:
    """The class that the configuration names; ValueError if transformers does not have it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers  # lazy: an optional extra
    except ModuleNotFoundError as exc:
        raise ValueError("hf-config needs transformers: pip install 'itercast[hf]'") from exc
    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, read.architecture, None)
    if getattr(model_class, "config_class", None) is None or not hasattr(model_class, "forward"):
        known = f"transformers {transformers.__version__}"
        raise ValueError(f"hf-config {str(read.path)!r}: {known} has no model {read.architecture}")
    return model_class


def _config(read: HfConfig) -> Any:
    """The configuration as an object of transformers; ValueError for values it refuses."""
    kind = _model_class(read).config_class
    values, text = read.values, read.values.get("text_config")
    _check_counts(read.path, values, getattr(kind, "attribute_map", {}))
    if isinstance(text, dict) and "text_config" not in getattr(kind, "sub_configs", {}):
        values = _kept(text)  # the language model of one for text and images
    try:
        return kind.from_dict(dict(values))
    except Exception as exc:  # transformers checks values in many ways
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ValueError(f"hf-config {str(read.path)!r}: {reason}") from exc


def _check_counts(path: Path, values: dict[str, Any], other_names: Mapping[str, str]) -> None:
    """ValueError for a layer, head or width that is stated as less than one, in parts as well."""
    names = {*COUNTS, *(other_names.get(name, name) for name in COUNTS)}
    for name, value in values.items():
        if isinstance(value, dict):
            _check_counts(path, value, other_names)
        elif name in names and isinstance(value, int | float) and value < 1:
            raise ValueError(f"hf-config {str(path)!r}: {name} is 1 or more, got {value}")
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        rule = f"num_key_value_heads divides the {heads} num_attention_heads"
        raise ValueError(f"hf-config {str(path)!r}: {rule}, got {groups}")


def build(read: HfConfig, attn: str, adapters: Adapters | None = None) -> Any:
    """Build the model with random weights in torch's default dtype; all frozen under ``adapters``.

    With ``attn`` sdpa transformers chooses: parts without SDPA, such as backbones of detectors, run
    eager attention. A remark is made if the whole model does.
    """
    kind, config = _model_class(read), _config(read)
    config.use_cache = False
    if attn == "eager":
        config._attn_implementation = attn
    elif hasattr(config, "num_attention_heads") and not getattr(kind, "_supports_sdpa", False):
        remark(f"{read.architecture} has no sdpa attention in transformers: it is eager")
    model = _built(kind, config)
    if read.values.get("tie_word_embeddings") is False:
        _untie(model)
    if not adapters:
        return model
    from itercast.capture.cases.external.lora import adapt  # lazy: names need no torch

    return adapt(model, adapters)


def _untie(model: Any) -> None:
    """Give a head that shares the embeddings' weights weights of its own.

    transformers 5 ties those of T5 whatever its configuration says; T5 1.1, mT5 and FLAN-T5 do not.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is not None and weight is getattr(table, "weight", None):
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight))


def _built(kind: Any, config: Any) -> Any:
    """Construct the model; on the meta device if its constructor reads values of tensors."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.utils._python_dispatch import _disable_current_modes

    from itercast.capture.recorder.fake import fake_module  # lazy, as torch

    try:
        return kind(config)
    except DataDependentOutputException:
        with _disable_current_modes(), torch.device("meta"):
            model = kind(config)
        return fake_module(model)
