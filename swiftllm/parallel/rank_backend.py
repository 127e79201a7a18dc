"""The backend of one rank: :class:`TorchBackend` on the rank's part of the model."""

from __future__ import annotations

from swiftllm.config import EngineConfig
from swiftllm.device.device import Device
from swiftllm.model.config import ModelConfig
from swiftllm.model.loaded_weights import LoadedWeights, read_weights
from swiftllm.parallel.group import Group
from swiftllm.parallel.shards import Shard, ShardedWeights
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.runtime.workers.interface import MakeWorker


class RankBackend(TorchBackend):
    """What all ranks have in common. A rank loads alone; it has joined the others before it allocates its KV cache."""

    graphs: LayerGraphs | None = None

    def __init__(
        self, config: EngineConfig, shard: Shard, group: Group, make_worker: MakeWorker, hardware: Device
    ) -> None:
        self.group = group
        self._shard = shard
        super().__init__(config, make_worker, hardware)

    def _sizes(self) -> ModelConfig:
        return self._shard.sizes

    def _free_bytes(self) -> int:
        return self._share_of_host(self.hardware.free_bytes())

    def _share_of_host(self, num_bytes: int) -> int:
        """Of memory that is the host's, since all ranks load at the same time; a GPU's memory is its rank's alone."""
        return num_bytes // self.group.size if self.device.type == "cpu" else num_bytes

    def _open_weights(self, config: EngineConfig) -> LoadedWeights:
        weights = read_weights(config, self.model_config, self.device, self.dtype, self._shard)
        return ShardedWeights(self._shard.sizes, weights, self._ops, self.group, self.model_config.vocab_size)

    def _capture_graphs(self) -> None:
        """Captured graphs hold the communicator: they are captured again after every :meth:`rejoin`."""
        if self.graphs is not None:
            self.graphs.all_agree = self.group.all_agree
        super()._capture_graphs()

    def leave(self) -> None:
        """See :meth:`Group.leave`. Captured graphs go first, since they hold the communicator. From any thread."""
        if self.graphs is not None:
            self.graphs.close()
        self.group.leave()

    def rejoin(self, epoch: int) -> None:
        """Join the ranks anew, after :meth:`leave`."""
        self.group.join(epoch)
        self._capture_graphs()
