"""A GPT-NeoX, fully sharded over all workers with Ray Train and FSDP2, learns tiny-shakespeare.

    python fsdp.py                                              # a small model on bytes
    python fsdp.py --model databricks/dolly-v2-7b --workers 8   # the post's, on 8 GPUs of 24 GB

The job of the post about fully sharded training on ECS, in plain PyTorch. The post pads each line
of the plays to 256 tokens and learns the padding too; here the text is one row of tokens, cut into
sequences, and every position counts. It runs again from its newest checkpoint after a loss, on any
number of workers.

Each worker holds its share of the parameters, gradients and optimizer state: 16 bytes a parameter
over all workers, 110 GB for 6.9 B. Before that each reads the whole model into its host's memory.
The recipe ``fsdp`` (``trainctl submit fsdp``) reads shares only, and shows speed and memory.
"""

import argparse
import json
import math
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, PreTrainedModel

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(source: str) -> str:
    """A text file, or what is at an https:// address."""
    if source.startswith("https://"):
        source, _ = urllib.request.urlretrieve(source)
    return Path(source).read_text()


def sequences(config: dict[str, Any]) -> torch.Tensor:
    """The text as rows of ``length + 1`` tokens: inputs, and the same one later as labels."""
    if config["model"]:
        tokenizer = AutoTokenizer.from_pretrained(config["model"])
        tokens = torch.tensor(tokenizer(config["text"])["input_ids"])
    else:
        tokens = torch.frombuffer(bytearray(config["text"].encode()), dtype=torch.uint8).long()
    return tokens.unfold(0, config["length"] + 1, config["length"])


def sharded_model(config: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """The model, of which this worker holds its share."""
    torch.manual_seed(0)
    if config["model"]:
        model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL))
    # Activations are computed again in the backward pass instead of being kept.
    model.activation_checkpointing_enable()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Block by block, so that only one block is ever gathered in full; then what is left over.
    for block in model.gpt_neox.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model.to(device)


def loss_sum(model: PreTrainedModel, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sum of the losses of all tokens of these rows."""
    rows = rows.to(device)
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


def train_func(config: dict[str, Any]) -> None:
    """What each worker runs."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    device = ray.train.torch.get_device()
    model = sharded_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])

    # About a tenth of the text is held out, in whole batches. The batch of a step depends on the
    # step only: a run that resumes, on any number of workers, sees what one that does not sees.
    rows, batch = sequences(config), config["batch"]
    split = len(rows) - max(1, len(rows) // 10 // batch) * batch
    train_rows, held_out = rows[:split], rows[split:]
    steps = config["steps"] or split // batch

    # Resume: DCP reads what this worker needs of the shards of all.
    start = 0
    if checkpoint := ray.train.get_checkpoint():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        with checkpoint.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        start = int(state["step"])
    print(f"rank {rank} of {world} starts at step {start}", flush=True)

    for step in range(start, steps):
        # Data: the sequences of this step, of which each worker takes its share.
        epoch, place = divmod(step, split // batch)
        order = torch.randperm(split, generator=torch.Generator().manual_seed(epoch))
        own = train_rows[order[place * batch : (place + 1) * batch]][rank::world]

        # Forward and backward. FSDP takes the mean of the workers' gradients: times their number,
        # and over the tokens of the whole step, it is the gradient of the step's mean loss.
        loss = loss_sum(model, own, device) / (batch * config["length"])
        (loss * world).backward()

        # Step.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        if done % config["save_every"] and done < steps:
            continue

        # Evaluate. After a forward pass without a backward one the model must be sharded again.
        model.eval()
        with torch.no_grad():
            shares = [each[rank::world] for each in held_out.split(batch)]
            total = sum(loss_sum(model, share, device) for share in shares)
        model.reshard()
        model.train()
        losses = torch.stack((loss.detach(), total / (len(held_out) * config["length"])))
        dist.all_reduce(losses)
        train_loss, held_out_loss = losses.tolist()
        metrics = {"step": done, "loss": train_loss, "perplexity": math.exp(held_out_loss)}
        if rank == 0:
            print(f"of {steps} steps: {metrics}", flush=True)

        # Save: each worker its shards; Ray Train puts them together.
        with tempfile.TemporaryDirectory() as folder:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": torch.tensor(done)}
            dcp.save(state, checkpoint_id=folder)
            metrics["world_size"] = world
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a GPT-NeoX of the Hugging Face Hub, or a folder with one")
    parser.add_argument("--data", default=SHAKESPEARE, help="a text file, or its https:// address")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step, on all workers")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--steps", type=int, help="default: one epoch")
    parser.add_argument("--save-every", type=int, default=50, help="in steps")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    ray.init()
    trainer = ray.train.torch.TorchTrainer(
        train_func,
        # Read here: Ray Train's workers run in a folder of their own, without the code's files.
        train_loop_config={**vars(given), "text": read(given.data)},
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=ray.cluster_resources().get("GPU", 0) > 0
        ),
        # In a job, where results are stored and the name of the run are set already.
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    print(f"result {json.dumps(trainer.fit().metrics)}", flush=True)
