"""Loads a rank's part of the model. A rank loads alone, and all load at the same time."""

from __future__ import annotations

from swiftllm.config import EngineConfig
from swiftllm.device.device import Device
from swiftllm.kv.budget import check_weights
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.stages.loaded_weights import read_weights
from swiftllm.model.stages.placement import all_resident
from swiftllm.parallel.group import Group
from swiftllm.parallel.shards import Shard, ShardedWeights
from swiftllm.runtime.loaded_model import LoadedModel
from swiftllm.runtime.processors import ExecutionContext


def load_rank(config: EngineConfig, hardware: Device, group: Group) -> LoadedModel:
    """The part of the model that is this rank's, all of it on its device.

    Raises:
        ValueError: the model cannot be divided among so many ranks.
        InsufficientMemory: the part does not fit.
    """
    processors, model = ExecutionContext(config, hardware), ModelConfig.from_folder(config.model)
    shard = Shard(model, group.rank, group.size)
    device, dtype, free_bytes = hardware.torch_device, processors.dtype, hardware.free_bytes()
    if device.type == "cpu":  # a host's memory is that of all ranks
        free_bytes //= group.size
    check_weights(shard.sizes, dtype, free_bytes)
    tensors = read_weights(config, model, device, dtype, shard)
    weights = ShardedWeights(shard.sizes, tensors, processors.ops, group, model.vocab_size)
    placement = all_resident(model.num_layers)
    loaded = LoadedModel(config, processors, model, shard.sizes, weights, placement, group.all_agree)
    group.graphs = loaded.graphs
    return loaded
