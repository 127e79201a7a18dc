"""Every system gives the greedy tokens that were recorded, and those that offload did so meanwhile."""

from pathlib import Path

import pytest

from tests.golden import record
from tests.golden.plans import SYSTEMS
from tests.golden.tokens import ON_THE_GPU, tokens
from tests.reference.tiny_model import make_tiny_llama


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_tokens_are_those_recorded(model_dir: Path, system: str) -> None:
    put_out, offloading = tokens(model_dir, system)
    assert put_out == record.read("tokens")
    assert (offloading > 0) == (system not in ON_THE_GPU)
