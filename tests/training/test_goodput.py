"""Goodput is the share of a job's paid time that was training, and counts nothing twice."""

import pytest

from training.record.goodput import Activity, Paid, Recorder, Segment, goodput

HEAD = Paid(is_head=True, pulled=0, started=10, ended=1000)


def worker(pulled: float, started: float | None, ended: float) -> Paid:
    return Paid(is_head=False, pulled=pulled, started=started, ended=ended)


def trained(*paid: Paid, segments: tuple[Segment, ...] = ()) -> float:
    """Seconds of training."""
    activity = Activity(segments=segments)
    assert Activity.from_json(activity.to_json()) == activity
    share = goodput(paid, activity)
    assert share is not None
    return share * sum(node.ended - node.pulled for node in paid)


def test_all_nodes_train_from_the_first_step_to_the_last() -> None:
    segment = Segment(began=150, stepped=200, last=800, step=10)
    assert trained(HEAD, worker(50, 100, 960), segments=(segment,)) == pytest.approx(2 * 600)
    assert trained(HEAD, worker(50, None, 960), segments=(segment,)) == pytest.approx(600)


def test_steps_that_are_trained_again_and_waiting_for_saves_do_not_count() -> None:
    recorder = Recorder()
    recorder.save(5)
    recorder.step(50, 1)
    assert recorder.activity == Activity(), "nothing has started"
    recorder.begin(100)
    for step in range(1, 12):
        recorder.step(100 + 10 * step, step)
    recorder.save(20)
    recorder.begin(300, first=6)  # a worker is lost: the checkpoint of step 6 counts
    recorder.step(310, 7)
    recorder.step(410, 17)
    saving = 20 / 100  # of the time from the first step to the last
    found = trained(HEAD, segments=recorder.activity.segments)
    assert found == pytest.approx((160 - 110) * (1 - saving) + 100)
    recorder.begin(420, first=6)  # another head, and that checkpoint again
    assert recorder.activity.segments[-1].resumes == 160


def test_a_node_that_joins_while_others_train_waits_for_the_next_start() -> None:
    first = Segment(began=100, stepped=100, last=500, step=5)
    second = Segment(began=600, stepped=600, last=1000, step=5, resumes=500)
    nodes = HEAD, worker(0, 50, 1000), worker(300, 400, 1000)
    assert trained(*nodes, segments=(first, second)) == pytest.approx(2 * 800 + 400)


@pytest.mark.parametrize("segments", [(), (Segment(began=100),)], ids=["no start", "no step"])
def test_there_is_no_figure_without_counted_steps(segments: tuple[Segment, ...]) -> None:
    assert goodput([HEAD], Activity(segments=segments)) is None


def test_an_activity_of_an_older_release_is_read_without_what_it_has_no_field_for() -> None:
    older = {"began": 1.0, "stepped": 2.0, "ended": 9.0, "saved": 9.5, "hung_s": 3.0}
    found = Activity.from_json({"segments": [{**older, "is_last": True}], "nodes": ["10.0.0.1"]})
    assert found == Activity(segments=(Segment(began=1, stepped=2),), nodes=("10.0.0.1",))


def test_the_next_head_continues() -> None:
    heads = [
        Paid(is_head=True, pulled=0, started=0, ended=300),
        Paid(is_head=True, pulled=400, started=450, ended=1000),
    ]
    recorder = Recorder()
    recorder.begin(100, resumes=0)
    recorder.step(150, 1)
    recorder.step(280, 9)
    recorder = Recorder(recorder.activity)
    recorder.begin(500, resumes=200)
    recorder.step(600, 1)
    recorder.step(900, 7)
    found = trained(*heads, worker(0, 0, 1000), segments=recorder.activity.segments)
    assert found == pytest.approx(2 * (50 + 300))
