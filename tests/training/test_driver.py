"""What a run's command needs lives on its own node: every other node may be lost."""

import pytest

from training.runtime import trainer


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_events_do_not_go_with_another_node() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.state import list_actors

    # As in a job: a head that only coordinates. Left to itself, Ray would put some elsewhere.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        actors = [trainer.start_events() for _ in range(5)]
        assert ray.get([each.put.remote([{}]) for each in actors]) == [False] * 5
        places = [each.node_id for each in list_actors(filters=[("class_name", "=", "_Events")])]
        assert places == [ray.get_runtime_context().get_node_id()] * 5
    finally:
        ray.shutdown()
        cluster.shutdown()
