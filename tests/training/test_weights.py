"""A model trains in fp32 from what its published files hold, each tensor of which is used, named or
refused. Models of real shapes are in ``tests/published``."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from contract.errors import InputError
from tests.published.models import from_pretrained
from tests.training.test_adapters import written
from tests.training.test_nf4 import filled
from tests.training.test_plan import config as fsdp
from training import export
from training.checkpoint.sharded_checkpoints import state_of
from training.fsdp.model import build, fill
from training.fsdp.settings import FsdpConfig
from training.loop import optimizers
from training.loop.worker import uses_bf16
from training.models import lora, model_weights, pretrained
from training.models.language_models import WithLoss, build_on_meta
from training.models.model_shapes import read_config

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
CPU = torch.device("cpu")
VOCAB = 257
SHAPE: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
LAYER = "model.layers.0."
UP = f"{LAYER}mlp.up_proj.weight"


def published(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A Llama whose values all three types represent, saved in one of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM
    model = make.from_config(AutoConfig.for_model("llama", **{**SHAPE, **changes}))
    with torch.no_grad():
        for each in model.parameters():
            each.copy_((each * 2**12).round().clamp(-127, 127) / 2**12)
    model.to(dtype).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] in str(dtype)
    return folder


def change(folder: Path, **tensors: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def loaded(folder: Path, rank: int = 0, notes: list[str] | None = None) -> Any:
    model = build_on_meta(pretrained.model_config(str(folder), runs="", notes=notes))
    if rank:
        lora.add(model, rank=rank)
    model_weights.allocate(model, CPU)
    note = model_weights.load(model, folder)
    if notes is not None and note:
        notes.append(note)
    return model


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (2, 17), generator=generator)


def losses(model: Any, num: int) -> list[float]:
    optimizer = optimizers.build(model, "adamw", lr=2e-5, weight_decay=0.1, device=CPU)
    trained = WithLoss(model)
    found = []
    for step in range(num):
        loss = trained(tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    kept = optimizer.state.values()
    assert {each.dtype for state in kept for each in state.values()} == {torch.float32}
    return found


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_the_type_of_the_files_changes_no_bit_of_a_loss(rank: int, tmp_path: Path) -> None:
    types = (torch.float32, torch.bfloat16, torch.float16)
    folders = [published(tmp_path / str(each), each) for each in types]
    one, two, three = (losses(loaded(folder, rank), 120) for folder in folders)
    assert one == two == three
    assert len({*one}) > 100


def test_weights_in_less_than_fp32_do_not_reach_an_optimizer() -> None:
    with pytest.raises(AssertionError, match=r"would update weights in \{torch.bfloat16\}"):
        optimizers.decay_groups(torch.nn.Linear(2, 2, dtype=torch.bfloat16), 0.0)


@pytest.mark.parametrize(("kind", "kept"), [("mamba", "A_log"), ("gpt_oss", "gate_up_proj_bias")])
def test_weight_decay_spares_what_only_its_name_tells(kind: str, kept: str, tmp_path: Path) -> None:
    """Also when it resumes a run that went by dimensions."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "state_size": 4}
    sizes |= {"num_hidden_layers": 1, "num_local_experts": 4, "head_dim": 8}
    model = filled(build_on_meta(pretrained.config_of({"model_type": kind, **sizes})))
    names = {each: name.rpartition(".")[2] for name, each in model.named_parameters()}
    earlier = torch.optim.AdamW(
        [
            {"params": [each for each in names if (each.ndim > 1) == is_matrix]}
            for is_matrix in (True, False)
        ]
    )
    WithLoss(model)(torch.arange(9)[None]).backward()
    earlier.step()
    earlier.zero_grad()
    optimizer = optimizers.build(model, "adamw", lr=1e-3, weight_decay=0.1, device=CPU)
    written(tmp_path, state_of(model, earlier), {}).load(model, optimizer)
    decayed, spared = (
        {names[each] for each in group["params"]} for group in optimizer.param_groups
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert kept in spared - decayed
    assert "weight" in decayed
    for each, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], earlier.state[each]["exp_avg"])
    assert len(optimizer.state) == len(earlier.state)


@pytest.mark.parametrize("kind", [None, "bfloat16", "float16"])
def test_an_export_has_the_type_that_the_model_came_in_unless_another_is_named(
    kind: str | None, tmp_path: Path
) -> None:
    folder = published(tmp_path / "base")
    config = {**json.loads((folder / "config.json").read_text()), "dtype": kind}
    model = loaded(folder)
    optimizer = torch.optim.SGD(model.parameters())
    found = written(tmp_path / "saved", state_of(model, optimizer), {})
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    for asked in (None, torch.float16):
        place = export.export(found, str(tmp_path / f"{asked}"), dtype=asked)
        has = {str(each.dtype) for each in load_file(f"{place}/model.safetensors").values()}
        assert has == {f"torch.{kind or 'float32'}" if asked is None else str(asked)}


# --- what files hold ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        *(
            ("quantization_config", {"quant_method": method}, method)
            # Of the published DeepSeek-V3, Llama-2-13B-GPTQ, gpt-oss and others.
            for method in ("fp8", "gptq", "awq", "mxfp4", "compressed-tensors", "modelopt")
        ),
        ("quantization_config", {"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsand"),
        ("compression_config", {"format": "pack-quantized"}, "compression_config"),
        ("quantization", {"group_size": 64, "bits": 4}, "quantization (4)"),  # MLX
    ],
)
def test_quantized_weights_are_refused_by_name(
    key: str, value: object, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SHAPE, "model_type": "llama", key: value}))
    with pytest.raises(InputError, match=r"config\.json") as caught:
        read_config(file)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{UP}_scale_inv", "refused"),
        (f"{LAYER}mlp.up_proj.g_idx", "refused"),
        (f"{LAYER}self_attn.q_proj.bias", "refused"),
        (f"{LAYER}self_attn.q_norm.weight", "refused"),
        (f"{LAYER}self_attn.masked_bias", "named"),  # GPT-J, in parts that save a mask
        ("lm_head.bias", "refused"),
        ("model.norm.bias", "refused"),
        ("v_head.summary.weight", "named"),  # TRL's value head
        ("score.weight", "named"),
        ("model.layers.1.mlp.up_proj.weight", "named"),  # config.json has one layer
        ("mtp.fc.weight", "named"),
        (f"{LAYER}self_attn.rotary_emb.inv_freq", "known"),  # Llama 1
        ("model.rotary_emb.inv_freq", "known"),
    ],
)
def test_a_tensor_that_the_model_does_not_have_is_refused_or_named_or_known(
    name: str, words: str, tmp_path: Path
) -> None:
    folder = published(tmp_path)
    change(folder, **{name: torch.ones(4)})
    notes: list[str] = []
    if words == "refused":
        for rank in (0, 2):
            with pytest.raises(InputError, match=f"{name}, in parts .* have no such weights"):
                loaded(folder, rank)
        return
    loaded(folder, notes=notes)
    assert [name in each for each in notes] == ([True] if words == "named" else [])


@pytest.mark.parametrize("differ", [True, False], ids=["two weights", "one weight, twice"])
def test_tied_embeddings_with_two_weights_are_what_transformers_makes_of_them(
    differ: bool, tmp_path: Path
) -> None:
    """The files of Qwen3-1.7B have both names with one value; a vocabulary that was resized and
    trained leaves two values."""
    folder = published(tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.flip(0) if differ else embedding.clone()
    change(folder, **{"lm_head.weight": head.contiguous()})
    notes: list[str] = []
    model = loaded(folder, notes=notes)
    theirs = from_pretrained(folder)(input_ids=tokens(0)).logits
    torch.testing.assert_close(model(input_ids=tokens(0)).logits, theirs)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) != differ
    assert ["lm_head.weight and model.embed" in each for each in notes] == [True] * differ


# --- more tokens than the model knows -------------------------------------------------------------
def with_tokens(folder: Path, num: int) -> int:
    """Give a model's folder a tokenizer with ``num`` more tokens; return how many it has."""
    tokenizer = Tokenizer.from_file(str(pretrained.tokenizer_file("bytes", "", runs="")))
    tokenizer.add_tokens([f"<new{number}>" for number in range(num)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer.get_vocab_size()


def config_of(folder: Path, **changes: Any) -> FsdpConfig:
    return fsdp(seq_len=16, model=str(folder), **changes)


def store(size: int, largest: int) -> Any:
    return SimpleNamespace(info=SimpleNamespace(vocab_size=size), largest_id=largest)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("rank", [0, 2], ids=["all weights", "adapters"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
def test_new_tokens_get_rows_that_are_trained_and_exported(
    rank: int, tied: bool, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForCausalLM

    folder = published(tmp_path / "base", tie_word_embeddings=tied)
    size = with_tokens(folder, 3)
    config = config_of(folder, lora_rank=rank)
    model, model_config, notes = build(config, store(size, size - 1))
    model_weights.allocate(model, CPU)
    assert fill(model, config) == []
    assert f"{size} tokens" in notes[0]
    old = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    rows: Any = dict(model.named_parameters())["model.embed_tokens.weight"]
    assert torch.equal(rows[:VOCAB], old)
    assert torch.allclose(rows[VOCAB:], old.mean(0))

    optimizer = optimizers.build(model, "adamw", lr=1e-2, weight_decay=0.0, device=CPU)
    words = torch.cat([tokens(0), torch.full((2, 4), size - 1)], dim=1)
    WithLoss(model)(words).backward()
    optimizer.step()
    expected = model(input_ids=words).logits
    saved = tmp_path / "saved"
    found = written(saved, state_of(model, optimizer), config.to_json())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (saved / name).write_bytes((folder / name).read_bytes())
    (saved / "config.json").write_text(model_config.to_json_string(use_diff=False))
    place = export.export(found, str(tmp_path / "merged"), dtype=torch.float32)
    torch.testing.assert_close(
        from_pretrained(place)(input_ids=words).logits, expected, atol=1e-5, rtol=1e-4
    )
    if rank:
        place = export.export_adapters(found, str(tmp_path / "adapters"))
        theirs: Any = AutoPeftModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        found_logits = theirs(input_ids=words).logits
        torch.testing.assert_close(found_logits, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("cache")
def test_tokens_that_no_text_has_change_no_model_and_another_vocabulary_is_refused(
    tmp_path: Path,
) -> None:
    """Gemma 3's tokenizer has one token, for pictures, that its models of text do not know."""
    folder = published(tmp_path / "base")
    size = with_tokens(folder, 1)
    model, model_config, notes = build(config_of(folder), store(size, VOCAB - 1))
    assert (model_config.vocab_size, notes) == (VOCAB, [])
    assert model.get_parameter("lm_head.weight").shape[0] == VOCAB

    other = tmp_path / "other"
    size = with_tokens(other, 2)
    config = config_of(folder, tokenizer=str(other))
    _, model_config, _ = build(config, store(size, size - 1))
    assert model_config.vocab_size == size
    text = (other / "tokenizer.json").read_text().replace('"a":', '"A A":', 1)
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=r"others under the same ids: give the model's own"):
        build(config, store(size, size - 1))


# --- arithmetic -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [
        ("auto", (7, 5), False),
        ("auto", (8, 0), True),
        ("bf16", (7, 5), True),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp32(
    precision: str, capability: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert uses_bf16(precision, torch.device("cuda", 0)) == expected
    assert not uses_bf16("auto", CPU)


def test_adapters_begin_as_those_of_peft(tmp_path: Path) -> None:
    """Of kaiming_uniform_(a=sqrt(5)): any value within 1 / sqrt(inputs) is as likely."""
    model = loaded(published(tmp_path), rank=64)
    (found,) = (each for name, each in model.named_parameters() if "up_proj.lora_A" in name)
    limit = SHAPE["hidden_size"] ** -0.5
    assert 0.99 * limit < found.abs().max() <= limit
    assert found.std().item() == pytest.approx(limit / 3**0.5, rel=0.05)
