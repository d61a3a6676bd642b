"""Write a sharded run's model as a Hugging Face folder: ``python -m training.export RUN --to DIR``.

Weights are read tensor by tensor and written file by file, so the model never has to fit on a GPU,
nor twice in memory: one output file is held at a time. What comes out is read by
``AutoModelForCausalLM.from_pretrained`` and by everything else that knows the layout; tokenizer,
chat template and the tokens that end an answer are beside it (``training.models.serving``).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from contract import exits, faults, nodes
from contract.errors import InputError
from contract.runs import CONFIG_FILE, DEFAULT_EXPORT_DTYPE, EXPORT_DTYPES
from contract.text import did_you_mean, listed
from store import storage
from training import recipes
from training.bookkeeping import best_step
from training.checkpoint import sharded_checkpoints
from training.data.vocabulary import GENERATION_FILE
from training.models import language_models, lora, model_weights, nf4, pretrained, serving
from training.models.weight_files import SAFETENSORS, SAFETENSORS_INDEX
from training.recipe import Recipe
from training.record import reader
from training.settings import TrainingConfig

#: Most bytes of one output file; the memory that an export takes follows from it.
FILE_BYTES: Final = 2 * 10**9
_TYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, dtype) for name, dtype in EXPORT_DTYPES.items()
}


def export(
    found: sharded_checkpoints.ShardedCheckpoint,
    to: str,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    say: Callable[[str], None] | None = None,
) -> str:
    """Write a checkpoint's model to a folder or an ``s3://`` address; return it.

    Args:
        dtype: of the weights; None: that of the model before training, by its ``config.json``,
            else fp32.

    The folder appears whole or not at all; in S3 the index, or the only file, comes last.

    Raises:
        InputError: ``to`` is there already, or the checkpoint holds adapters whose base model
            is not available.
    """
    from safetensors.torch import save_file

    _check_free(to)
    settings = found.config
    config = _model_config(found, dtype)
    dtype = getattr(torch, config["dtype"])
    adapters = _Merged(found) if settings.get("lora_rank") else None
    kind = language_models.build_on_meta(pretrained.config_of(config))
    # Servers choose the class by it.
    config["architectures"] = config.get("architectures") or [type(kind).__name__]
    known = adapters.weights() if adapters else found.weights()
    parts = _parts(known, model_weights.groups(kind, known), dtype, file_bytes)
    last = SAFETENSORS_INDEX if len(parts) > 1 else SAFETENSORS
    with storage.staged_folder(to, last=last) as folder:
        index: dict[str, str] = {}
        total = 0
        for number, (names, size) in enumerate(parts, start=1):
            name = SAFETENSORS
            if len(parts) > 1:
                name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
            if say:
                say(f"writing {name}, {size / 1e9:.2f} GB")
            tensors = adapters.read(names) if adapters else found.read_weights(names)
            on_disk = {
                each: tensor.to(dtype)
                for each, tensor in model_weights.for_files(kind, tensors).items()
            }
            save_file(on_disk, folder / name, metadata={"format": "pt"})
            index |= dict.fromkeys(on_disk, name)
            total += size
        (folder / pretrained.CONFIG_FILE).write_text(json.dumps(config, indent=1), "utf-8")
        for name, own in _served(found).items():
            (folder / name).write_bytes(own)
        if len(parts) > 1:
            content = {"metadata": {"total_size": total}, "weight_map": index}
            (folder / last).write_text(json.dumps(content, indent=1), "utf-8")
    return to


def export_adapters(
    found: sharded_checkpoints.ShardedCheckpoint, to: str, *, dtype: torch.dtype = torch.float32
) -> str:
    """Write a checkpoint's adapters as a folder that peft puts beside their base model; return it.

    Raises:
        InputError: ``to`` is there already, or there are no adapters, or no base model to load, or
            peft would not put them where they were trained.
    """
    settings: Mapping[str, Any] = found.config
    base, revision = pretrained.revision_of(settings["model"])
    if not settings.get("lora_rank"):
        raise InputError(
            f"run {settings['run']!r} has no adapters, it trained all weights: leave --adapters out"
        )
    if pretrained.is_new(base):
        raise InputError(
            f"the adapters' base, {base}, has random weights that are in no folder: leave "
            "--adapters out to export it with the adapters merged into it"
        )
    _check_free(to)
    weights = found.read_weights(found.weights())
    contents = lora.files(
        {name: each.to(dtype) for name, each in weights.items()},
        rank=settings["lora_rank"],
        alpha=settings.get("lora_alpha", 0),
        dropout=settings.get("lora_dropout", 0.0),
        base=base,
        revision=revision,
        kind=found.model_config.get("model_type", ""),
    )
    contents |= _served(found)
    with storage.staged_folder(to, last=lora.CONFIG_FILE) as folder:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    return to


def _check_free(to: str) -> None:
    if storage.exists(to) and storage.filesystem(to).ls(to):
        raise InputError(f"{to} is there already: give --to another place")


def _served(found: sharded_checkpoints.ShardedCheckpoint) -> dict[str, bytes]:
    """Files that serve a model besides its weights: file name -> content."""
    return {name: content for name in serving.FILES if (content := found.read(name)) is not None}


def _parts(
    weights: Mapping[str, tuple[torch.Size, torch.dtype]],
    groups: Sequence[Sequence[str]],
    dtype: torch.dtype,
    limit: int,
) -> list[tuple[list[str], int]]:
    """Names of the weights of each output file, groups kept together, and its bytes."""
    parts: list[tuple[list[str], int]] = []
    names: list[str] = []
    size = 0
    for group in groups:
        own = sum(weights[name][0].numel() for name in group) * dtype.itemsize
        if names and size + own > limit:
            parts.append((names, size))
            names, size = [], 0
        names += group
        size += own
    return [*parts, (names, size)]


def _model_config(
    found: sharded_checkpoints.ShardedCheckpoint, dtype: torch.dtype | None
) -> dict[str, Any]:
    if "model_type" not in found.model_config:
        raise InputError(
            f"{found.uri} has no {pretrained.CONFIG_FILE} that names a type of model, which "
            "transformers needs: it cannot be exported"
        )
    # Older checkpoints have only the keys of transformers 5.
    whole = pretrained.config_of(found.model_config).to_json_string(use_diff=False)
    config = {**json.loads(whole), **found.model_config}
    # transformers 5 reads "dtype"; transformers 4 and other programs read "torch_dtype".
    stored = config.get("dtype") or config.get("torch_dtype")
    own = stored if stored in EXPORT_DTYPES.values() else "float32"
    config["dtype"] = config["torch_dtype"] = str(dtype or own).removeprefix("torch.")
    if stops := serving.stops_of(found.read(GENERATION_FILE)):
        config["eos_token_id"] = stops[0]
    config["use_cache"] = True  # training switches it off, and generating needs it
    return config


class _Merged:
    """Base weights with a run's adapters merged into them."""

    def __init__(self, found: sharded_checkpoints.ShardedCheckpoint) -> None:
        model: nn.Module = recipe_of(found).rebuilt(
            found.config, found.model_config, torch.device("cpu")
        )
        nf4.restore(model)  # adapters were trained beside these values
        found.load_weights(model)
        self._merged: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if hasattr(module, "merge") and hasattr(module, "base_layer"):
                module.merge()
                for own, parameter in module.base_layer.named_parameters():
                    self._merged[f"{name}.{own}"] = parameter.detach()
        for name, each in model.state_dict().items():  # tied weights by all of their names
            if ".base_layer." not in name and "lora_" not in name:
                self._merged[name] = each

    def weights(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (each.shape, each.dtype) for name, each in self._merged.items()}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._merged[name].contiguous() for name in names}


def recipe_of(found: sharded_checkpoints.ShardedCheckpoint) -> Recipe:
    """The recipe that a checkpoint was trained with.

    Raises:
        InputError: it is not known here.
    """
    return recipes.by_name(str(found.config.get("recipe")))


def newest_checkpoint(
    run: str, place: str, *, best: bool = False
) -> sharded_checkpoints.ShardedCheckpoint:
    """The newest whole checkpoint of a run, from its name and ``--storage``, or its address.

    Args:
        best: the one that ``--keep-best`` has kept instead.

    Raises:
        InputError: there is no such run, or it has no sharded checkpoint.
    """
    uri = run_address(run, place)
    settings = reader.read_json(uri, CONFIG_FILE)
    if settings is not None:
        recipes.by_name(str(settings.get("recipe"))).check_sharded(run, run_uri=uri)
    step = 0
    if best:
        config = recipes.config_from_json(settings or {"recipe": ""})
        assert isinstance(config, TrainingConfig)  # it has sharded checkpoints
        step = best_step(uri, config)
    return sharded_checkpoints.newest_of(uri, step=step)


def run_address(run: str, place: str) -> str:
    """Address of a run's folder, from its name and ``--storage``, or from its address itself.

    Raises:
        InputError: there is no such run.
    """
    is_address = storage.is_s3(run) or "/" in run
    uri = run.rstrip("/") if is_address else storage.join(storage.runs_root(place), run)
    if not storage.exists(uri):
        names = [] if is_address else storage.list_folders(storage.runs_root(place))
        there = f"{storage.runs_root(place)} has {listed(names, most=8) or 'none'}"
        hint = "" if is_address else f"; {did_you_mean(run, names, otherwise=there)}"
        raise InputError(f"there is no run at {uri}{hint}")
    return uri


def run_parser(prog: str, about: str | None) -> argparse.ArgumentParser:
    """Parser of a command line that names a run and where it is kept."""
    parser = argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="name of a run with sharded checkpoints "
        f"({recipes.SHARDED}), or its folder or address",
    )
    parser.add_argument(
        "--storage",
        default=os.environ.get(nodes.ENV_STORAGE) or "runs",
        metavar="PLACE",
        help="where runs are kept (default: the cluster's bucket on a node, else runs)",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint that --keep-best has kept (default: the newest)",
    )
    return parser


@faults.command(interrupted="interrupted; nothing was left behind")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = run_parser("python -m training.export", __doc__)
    parser.add_argument("--to", required=True, metavar="PLACE", help="new folder or s3:// address")
    parser.add_argument(
        "--dtype",
        choices=[DEFAULT_EXPORT_DTYPE, *EXPORT_DTYPES],
        default=DEFAULT_EXPORT_DTYPE,
        help="(default: that of the model's own config.json; adapters: fp32)",
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write only the adapters of a run with --lora-rank, for peft (default: merged)",
    )
    options = parser.parse_args(arguments)
    found = newest_checkpoint(options.run, options.storage, best=options.best)
    print(f"step {found.position.step:,} of {options.run}", file=sys.stderr)
    to = options.to if storage.is_s3(options.to) else str(Path(options.to).expanduser())
    if options.adapters:
        place = export_adapters(found, to, dtype=_TYPES.get(options.dtype, torch.float32))
    else:
        place = export(found, to, dtype=_TYPES.get(options.dtype), say=_say)
    print(place)
    return exits.OK


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
