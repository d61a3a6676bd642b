"""Exporting a run and continuing a prompt need its checkpoint and its base model, not its text."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from contract.errors import InputError
from store import storage
from tests.conftest import ROOT
from tests.training.test_adapters import written
from tests.training.test_plan import config as fsdp
from training import export, generate
from training.checkpoint.sharded_checkpoints import ShardedCheckpoint, state_of
from training.fsdp import inputs
from training.fsdp.model import build, describe, fill, rebuild
from training.models import language_models, model_weights, pretrained
from training.models.weight_files import SAFETENSORS


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("place", ["runs", "s3://bucket/runs"])
def test_adapters_are_merged_and_a_prompt_is_continued_without_text_and_tokens(
    place: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    shutil.copy(ROOT / "LICENSE", text)
    found = checkpoint(tmp_path / "step-00000001", str(text), place)
    before = exported(found, tmp_path / "before")

    text.unlink()
    shutil.rmtree(cache)
    filesystem = storage.filesystem

    def on_disk(uri: str, **options: Any) -> Any:
        assert not storage.is_s3(uri), f"{uri} is read"
        return filesystem(uri, **options)

    monkeypatch.setattr(storage, "filesystem", on_disk)
    assert exported(found, tmp_path / "after") == before
    first, trained = generate.continuations(found, "The License", num=8, seed=0)
    assert first != trained
    # Some tokenizers end every text: the model would begin a new one.
    file = Path(found.uri) / "tokenizer.json"
    ending = Tokenizer.from_file(str(file))
    end = (pretrained.END_OF_TEXT, ending.token_to_id(pretrained.END_OF_TEXT))
    ending.post_processor = processors.TemplateProcessing(
        single=f"$A {end[0]}", special_tokens=[end]
    )
    ending.save(str(file))
    assert generate.continuations(found, "The License", num=8, seed=0) == (first, trained)
    assert not (cache / "tokens").exists()

    # Families call the number of positions otherwise.
    (Path(found.uri) / "config.json").write_text('{"model_type": "gpt2", "n_positions": 4}')
    with pytest.raises(InputError, match="exceed the model's 4 positions"):
        generate.continuations(found, "The License", num=8, seed=0)


def checkpoint(folder: Path, text: str, place: str) -> ShardedCheckpoint:
    """A checkpoint of a run with adapters that have learned something, kept at ``place``."""
    config = inputs.prepare(fsdp(storage=str(folder.parent), data=text, seq_len=64, lora_rank=2))
    store = inputs.store_of(config)
    model, model_config, _ = build(config, store)
    model_weights.allocate(model, torch.device("cpu"))
    fill(model, config)
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(each)
    optimizer = torch.optim.SGD(each for each in model.parameters() if each.requires_grad)
    settings = {**config.to_json(), "storage": place}
    found = written(folder, state_of(model, optimizer), settings)
    for name, content in describe(config, model_config, store).items():
        (folder / name).write_bytes(content)
    return found


def exported(found: ShardedCheckpoint, to: Path) -> bytes:
    return (Path(export.export(found, str(to))) / SAFETENSORS).read_bytes()


CONFIG = fsdp(model="new:tiny")


@pytest.mark.parametrize(
    ("free_gib", "error", "message"),
    [
        (12, InputError, r"need 12\.8 GiB, and 12\.0 are free on NVIDIA T4: use"),
        (13, RuntimeError, "it is loaded"),
    ],
    ids=["less", "enough"],
)
def test_a_model_that_does_not_fit_the_gpu_is_refused_before_it_is_loaded(
    free_gib: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("it is loaded")

    shape = pretrained.model_config("new:6.9b", runs="/s").to_dict()
    monkeypatch.setattr(model_weights, "allocate", load)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * 2**30, 15 * 2**30))
    with pytest.raises(error, match=message):
        rebuild(CONFIG.to_json(), shape, torch.device("cuda"))


def test_a_model_in_bf16_predicts_what_it_does_in_fp32() -> None:
    shape = pretrained.model_config(CONFIG.model, runs="/s", vocab_size=256).to_dict()
    tokens = torch.arange(20).unsqueeze(0)
    found = []
    for is_bf16 in (False, True):
        model: Any = rebuild(CONFIG.to_json(), shape, torch.device("cpu"))
        if is_bf16:
            language_models.keep_in_bf16(model, only_frozen=False)
        with torch.no_grad():
            found.append(model(input_ids=tokens).logits.float())
    in_fp32, in_bf16 = found
    assert torch.allclose(in_fp32, in_bf16, atol=0.02)
    assert not torch.equal(in_fp32, in_bf16)
