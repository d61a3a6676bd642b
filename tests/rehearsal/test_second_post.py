"""The job of the post about fully sharded training, by the commands of docs/from-the-posts.md: a
head that trains beside its worker, and a GPT-NeoX as dolly-v2-7b was published. By night.

The model is small, and the hosts have no GPU. The Hugging Face Hub and the publisher of the text
are servers of this machine.
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from contract import exits
from contract.nodes import HEAD, JOB, WORKER
from rehearsal.cycle import Rehearsal
from store.cache import CACHE_VARIABLE
from tests.eventually import eventually
from tests.rehearsal.conftest import DEPLOYED, gateway, served, show, succeeded
from tests.rehearsal.test_jobs import events, read, saved
from tests.rehearsal.test_programs import ended
from tests.rehearsal.watch import Watch
from tests.training import loopback_hub
from training.data import catalog
from training.models.weight_files import PICKLED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.night,
    pytest.mark.usefixtures("log_of_a_failure"),
]

MODEL = "owner/dolly"
#: Those of dolly's own tokenizer beside GPT-NeoX's.
SPECIAL_TOKENS = ("### End", "### Instruction:", "### Response:\n")
STEPS, EVERY = 40, 8
#: As on the page.
SUBMIT = ["submit", "fsdp", "--preset", "dolly", "--data", "tiny-shakespeare", "--run", "dolly"]
#: The model, and as little work as shows that it learns.
SMALL = (
    *("--model", MODEL, "--seq-len", "64", "--global-batch", "4", "--lr", "3e-3"),
    *("--max-steps", str(STEPS), "--evaluate-every", str(EVERY), "--eval-sequences", "8"),
)
PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def rehearsal(deployment: Rehearsal) -> Rehearsal:
    """The deployment with the shape of preset ``fsdp``: one worker host, and a head that trains."""
    deployment.deploy(
        deployment.environment(),
        image_tag=deployment.state()["image_tag"],
        settings={**DEPLOYED, "head_trains": "true", "max_workers": "1"},
    )
    return deployment


@pytest.fixture
def text(data_dir: Path) -> Path:
    """Folder with the text and the tokenizer."""
    for name in ("tiny-shakespeare", "gpt-neox-tokenizer"):
        if not (data_dir / name).is_dir():
            pytest.skip(f"no real data: ../shared/data has no {name}")
    return data_dir


def small_dolly(tokenizer: Path) -> dict[str, bytes]:
    """A repository as dolly-v2-7b's: weights in half precision, pickled, with the buffers that
    GPT-NeoX's first versions saved, and a tokenizer with three special tokens of its own."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    words = Tokenizer.from_file(str(tokenizer))
    words.add_special_tokens([*SPECIAL_TOKENS])
    make: Any = GPTNeoXConfig
    config = make(
        vocab_size=50_280,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM
    weights = {
        name.replace("lm_head", "embed_out"): tensor.half()
        for name, tensor in build.from_config(config).state_dict().items()
    }
    triangle = torch.ones(1, 1, 512, 512, dtype=torch.uint8).tril()
    pickled = io.BytesIO()
    torch.save({**weights, "gpt_neox.layers.0.attention.bias": triangle}, pickled)
    named = {
        "eos_token": "<|endoftext|>",
        "additional_special_tokens": [*SPECIAL_TOKENS],
        "tokenizer_class": "GPTNeoXTokenizer",
    }
    return {
        "config.json": config.to_json_string().encode(),
        PICKLED: pickled.getvalue(),
        "tokenizer.json": words.to_str().encode(),
        "tokenizer_config.json": json.dumps(named).encode(),
    }


@contextmanager
def published(rehearsal: Rehearsal, text: Path) -> Iterator[dict[str, str]]:
    """Serve the model and the text; yield the variables that lead a laptop there."""
    files = small_dolly(text / "gpt-neox-tokenizer" / "tokenizer.json")
    repositories = {f"/api/models/{MODEL}": (f"/{MODEL}", files)}
    with (
        loopback_hub.serve(repositories, host=gateway(rehearsal)) as hub,
        served(text) as mirror,
    ):
        yield {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", catalog.MIRROR_VARIABLE: mirror}


def test_the_standing_cluster_has_two_nodes_that_train(rehearsal: Rehearsal) -> None:
    succeeded(rehearsal, "cluster", "up", "--nodes", "1", "--yes")
    status = succeeded(rehearsal, "shell", "--", "ray", "status").stdout
    succeeded(rehearsal, "cluster", "down", "--yes")
    nodes = re.findall(r"^ 1 node_", status, re.MULTILINE)
    assert (len(nodes), "0.0/4.0 CPU" in status) == (2, True), status


@pytest.mark.timeout(900)
def test_the_second_posts_job_is_killed_resumed_and_exported_and_continues_a_prompt(
    rehearsal: Rehearsal, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with published(rehearsal, text) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        succeeded(rehearsal, "data", "put", "tiny-shakespeare")
        given = ("--env", "HF_ENDPOINT", "--env", "OMP_NUM_THREADS=1", "--yes")
        job = succeeded(rehearsal, *SUBMIT, *SMALL, *given).stdout.strip()

        # --- the head's host goes, and its rank with it
        watch = Watch(rehearsal, job)

        def checkpoints() -> set[str]:
            watch.look()
            return saved(rehearsal, "dolly")

        whole = "a checkpoint is whole"
        eventually(whole, checkpoints, timeout_s=300, every_s=1, over=watch.over)
        rehearsal.engine("kill", "--signal", "KILL", watch.wait_for_node(HEAD))
        watch.wait_for(", 2 workers on", times=2)
        nodes = {
            each["address"]: each["node"]
            for each in show(rehearsal, job)["tasks"]
            if each["status"] == "RUNNING"
        }
    # The weights are in the bucket by now: no later command needs the Hub.
    exit_code, log = ended(rehearsal, job)
    assert exit_code == exits.OK, log
    result = json.loads(read(rehearsal, "runs/dolly/result.json"))
    assert sorted(nodes[each] for each in result["hosts"]) == [JOB, WORKER]
    assert result["steps"] == STEPS
    assert result["resumed_from"] in range(EVERY, STEPS, EVERY)
    losses = {
        each["step"]: each["loss"]
        for each in events(rehearsal, "dolly")
        if each["type"] == "evaluation"
    }
    (loaded,) = [each for each in events(rehearsal, "dolly") if each["type"] == "loaded"]
    assert loaded["loss"] == pytest.approx(losses[result["resumed_from"]], abs=1e-5)
    assert losses[STEPS] < losses[min(losses)]

    # --- its model, elsewhere and here
    folder = tmp_path / "dolly-shakespeare"
    succeeded(rehearsal, "export", "dolly", "--to", str(folder), "--yes")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    words = load(folder)
    for token in SPECIAL_TOKENS:
        assert len(words(token)["input_ids"]) == 1
        assert words.decode(words(token)["input_ids"], skip_special_tokens=True) == ""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "gpt_neox"

    few = ("--greedy", "--tokens", "8", "--yes")
    said = succeeded(rehearsal, "generate", "dolly", PROMPT, *few, "--json")
    found = json.loads(said.stdout)
    ids = words(PROMPT, return_tensors="pt")["input_ids"]
    drawn = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    continued = words.decode(drawn, skip_special_tokens=True)
    assert (found["step"], found["after"].strip()) == (STEPS, continued.strip()), said.stderr
