"""Continue a prompt with a run's model, before and after training.

    python -m training.generate RUN "To be, or not"
    python -m training.generate RUN "What is a step?" --chat

Reads the newest checkpoint of a sharded run into the memory of this machine, so it is for models
that fit there; export larger ones (``training.export``) and serve them with what is made for it.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from contract import exits, faults
from contract.errors import InputError
from contract.runs import DEFAULT_NEW_TOKENS
from contract.text import counted
from store import storage
from training import export
from training.checkpoint import sharded_checkpoints
from training.data import vocabulary
from training.data.conversations import ChatWriter, Conversation, Message
from training.data.vocabulary import GENERATION_FILE, TOKENIZER_FILE, Vocabulary
from training.models import language_models, pretrained, serving
from training.models.language_models import WithLoss


def continuations(
    found: sharded_checkpoints.ShardedCheckpoint,
    prompt: str,
    *,
    num: int,
    seed: int,
    chat: bool = False,
    greedy: bool = False,
) -> tuple[str, str]:
    """Continuations of a prompt by the model before and after training: at most ``num`` tokens
    each, up to the first token that ends a text or an answer.

    Args:
        chat: the prompt is what a user says, and is put into the model's chat template.
        greedy: take the likeliest token each time instead of drawing one.

    Raises:
        InputError: the prompt is empty or too long, or the model is not a language model.
    """
    words = _vocabulary(found)
    tokenizer = words.tokenizer
    if not prompt.strip():
        raise InputError("the prompt is empty: give some text")
    if chat:
        messages = (Message(role="user", content=prompt),)
        asked = ChatWriter(words).text(Conversation(messages=messages), asks=True)
        ids = tokenizer.encode(asked, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode(prompt).ids
        while ids[-1:] == [words.end_of_text]:  # some tokenizers end every text
            ids.pop()
    stops = serving.stops_of(found.read(GENERATION_FILE)) if chat else [words.end_of_text]
    model_config = found.model_config
    # By this name, whatever the file calls it.
    kind = pretrained.config_of(model_config)
    longest = getattr(kind, "max_position_embeddings", None) or 2**20
    if len(ids) + num > longest:
        raise InputError(
            f"{len(ids)} tokens of prompt and {num} more exceed the model's {longest} positions"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = export.recipe_of(found).rebuilt(found.config, model_config, device)
    texts = []
    for is_trained in (False, True):
        if is_trained:
            found.load_weights(model)
        (drawn,) = language_models.generate(
            WithLoss(model), [ids], num=num, seed=seed, stops=stops, greedy=greedy, device=device
        )
        texts.append(tokenizer.decode(drawn))
    return texts[0], texts[1]


def _vocabulary(found: sharded_checkpoints.ShardedCheckpoint) -> Vocabulary:
    """The tokenizer of a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="tokenizer-") as folder:
        for name in vocabulary.FILES:
            if (content := found.read(name)) is not None:
                (Path(folder) / name).write_bytes(content)
            elif name == TOKENIZER_FILE:
                raise InputError(
                    f"{found.uri} has no {TOKENIZER_FILE}: only a language model can continue a "
                    "text; give the name of another run"
                )
        return vocabulary.read(Path(folder))


@faults.command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = export.run_parser("python -m training.generate", __doc__)
    parser.add_argument("prompt", metavar="PROMPT", help="text to be continued")
    parser.add_argument(
        "--tokens",
        type=int,
        default=DEFAULT_NEW_TOKENS,
        help="most tokens to add (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message in the chat template"
    )
    parser.add_argument(
        "--greedy", action="store_true", help="take the likeliest tokens instead of drawing them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--to", metavar="PLACE", help="write it to this file or s3:// address too")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        raise InputError(f"--tokens is {options.tokens}: it must be at least 1")
    found = export.newest_checkpoint(options.run, options.storage, best=options.best)
    before, after = continuations(
        found,
        options.prompt,
        num=options.tokens,
        seed=options.seed,
        chat=options.chat,
        greedy=options.greedy,
    )
    step = found.position.step
    result = {"prompt": options.prompt, "before": before, "after": after, "step": step}
    if options.to:
        storage.write_bytes(options.to, json.dumps(result).encode())
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"before training:\n{options.prompt}{before}\n")
        print(f"after {counted(step, 'step')}:\n{options.prompt}{after}")
    return exits.OK


if __name__ == "__main__":
    sys.exit(main())
