"""Proves, with the real command and with ranks, that a sharded run learns, resumes exactly where it
was killed, goes on with any number of workers, and leaves a model that others can read."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from benchmarks import rank_groups
from contract import exits
from tests.eventually import eventually
from tests.published.models import from_pretrained
from tests.training.kills import killed, play
from tests.training.local_runs import REPO, Command, RankedRun, Run, launcher, ranked
from training import export, generate, recipes
from training.checkpoint import checkpoints, sharded_checkpoints
from training.fsdp.settings import FsdpConfig
from training.models import language_models, model_weights, nf4, pretrained

pytestmark = pytest.mark.slow

# A text that never changes, as bytes, and four blocks of 128; a fifth of a second per step.
TINY = ["--preset", "tiny", "--data", str(REPO / "LICENSE"), "--held-out-every", "5"]
TINY += ["--max-steps", "20", "--evaluate-every", "8", "--report-every", "2"]
TINY += ["--eval-sequences", "16", "--sample-tokens", "8"]
TWO = ["--workers", "2"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Command]]:
    with launcher(tmp_path_factory.mktemp("runs"), "fsdp") as run:
        yield run


@pytest.fixture(scope="module")
def whole(start: Callable[..., Command]) -> Command:
    command = start("whole", *TINY, *TWO, "--json")
    assert json.loads(command.succeed()) == command.result()
    return command


@pytest.fixture(scope="module")
def ranks(whole: Command) -> Iterator[Callable[..., RankedRun]]:
    """Starts runs beside ``whole``, without Ray."""
    with ranked(whole.folder, "fsdp") as run:
        yield run


def held_out(command: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in command.metrics("evaluation")}


def test_a_run_learns_and_leaves_its_whole_record(whole: Command) -> None:
    result = whole.result()
    evaluation = json.loads((whole.run_folder / "evaluation.json").read_text())
    assert (result["status"], result["steps"], result["world_size"]) == ("succeeded", 20, 2)
    assert result["loss"] == evaluation["loss"] < held_out(whole)[0]
    # A model that knows nothing: all of the 384 tokens of its vocabulary are equally likely.
    assert held_out(whole)[0] == pytest.approx(torch.tensor(384.0).log().item(), abs=0.1)
    assert checkpoints.names(str(whole.run_folder)) == ["step-00000016", "step-00000020"]
    for line in whole.metrics("rank"):
        parts = ("data", "forward", "backward", "optimizer", "checkpoint")
        assert sum(line[f"{part}_s"] for part in parts) == pytest.approx(line["step_time_s"])
        assert line["communication_s"] > 0
    samples = whole.metrics("sample")
    assert [line["step"] for line in samples] == [0, 0, 0, 20, 20, 20]
    assert "Perplexity" in (whole.run_folder / "report.html").read_text()


def test_the_losses_are_those_stored(whole: Command) -> None:
    whole.has_stored_losses(
        {1: (6.0171, 1e-3), 2: (5.4020, 2e-3), 5: (4.1193, 5e-3), 20: (2.7397, 2e-2)}
    )


@pytest.mark.long
@killed([("rank 1", "save"), ("rank 0", "load"), ("SIGTERM", "step")], publishes=False)
def test_a_killed_run_resumes_where_it_was_saved_and_takes_the_same_steps(
    kills: list[tuple[str, str]],
    start: Callable[..., Command],
    whole: Command,
) -> None:
    # Each step may be evaluated: a stretch of one step is timed, and not watched.
    words = [*TINY, *TWO, "--evaluate-every", "1", "--report-every", "1", "--checkpoint-every", "2"]
    found = held_out(play(kills, start, whole, words))
    assert {step: found[step] for step in held_out(whole)} == pytest.approx(
        held_out(whole), abs=1e-6
    )


def test_another_number_of_workers_finds_the_same_model_and_goes_on(
    ranks: Callable[..., RankedRun], whole: Command
) -> None:
    """Shares of 6, 5 and 5 of the 16 sequences."""
    workers, name = 3, "on-3"
    whole.copy(name, without="step-00000020")
    command = ranks(name, *TINY, "--microbatch", "2", world=workers)
    command.succeed()
    (loaded,) = command.metrics("loaded")
    assert loaded["step"] == 16
    assert loaded["loss"] == pytest.approx(held_out(whole)[16], abs=1e-5)
    assert command.result()["world_size"] == workers
    for step in range(17, 21):
        assert command.losses()[step] == pytest.approx(whole.losses()[step], abs=1e-3)


# peft asks transformers by an older name.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("bits", [16, 4])
def test_adapters_are_trained_resumed_on_another_number_of_workers_and_exported(
    ranks: Callable[..., RankedRun], tmp_path: Path, bits: int
) -> None:
    base = tmp_path / "base"
    model: Any = language_models.build_on_meta(
        pretrained.model_config("new:tiny", runs="", vocab_size=257)
    )
    model_weights.allocate(model, torch.device("cpu"))
    model_weights.initialise(model, seed=1)
    model.save_pretrained(base)
    adapters = ["--model", str(base), "--tokenizer", "bytes", "--lora-rank", "4", "--lr", "3e-2"]
    adapters += ["--lora-targets", "query_key_value,dense", "--lora-alpha", "12"]
    adapters += ["--lora-dropout", "0.05", "--recompute", "full", "--lora-bits", str(bits)]
    name = f"lora-{bits}"
    command = ranks(name, *TINY, *adapters, world=2)
    saved = str(command.run_folder)
    command.wait_until(lambda: command.steps_done() >= 10 and checkpoints.names(saved) != [])
    command.process.kill()
    command = ranks(name, *TINY, *adapters, world=1)
    command.succeed()
    (loaded,) = command.metrics("loaded")
    assert command.result()["resumed_from"] == loaded["step"] >= 8
    found = held_out(command)
    assert loaded["loss"] == pytest.approx(found[loaded["step"]], abs=1e-5)
    assert found[20] < found[0] - 0.05
    shards = command.run_folder / "checkpoints" / "step-00000020"
    assert sum(path.stat().st_size for path in shards.glob("*.distcp")) < 2e6, "adapters alone"
    checkpoint = sharded_checkpoints.newest_of(str(command.run_folder))
    place = export.export(checkpoint, str(tmp_path / "model"))
    assert loss_by_transformers(place, checkpoint) == pytest.approx(found[20], abs=1e-4)

    beside = export.export_adapters(checkpoint, str(tmp_path / "adapters"))
    from peft import AutoPeftModelForCausalLM

    by_peft = AutoPeftModelForCausalLM.from_pretrained(beside)  # it finds the base model itself
    if bits == 4:  # as bitsandbytes would load it
        matrices: Any = language_models.matrices(by_peft.base_model.model)
        for _, module in matrices:
            module.weight.data = nf4.unpack(nf4.pack(module.weight.data), torch.float32)
    assert loss_of(by_peft, checkpoint) == pytest.approx(found[20], abs=1e-4)


def test_an_export_is_read_by_transformers_with_the_same_loss(
    whole: Command, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    found = sharded_checkpoints.newest_of(str(whole.run_folder))
    # Small files, so that there are several.
    place = export.export(found, str(tmp_path / "model"), file_bytes=500_000)
    files = sorted(path.name for path in Path(place).iterdir())
    assert "model-00001-of-00009.safetensors" in files
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["GPTNeoXForCausalLM"], "a server chooses the class by it"
    assert loss_by_transformers(place, found) == pytest.approx(whole.result()["loss"], abs=1e-5)
    tokenizer: Any = AutoTokenizer
    ids = tokenizer.from_pretrained(place)("for i in x:").input_ids
    assert ids == Tokenizer.from_file(f"{place}/tokenizer.json").encode("for i in x:").ids


@pytest.mark.night
def test_transformers_own_server_continues_a_prompt_as_generate_does(
    whole: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its packages for servers, which an environment of this project does not have."""
    monkeypatch.chdir(whole.folder)
    uv = ["sh", str(REPO / ".ci" / "uv"), "pip", "install", "--target", str(tmp_path / "packages")]
    subprocess.run([*uv, "fastapi", "uvicorn", "openai"], cwd=REPO, check=True)
    assert export.main(["whole", "--to", "served"]) == exits.OK
    prompt, num_tokens = "The License", 8
    given = ["--greedy", "--tokens", str(num_tokens), "--to", "here.json", "--", "whole", prompt]
    assert generate.main(given) == exits.OK
    port = rank_groups.free_port()
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("transformers")),
            "serve",
            "served",
            "--device",
            "cpu",
            "--port",
            str(port),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "HF_HUB_OFFLINE": "1"},
    )
    try:

        def is_up() -> bool:
            with contextlib.suppress(requests.ConnectionError):
                return requests.get(f"{address}/health", timeout=5).ok
            return False

        eventually("it is up", is_up, timeout_s=120, over=lambda: server.poll() is not None)
        body = {"model": "served", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = requests.post(f"{address}/v1/completions", json=body, timeout=60).json()
    finally:
        server.kill()
        server.wait()
    assert answer["choices"][0]["text"] == json.loads(Path("here.json").read_text())["after"]


def loss_by_transformers(place: str, found: Any) -> float:
    """Held-out loss of an exported model, computed by transformers and torch alone."""
    return loss_of(from_pretrained(place), found)


def loss_of(model: Any, found: Any) -> float:
    """The loss of a model over what a checkpoint's run held out."""
    from training.fsdp import inputs

    store = inputs.store_of(FsdpConfig.from_json(found.config))
    seq_len, num = found.config["seq_len"], found.config["eval_sequences"]
    num = min(num, (len(store.held_out) - 1) // seq_len)
    total: float = 0.0
    for first in range(num):
        window = store.held_out[first * seq_len : (first + 1) * seq_len + 1].astype("int64")
        tokens = torch.from_numpy(window)[None]
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        total += float(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]))
    return total / int(num)


@pytest.mark.long
def test_the_commands_export_and_generate_say_what_they_did(
    whole: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(whole.folder)
    assert export.main(["whole", "--to", "out", "--dtype", "bf16"]) == exits.OK
    assert capsys.readouterr().out == "out\n"
    assert Path("out/model.safetensors").exists()
    [*_, load, use] = recipes.by_name("fsdp").use("runs/whole", {})
    exec(f"{load}\n{use.replace('DIR', 'out')}", {})
    assert "'generated_text': 'Once upon a time" in capsys.readouterr().out
    assert export.main(["whole", "--to", "out"]) == exits.BAD_INPUT
    capsys.readouterr()
    assert export.main(["hole", "--to", "other"]) == exits.BAD_INPUT
    assert "whole" in capsys.readouterr().err
    assert not Path("other").exists()
    given = ["--tokens", "6", "--json", "--to", "said.json", "--", "whole", "The "]
    assert generate.main(given) == exits.OK
    words = json.loads(capsys.readouterr().out)
    assert json.loads(Path("said.json").read_text()) == words
    assert words["step"] == 20
    assert words["before"] != words["after"]
