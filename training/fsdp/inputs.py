"""Check and tokenization of the FSDP recipe's text before its loop starts. Imports no torch by
itself."""

from dataclasses import replace
from pathlib import Path

from contract.errors import InputError
from store import storage
from training.data import PYTHON_HELP, catalog, sources
from training.data.conversations import parse_columns
from training.data.download import Report
from training.data.rows import TokenStore, open_store, store_for
from training.fsdp.settings import FsdpConfig
from training.models.pretrained import check_weights, shared_cache, tokenizer_file


def look_at(config: FsdpConfig) -> None:
    """Check that local files and folders and the model are there; remote text is left to
    ``prepare``.

    Raises:
        InputError: one is not.
        UnreachableError: a published text is to be fetched, and there is no way to it.
    """
    parse_columns(config.columns)
    for place in filter(None, (config.data, config.validation)):
        sources.check_way(place)
        if "://" in place or catalog.find(place) or place == PYTHON_HELP:
            continue
        if not Path(place).exists():
            raise InputError(
                f"text {place} does not exist: give a file, a folder or an address; "
                f"{catalog.by_name(Path(place).name)}"
            )
    check_weights(config.model, runs=config.storage)


def prepare(config: FsdpConfig, report: Report | None = None) -> FsdpConfig:
    """Make the store of a run's text; return the settings with its key.

    Raises:
        InputError: text or tokenizer cannot be used, or the run has been trained on others.
    """
    template = config.chat_template
    if template and not storage.is_s3(template):  # workers run in another folder
        config = replace(config, chat_template=str(Path(template).expanduser().absolute()))
    key = _store(config, report).info.key
    if config.text_key and config.text_key != key:
        raise InputError(
            f"run {config.run!r} was trained on another text, tokenizer or split than "
            f"{config.data}: give the same --data, --tokenizer and --held-out-every, or another "
            "--run"
        )
    return replace(config, text_key=key)


def store_of(config: FsdpConfig) -> TokenStore:
    """The store of a prepared run, on any of its nodes."""
    found = open_store(config.text_key, shared=shared_cache(config.storage))
    return found or _store(config, None)


def _store(config: FsdpConfig, report: Report | None) -> TokenStore:
    tokenizer = tokenizer_file(config.tokenizer, config.model, runs=config.storage)
    return store_for(
        config.data,
        tokenizer,
        held_out_every=config.held_out_every,
        field=config.text_field,
        columns=config.columns,
        skips_bad=config.skip_bad_rows,
        validation=config.validation,
        template=config.chat_template,
        shared=shared_cache(config.storage),
        report=report,
    )
