"""Each paid second of a job has one use, and their sum is what the job is billed for."""

import pytest

from training.record.goodput import Activity, Paid, Recorder, Segment, goodput, words

HEAD = Paid(is_head=True, pulled=0, started=10, ended=1000)


def worker(pulled: float, started: float | None, ended: float) -> Paid:
    return Paid(is_head=False, pulled=pulled, started=started, ended=ended)


def used(
    *paid: Paid, segments: tuple[Segment, ...] = (), least: int = 1, held: float | None = None
) -> dict[str, float]:
    """Uses that took any time; of a job that is over."""
    activity = Activity(segments=segments)
    assert Activity.from_json(activity.to_json()) == activity
    found = goodput(paid, activity, least=least, is_over=True, held=held)
    assert sum(found.values()) == pytest.approx(sum(each.ended - each.pulled for each in paid))
    return {use: seconds for use, seconds in found.items() if seconds}


def test_a_life_without_trouble_waits_starts_steps_saves_and_ends() -> None:
    trained = Segment(began=150, stepped=200, last=800, ended=850, saved=900, step=10, is_last=True)
    assert used(HEAD, worker(50, 100, 960), segments=(trained,)) == {
        "pulling": 10 + 50,
        "waiting": 90,  # the head, for its worker
        "starting": 2 * 100,
        "steps": 2 * 600,
        "saving": 2 * 50,
        "ending": 2 * 50 + 100 + 60,
    }


def test_steps_that_are_trained_again_are_lost_and_what_saves_holds_up_is_saving() -> None:
    recorder = Recorder()
    recorder.begin(100)
    for step in range(1, 12):
        recorder.step(100 + 10 * step, step)
    recorder.save(20)
    recorder.begin(300, first=6)  # a worker is lost: the checkpoint of step 6 counts
    recorder.step(310, 7)
    recorder.step(410, 17)
    recorder.end(410)
    recorder.close(410, is_last=True)
    found = used(HEAD, segments=recorder.activity.segments, least=0)
    saving = 20 / 100  # of the time from the first step to the last
    assert found == {
        "pulling": 10,
        "starting": 100 + (310 - 210),
        "steps": pytest.approx((160 - 110) * (1 - saving) + 100),
        "saving": pytest.approx(50 * saving),
        "lost": 210 - 160,
        "ending": 1000 - 410,
    }
    recorder.begin(420, first=6)  # another head, and that checkpoint again
    assert recorder.activity.segments[-1].resumes == 160


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        (
            Segment(began=100, stepped=200, last=300, ended=900, step=9, hung_s=600),
            {"starting": 190, "steps": 100, "hung": 600, "ending": 100},
        ),
        (Segment(began=100, ended=900, hung_s=600), {"uncounted": 200, "hung": 600}),
        (Segment(began=100, ended=900), {"starting": 90, "uncounted": 800, "ending": 100}),
        (Segment(began=100), {"starting": 90, "uncounted": 900}),  # its head was killed
        (Segment(began=100, stepped=200, last=990, step=9), {"starting": 190, "steps": 800}),
    ],
    ids=["hung", "hung before a step", "without counted steps", "killed", "killed in steps"],
)
def test_a_program_is_hung_or_has_no_steps_that_are_counted(
    segment: Segment, expected: dict[str, float]
) -> None:
    found = used(HEAD, segments=(segment,), least=0)
    assert found | expected == found


def test_a_node_that_joins_while_others_train_waits_for_the_next_start() -> None:
    first = Segment(began=100, stepped=100, last=500, ended=500, step=5)
    second = Segment(began=600, stepped=600, last=1000, ended=1000, step=5, resumes=500)
    found = used(HEAD, worker(0, 50, 1000), worker(300, 400, 1000), segments=(first, second))
    assert found["waiting"] == 40 + 100
    assert found["steps"] == 2 * 800 + 400
    assert found["starting"] == 2 * 50 + 3 * 100


def test_a_lost_head_ends_its_segment_and_the_next_one_continues() -> None:
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
    recorder.end(950)
    found = used(*heads, worker(0, 0, 1000), segments=recorder.activity.segments)
    assert found["lost"] == 2 * (300 - 200)
    assert found["steps"] == 2 * (50 + 300)
    assert found["waiting"] == 150  # the worker, until the second head runs


def test_held_hosts_and_jobs_without_a_start_are_explained() -> None:
    failed = Segment(began=100, ended=200, is_last=True)
    assert used(HEAD, segments=(failed,), least=0, held=210)["held"] == 790
    assert used(HEAD, worker(0, None, 500)) == {"pulling": 510, "waiting": 990}


def test_words_name_what_took_a_share() -> None:
    assert words({"steps": 2700.0, "lost": 900.0, "held": 1.0}) == (
        "steps 74.98%, steps that were lost 24.99% of 1.00 host hours"
    )
    assert words({}) == ""
