"""What a step asks of a GPU, as far as a CPU shows it: graphs of the shapes of training, and no
value of the device that the host waits for."""

import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import rank_groups
from contract.nodes import Range
from tests.conftest import ROOT
from tests.training.local_runs import trained
from tests.training.test_bookkeeping import COURSE
from training import bookkeeping, recipes
from training.command import read_command
from training.loop import losses
from training.models import language_models, replicas
from training.settings import RunConfig
from training.system import devices

#: Operations that read values of a tensor: from a GPU, the host waits for them.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}


class Reads(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.name().removeprefix("aten::").partition(".")[0] in READS
        return func(*args, **(kwargs or {}))


#: Two passes a step.
TEXT = f"fsdp --preset tiny --data {ROOT / 'LICENSE'} --held-out-every 5 --global-batch 8"


def config_of(words: str, folder: Path, patch: pytest.MonkeyPatch) -> RunConfig:
    """A run of this process by itself."""
    patch.setenv("TRAINING_CACHE_DIR", str(folder))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**rank, "MASTER_PORT": str(rank_groups.free_port())}.items():
        patch.setenv(name, value)
    config = read_command(words.split(), run="run", workers=Range(1, 1), storage=str(folder))
    return recipes.by_name(config.recipe).prepare(config)


OF_TEXT = f"{TEXT} --evaluate-every 9 --sample-tokens 0 --microbatch 4"


@pytest.mark.parametrize(
    "command",
    ["ddp --preset digits", OF_TEXT, f"{OF_TEXT} --isolate-documents"],
    ids=["pictures", "text", "packed"],
)
def test_between_reports_the_host_reads_no_value_of_the_device(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bookkeeping, "_SLOW_STEP_S", 1e9)
    reads, at = Reads(), list[int]()
    real = bookkeeping.Bookkeeping.step

    def step(self: bookkeeping.Bookkeeping, number: int) -> Any:
        at.append(reads.num)
        return real(self, number)

    def to_list(self: torch.Tensor) -> Any:
        reads.num += 1
        return real_list(self)

    real_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", to_list)
    monkeypatch.setattr(bookkeeping.Bookkeeping, "step", step)
    config = config_of(f"{command} --max-steps 7 --report-every 3", tmp_path, monkeypatch)
    with reads:
        trained(config)
    found = [after - before for before, after in pairwise(at)]
    assert [num > 0 for num in found] == [True, False, True, False, False, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_samples_and_uneven_evaluation_leave_the_shapes_of_training_static(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graphs: list[tuple[bool, str]] = []  # trained through, and the shapes of the inputs

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        inputs = [each.meta["example_value"] for each in graph.graph.find_nodes(op="placeholder")]
        shapes = [
            [*each.shape] if isinstance(each, torch.Tensor) else each
            for each in inputs
            if not isinstance(each, nn.Parameter)
        ]
        graphs.append((torch.is_grad_enabled(), str(shapes)))
        return graph.forward

    counted = functools.partialmethod(nn.Module.compile, backend=backend)
    monkeypatch.setattr(nn.Module, "compile", counted)
    torch._dynamo.reset()  # it would remember the shapes of other tests
    of_logits = torch.compile(losses._of_logits, backend=backend)
    monkeypatch.setattr(losses, "_compiled", lambda: of_logits)
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    monkeypatch.setattr(language_models, "COMPILED", ("cpu",))
    # Passes of four sequences, also while evaluating, and the last two sequences by themselves.
    words = "--max-steps 2 --evaluate-every 1 --sample-tokens 3 --microbatch 5 --eval-sequences 6"
    trained(config_of(f"{TEXT} {words}", tmp_path, monkeypatch))
    # One graph serves all blocks, another the loss, whose gradients are made on the way. A dynamic
    # dimension is a symbol: s33.
    assert [trains for trains, _ in graphs] == [False, False, True, False]
    assert [shapes for _, shapes in graphs if "s" in shapes] == []
    assert all(shapes.startswith("[[4, 128, 128]") for _, shapes in graphs[::2])
    assert all(shapes.startswith("[[512, ") for _, shapes in graphs[1::2])


class Doubled(nn.Module):
    """A block: torch compiles no module of its own by itself."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


@pytest.mark.parametrize("caller", ["pictures", "passes"])
def test_each_shape_has_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch, caller: str) -> None:
    """Pictures that grow, and passes of four and three sequences; more than torch's limit of 8."""
    general: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        sizes = [size for each in inputs if isinstance(each, torch.Tensor) for size in each.shape]
        general.append(any(isinstance(size, torch.SymInt) for size in [*inputs, *sizes]))
        return graph.forward

    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    torch._dynamo.reset()
    own = {"automatic_dynamic_shapes": True, "recompile_limit": 8, "suppress_errors": False}
    with torch._dynamo.config.patch(own):
        if caller == "pictures":
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
            monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
            model = replicas.distribute(nn.Conv2d(3, 4, 3), compiles=True)
            for size in (*range(8, 18), 8):
                model(torch.zeros(2, 3, size, size))
        else:
            compiled = functools.partialmethod(nn.Module.compile, backend=backend)
            monkeypatch.setattr(nn.Module, "compile", compiled)
            block = Doubled()
            monkeypatch.setattr(language_models, "blocks", lambda _: [block])
            language_models.compile_parts(language_models.WithLoss(block))
            for number in (*range(2, 12), 2):
                block(torch.zeros(number, 8))
    assert general == [False] * 10, "a graph for each shape, and none for any"


@pytest.mark.parametrize(("num_workers", "mode"), [(1, "reduce-overhead"), (2, None)])
def test_a_small_model_alone_on_its_gpu_is_launched_as_graphs(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, mode: str | None
) -> None:
    compiled: dict[str, Any] = {}
    monkeypatch.setattr(devices, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_workers)
    monkeypatch.setattr(replicas, "DistributedDataParallel", lambda model, **_: model)
    monkeypatch.setattr(torch, "compile", lambda _, **options: compiled.update(options))
    replicas.distribute(nn.Linear(1, 1), compiles=True, has_graphs=True)
    assert compiled == {"mode": mode}


@pytest.mark.parametrize(
    ("num_epochs", "reason"),
    [(90, ""), (1, "in the steps left that saves 11 s, less than it takes")],
)
def test_a_run_of_pictures_is_compiled_if_its_steps_repay_it(
    monkeypatch: pytest.MonkeyPatch, num_epochs: int, reason: str
) -> None:
    """ResNet50 and ImageNet on eight H200, in three sizes."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    course = dataclasses.replace(
        COURSE,
        items_per_step=2048,
        total_steps=626 * num_epochs,
        flops_per_item=24.6e9,
        world_size=8,
        device=torch.device("cuda"),
    )
    assert course.why_not_compile(0, num_shapes=3) == reason
    assert "less than it takes" in course.why_not_compile(course.total_steps - 9, num_shapes=1)
