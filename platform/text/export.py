"""A checkpoint's tokenizer and chat template as files of the Hugging Face form, whatever form they came in."""

import json
from pathlib import Path

from tokenizers import processors

from penstock.text.source import ModelSource
from penstock.text.vocabulary import load_vocabulary


def save_tokenizer(source: ModelSource, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that can't be read,
    OSError."""
    vocabulary = load_vocabulary(source)
    raw = vocabulary.raw
    if (vocabulary.prefix_ids or vocabulary.suffix_ids) and raw.post_processor is None:
        names = {index: raw.id_to_token(index) for index in (*vocabulary.prefix_ids, *vocabulary.suffix_ids)}
        single = [
            *(names[index] for index in vocabulary.prefix_ids),
            "$A",
            *(names[index] for index in vocabulary.suffix_ids),
        ]
        raw.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(name, index) for index, name in names.items()]
        )
    (folder / "tokenizer.json").write_text(raw.to_str(pretty=True), encoding="utf-8")
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.max_model_len,
        **vocabulary.special_tokens,
    }
    if source.chat_template is not None:
        settings["chat_template"] = source.chat_template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
