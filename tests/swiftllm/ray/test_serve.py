"""The Ray Serve application: its arguments. Runs where the extra ray-serve is installed."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture
def application():
    try:
        from swiftllm.server.ray_serve import application
    except ValueError as error:  # its packages are missing
        pytest.skip(str(error))
    return application


def test_arguments_of_a_command_line_become_fields_of_the_engine(application) -> None:
    built = application({"model": "m", "num_cpu_blocks": "12", "num_replicas": "2", "gpus_per_replica": "0.5"})
    deployment = built._bound_deployment
    assert deployment.num_replicas == 2
    assert deployment.ray_actor_options == {"num_gpus": 0.5, "num_cpus": 1.0}


def test_unknown_and_invalid_arguments_are_refused(application) -> None:
    with pytest.raises(ValueError, match="unknown arguments gpu_blocks: give fields of EngineConfig"):
        application({"model": "m", "gpu_blocks": "12"})
    with pytest.raises(ValueError, match="num_cpu_blocks"):
        application({"model": "m", "num_cpu_blocks": "many"})


def test_without_its_packages_the_message_names_the_extra() -> None:
    if importlib.util.find_spec("grpc"):
        pytest.skip("the extra ray-serve is installed")
    with pytest.raises(ValueError, match=r"apex-llm-serving\[ray-serve\]"):
        importlib.import_module("swiftllm.server.ray_serve")
