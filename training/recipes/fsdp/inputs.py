"""The FSDP recipe's text, looked at before its loop starts. Imports no torch by itself."""

from dataclasses import replace
from pathlib import Path

from contract.errors import InputError
from training import storage
from training.data import catalog
from training.data.text import TokenStore, open_store, store_for
from training.models.pretrained import check_weights, shared_cache, tokenizer_file
from training.recipes.fsdp.settings import FsdpConfig
from training.recipes.recipe import Report


def look_at(config: FsdpConfig) -> None:
    """Check that a local file or folder is there; what is remote is left to ``prepare``.

    Raises:
        InputError: it is not.
    """
    if "://" in config.data or catalog.find(config.data):
        return
    if not Path(config.data).exists():
        raise InputError(
            f"text {config.data} does not exist: give --data a file, a folder or an address; "
            f"{catalog.by_name(Path(config.data).name)}"
        )


def prepare(config: FsdpConfig, report: Report | None = None) -> FsdpConfig:
    """Make the store of a run's text; return the settings with its key.

    Raises:
        InputError: text or tokenizer cannot be used, or the run has been trained on others.
    """
    check_weights(config.model, runs=config.storage)
    template = config.chat_template
    if template and not storage.is_s3(template):  # workers run in another folder
        config = replace(config, chat_template=str(Path(template).expanduser().absolute()))
    store = _store(config, report)
    if config.text_key and config.text_key != store.info.key:
        raise InputError(
            f"run {config.run!r} was trained on another text, tokenizer or split than "
            f"{config.data}: give the same --data, --tokenizer and --held-out-every, or another "
            "--run"
        )
    return replace(config, text_key=store.info.key)


def store_of(config: FsdpConfig) -> TokenStore:
    """The store of a prepared run, on any of its nodes."""
    store = open_store(config.text_key, shared=shared_cache(config.storage))
    return store or _store(config, None)


def _store(config: FsdpConfig, report: Report | None) -> TokenStore:
    return store_for(
        config.data,
        tokenizer_file(config.tokenizer, config.model, runs=config.storage),
        held_out_every=config.held_out_every,
        field=config.text_field,
        template=config.chat_template,
        shared=shared_cache(config.storage),
        report=report,
    )
