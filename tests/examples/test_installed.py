"""Examples that bring their packages, on two nodes: killed, and resumed at a checkpoint."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from containers.program.start import packages
from containers.program.start.on_node import NodePlace, launcher_environment
from contract.errors import InputError
from tests.conftest import ROOT
from tests.eventually import eventually

pytestmark = pytest.mark.timeout(2400)

NUMBERS = [f"{number} comes after {number - 1}" for number in range(1, 257)]
ROWS = {
    "sft": [{"text": text} for text in NUMBERS],
    "dpo": [
        {"prompt": "1 comes after", "chosen": f" {number}", "rejected": " 2"}
        for number in range(1, 257)
    ],
}


def write_model(folder: Path) -> None:
    """A Llama of a few thousand parameters that reads words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "comes", "after", *map(str, range(257))]
    split = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def two_nodes(folder: Path, installed: Path, *words: str, log: Path) -> Iterator[Callable[[], str]]:
    """Run a command on two nodes that share a folder, as restored nodes do; yield a function that
    returns their log once one of them has failed."""
    started = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    with log.open("w") as out:
        for rank in range(2):
            here = NodePlace(number=rank, rank=rank, start=0, addresses=("127.0.0.1",) * 2, gpus=0)
            environment = {
                **os.environ,
                **launcher_environment(here),
                "MASTER_PORT": port,
                "PET_MASTER_PORT": port,
                "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(packages.site_packages(installed)),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
            started.append(
                subprocess.Popen(
                    words,
                    cwd=folder,
                    env=environment,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
        try:
            yield lambda: log.read_text() * any(process.poll() for process in started)
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def copied(example: str, folder: Path, installed: Path) -> None:
    """Copy an example, and install its packages."""
    shutil.copytree(ROOT / "examples" / example, folder)
    try:
        # uv's own index: torch is there, and that of torch, which uv would ask too, is not needed.
        packages.install(folder, installed, environment={"UV_DEFAULT_INDEX": ""})
    except InputError as error:
        pytest.skip(f"{example} cannot be installed here: {f'{error}'.splitlines()[-1]}")


@pytest.mark.slow
@pytest.mark.long
def test_lightning_that_was_killed_ends_like_a_run_that_was_not(tmp_path: Path) -> None:
    killed, whole, installed = (tmp_path / name for name in ("killed", "whole", "installed"))
    copied("lightning", killed, installed)
    shutil.copytree(killed, whole)

    def run(folder: Path, epochs: int, *, until: str) -> str:
        log = tmp_path / f"{folder.name}-{epochs}.log"
        words = ("python", "train.py", "--epochs", f"{epochs}")
        with two_nodes(folder, installed, *words, log=log) as failed:
            eventually(until, lambda: until in log.read_text(), timeout_s=400, over=failed)
        return log.read_text()

    # The one that is printed before the second checkpoint: the first one is complete.
    reached = run(killed, 1_000_000, until="\nepoch 2 ").count("\nepoch ")
    resumed = run(killed, reached + 1, until="\nresult ")
    assert resumed.count("starts at epoch ") == 2
    assert "starts at epoch 0" not in resumed
    run(whole, reached + 1, until="\nresult ")
    found, expected = (json.loads((each / "result.json").read_text()) for each in (killed, whole))
    assert (expected["epochs"], expected["world_size"]) == (reached + 1, 2)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.night
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_trl_resumes_from_its_newest_checkpoint(method: str, tmp_path: Path) -> None:
    folder, installed = tmp_path / "code", tmp_path / "installed"
    copied("trl", folder, installed)
    write_model(folder / "model")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS[method])))
    words = (
        *(
            "sh",
            "run.sh",
            method,
            "--model_name_or_path",
            "model",
            "--dataset_name",
            "rows",
            "--use_cpu",
        ),
        *("--bf16", "false", "--save_steps", "2", "--logging_steps", "1", "--disable_tqdm", "true"),
        *("--max_length", "16", "--per_device_train_batch_size", "2", "--max_steps"),
    )

    def newest() -> int:
        states = (folder / "out").glob("checkpoint-*/trainer_state.json")
        return max((int(each.parent.name.rpartition("-")[2]) for each in states), default=0)

    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with two_nodes(folder, installed, *words, "100000", log=first) as failed:
        eventually("two checkpoints", lambda: newest() >= 4, timeout_s=900, over=failed)
    reached = newest()
    with two_nodes(folder, installed, *words, str(reached + 4), log=second) as failed:
        # Its end is not waited for: gloo may hang there, which the product ends.
        is_saved = lambda: "Model saved to out" in second.read_text()  # noqa: E731
        eventually("the model", is_saved, timeout_s=900, over=failed)
    # Rank 0 prints a line for each step.
    assert second.read_text().count("'loss': ") == 4, second.read_text()
    assert newest() == reached + 4
    assert (folder / "out" / "adapter_model.safetensors").exists()
