"""The model that a plan is about: a shape that is given, a checkpoint's headers, a hub id's config.json, or a name of
the table of known shapes. No weight is read or downloaded."""

from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.perf.planning.formats import Head, WeightFormat
from penstock.perf.planning.known import KNOWN, known_names, known_shape
from penstock.perf.planning.shape import ModelShape, parse_shape
from penstock.text.source import DEMO, ModelSource, resolve
from penstock.workers.compute.planned import plan_checkpoint


class Found(NamedTuple):
    shape: ModelShape
    form: WeightFormat | None
    """Format of the checkpoint; None: nobody has said, as for a shape alone."""
    head: Head
    origin: str
    """Where the shape is from, for people."""
    model: str
    """What a pool would name as its model."""


def find_model(model: str | None, shape: str | None, head: Head = "auto") -> Found:
    """Find the model by one of the two. Raises ConfigError."""
    if (model is None) == (shape is None):
        raise ConfigError("either --model or --shape must be given")
    if shape is not None:
        return Found(parse_shape(shape), None, head, "the given shape", "MODEL")
    assert model is not None
    known = known_shape(model)
    if known is not None:
        hub_id = KNOWN[model.lower()].source
        return Found(known, None, head, f"the config.json of {hub_id}, in the table of known shapes", hub_id)
    source = find_source(model)
    planned = plan_checkpoint(source, head=head)
    return Found(planned.shape, planned.form, planned.head, f"the headers of {source.name}", model)


def find_source(model: str) -> ModelSource:
    """The checkpoint, as far as its headers; of a directory config.json suffices. Raises ConfigError."""
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return ModelSource("safetensors", path.resolve(), path.resolve().name)
    if model == DEMO or path.exists() or model.startswith((".", "/", "~")) or path.suffix == ".gguf":
        return resolve(model)
    return _from_hub(model)


def _from_hub(model: str) -> ModelSource:
    import huggingface_hub  # noqa: PLC0415 (only hub ids need it)

    try:
        file = huggingface_hub.hf_hub_download(model, "config.json")
    except (huggingface_hub.errors.HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"can't get the config.json of model {model!r} from the Hugging Face hub: {reason[0]}. Give a directory "
            f"with a config.json, a .gguf file, --shape, or a known model: {', '.join(known_names())}"
        ) from error
    return ModelSource("safetensors", Path(file).parent, model)
