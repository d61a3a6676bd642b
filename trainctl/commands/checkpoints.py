"""``trainctl checkpoints``: the checkpoints that a run can resume from."""

from dataclasses import asdict

from contract.text import byte_size, utc
from trainctl import output
from trainctl.options import AsJson, RunName, Where
from trainctl.runs import run_list


def checkpoints(
    *,
    run: RunName,
    as_json: AsJson = False,
    where: Where,
) -> None:
    """List the checkpoints of a recipe's run, newest first.

    A run resumes from the newest complete one. What your own program saves: trainctl download.
    """
    found = run_list.checkpoints(where.find().bucket, run)
    first = next((each for each in found if each.is_complete), None)
    if as_json:
        output.print_json(
            [
                {**asdict(each), "saved": each.saved.isoformat(), "is_next": each is first}
                for each in found
            ]
        )
        return
    if not found:
        output.print_text(
            f"Run {run} has no checkpoints of a recipe. Files of your own program: "
            + output.addressed(f"trainctl download {run}")
        )
        return
    rows = [
        [f"{each.step:,}", utc(each.saved), byte_size(each.size), _state(each, first)]
        for each in found
    ]
    output.print_table(["step", "saved", "size", "state"], rows, prose=["state"])


def _state(each: run_list.Checkpoint, first: run_list.Checkpoint | None) -> str:
    if each is first:
        return "complete; the run resumes from it"
    return "complete" if each.is_complete else "not complete, not used"
