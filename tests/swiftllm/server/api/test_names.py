"""The names of the model that is served, and the fingerprint of what serves it."""

from __future__ import annotations

import pytest

from swiftllm.server.context import fingerprint_of, is_of_folder
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.api.test_errors import COMPLETIONS, error_of, fake_service
from tests.swiftllm.server.http_server import running


def test_a_model_has_several_names_and_the_path_that_was_served(tmp_path):
    """vLLM's: each name is taken and listed, and answers have the first. Without names, vLLM's name is the path."""
    service = fake_service()
    service.engine._description["model"] = str(tmp_path)
    with running(service, ServerSettings(served_model_name=("m", "n", "m"))) as server:
        card, other = server.http.get("/v1/models").json()["data"]
        assert (card["id"], other["id"]) == ("m", "n") and card["root"] == other["root"] == str(tmp_path)
        for name in ("m", "n", str(tmp_path), f"{tmp_path}/", "", None):
            answer = server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 1, "model": name}).json()
            assert answer["model"] == "m"
        assert server.http.get(f"/v1/models/{tmp_path}").json()["id"] == str(tmp_path)
        for name in (tmp_path.name, str(tmp_path.parent), "~nobody/m", "~\0"):
            error = error_of(server.post(COMPLETIONS, {"prompt": [5], "model": name}), 404)
            assert "serves 'm' or 'n'" in error["message"]


def test_a_model_of_the_hub_keeps_its_name():
    folder = "/cache/models--meta--Llama/snapshots/abc"
    assert is_of_folder("meta/Llama", folder) and is_of_folder(folder, folder) and not is_of_folder("Llama", folder)


def test_answers_have_the_fingerprint_of_what_served_them():
    """OpenAI's: the same as long as equal seeds give equal outputs."""
    description = {"system": "vllm", "dtype": "float32", "num_gpu_blocks": 8}
    assert fingerprint_of(description) == fingerprint_of({**description, "num_gpu_blocks": 9}) != fingerprint_of({})
    with running(fake_service()) as server:
        body = {"prompt": [5], "max_tokens": 2}
        stream = server.post(COMPLETIONS, {**body, "stream": True}).text
        mark = server.post(COMPLETIONS, body).json()["system_fingerprint"]
        assert mark.startswith("fp_") and stream.count(mark) == stream.count("data: {")


def test_names_of_the_model_are_checked():
    assert ServerSettings(served_model_name="m").served_model_name == ("m",)
    with pytest.raises(ValueError, match="served_model_name has an empty name"):
        ServerSettings(served_model_name=("m", ""))
