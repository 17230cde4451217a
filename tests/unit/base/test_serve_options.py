from penstock.base.serve_options import serve_options


def test_a_deployment_has_one_replica_that_takes_next_to_no_cpu_and_may_run_anywhere() -> None:
    assert serve_options("gateway", 12.5) == {
        "name": "gateway",
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0.001},
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_timeout_s": 12.5,
        "graceful_shutdown_wait_loop_s": 0.1,
        "logging_config": {"enable_access_log": False},
    }


def test_gpus_and_a_resource_are_each_replica_s() -> None:
    options = serve_options("replica", 5, num_replicas=3, num_gpus=0.5, resource="penstock-edge")

    assert options["num_replicas"] == 3
    assert options["ray_actor_options"] == {"num_cpus": 0.001, "num_gpus": 0.5, "resources": {"penstock-edge": 1}}


def test_health_checks_may_be_closer() -> None:
    options = serve_options("gateway", 5, health_period_s=0.5, health_timeout_s=5.0)

    assert (options["health_check_period_s"], options["health_check_timeout_s"]) == (0.5, 5.0)
